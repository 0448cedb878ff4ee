"""When a sidecar exits, and what it reports of itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from drumline.watch.cluster_state import RankState
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase
from drumline.watch.sidecar.leader import FIRST_CONNECTION_S, Leader
from drumline.watch.sidecar.local_ranks import LocalRanks
from drumline.watch.sidecar.main import LINGER_S, Sidecar
from drumline.watch.sidecar.sidecar_network import SidecarNetwork
from drumline.watch.sidecar.sidecar_options import Peer, SidecarOptions
from drumline.watch.sidecar.sidecar_reporter import SidecarReporter
from drumline.watch.watch_folder import claim_report


@dataclass
class Ranks:
    """Of this node, and what was reported of the run."""

    have_started: bool = True
    are_done: bool = False
    has_acted: bool = False
    all_left: bool = False

    def all_have_left(self) -> bool:
        return self.all_left


def sidecar_of(
    folder: Path, ranks: Ranks, *, is_requested: bool = False, has_lost_starter: bool = False
) -> Sidecar:
    (folder / "sidecar.pid").write_text(str(os.getpid()))
    sidecar = Sidecar(options_of(folder))
    sidecar.ranks = cast(Any, ranks)
    sidecar.leader = cast(Any, ranks)
    sidecar.is_requested = is_requested
    sidecar.has_lost_starter = has_lost_starter
    return sidecar


@pytest.mark.parametrize(
    ("ranks", "signs", "at_once", "later"),
    [
        (Ranks(), {}, False, False),
        (Ranks(), {"is_requested": True}, False, False),
        (Ranks(), {"has_lost_starter": True}, False, False),
        (Ranks(has_acted=True), {}, False, False),
        (Ranks(has_acted=True), {"is_requested": True}, True, True),
        (Ranks(are_done=True, all_left=True), {}, True, True),
        (Ranks(are_done=True), {}, False, True),
        (Ranks(are_done=True, has_acted=True), {}, True, True),
        (Ranks(have_started=False), {}, False, False),
        (Ranks(have_started=False), {"is_requested": True}, False, False),
        (Ranks(have_started=False, all_left=True), {"has_lost_starter": True}, False, True),
        (Ranks(have_started=False), {"has_lost_starter": True, "is_requested": True}, True, True),
    ],
)
def test_a_sidecar_ends_when_nothing_is_left_to_say(
    tmp_path: Path, ranks: Ranks, signs: dict[str, bool], at_once: bool, later: bool
) -> None:
    sidecar = sidecar_of(tmp_path, ranks, **signs)
    assert sidecar.is_over(100.0) is at_once
    assert sidecar.is_over(100.0 + LINGER_S / 2) is at_once
    assert sidecar.is_over(100.1 + LINGER_S) is later


@pytest.mark.parametrize(
    ("kind", "at_once"), [(FailureKind.INTERRUPTED, True), (FailureKind.OTHER, False)]
)
def test_ranks_that_the_user_interrupts_need_no_report(
    tmp_path: Path, kind: FailureKind, at_once: bool
) -> None:
    sidecar = Sidecar(options_of(tmp_path))
    rank = RankState(rank=0, host="node-a", pid=1, phase=Phase.FAILED, state="X", failure_kind=kind)
    sidecar.ranks.state = replace(sidecar.ranks.state, ranks=(rank,))
    (tmp_path / "sidecar.pid").write_text(str(os.getpid()))
    assert sidecar.is_over(1.0) is at_once


def test_a_sidecar_whose_place_is_taken_or_gone_leaves_at_once(tmp_path: Path) -> None:
    sidecar = sidecar_of(tmp_path, Ranks())
    assert not sidecar.is_over(0.0)
    (tmp_path / "sidecar.pid").write_text(str(os.getppid()))
    assert sidecar.is_over(0.2)
    (tmp_path / "sidecar.pid").unlink()
    assert sidecar.is_over(0.4)


def options_of(folder: Path) -> SidecarOptions:
    run = str(folder / "run")
    return SidecarOptions(
        folder=str(folder),
        owns_folder=False,
        node=0,
        host="node-a",
        ranks=(0,),
        world_size=1,
        run=run,
    )


def _handles(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_signals_while_it_exits_print_nothing(tmp_path: Path) -> None:
    """The launcher may send SIGTERM to all ranks at any moment."""
    sidecar = subprocess.Popen(
        [sys.executable, "-c", "from drumline.watch.sidecar.main import main; main()"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert sidecar.stdin is not None
    sidecar.stdin.write(json.dumps(asdict(options_of(tmp_path))) + "\n")
    sidecar.stdin.flush()
    while not _handles(sidecar.pid, signal.SIGTERM):
        assert sidecar.poll() is None
        time.sleep(0.01)
    sidecar.stdin.close()
    sidecar.stdin = None
    while sidecar.poll() is None:
        sidecar.send_signal(signal.SIGTERM)
        time.sleep(1e-5)  # it must have time to exit
    assert sidecar.communicate()[1] == ""
    assert sidecar.returncode == 0


def test_an_error_of_its_own_is_reported_once_and_it_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail() -> None:
        raise KeyError("heartbeat")

    async def run() -> None:
        sidecar = Sidecar(options_of(tmp_path))
        for _ in range(3):
            asyncio.ensure_future(fail()).add_done_callback(sidecar._report_error)
        await asyncio.sleep(0.05)

    asyncio.run(run())
    (line,) = capsys.readouterr().err.splitlines()
    text = "drumline: the sidecar on node-a had an error, and continues: KeyError: 'heartbeat' (test_exit_condition.py"
    assert line.startswith(text)


def test_a_failure_that_the_launcher_has_reported_is_not_printed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = SidecarReporter(options_of(tmp_path))
    assert claim_report(Path(options_of(tmp_path).folder)), "the launcher asks first"
    reporter.print_alarm("failure", "failure: rank 1 was killed")
    reporter.print_alarm("stall", "stall: rank 1 waits")
    assert capsys.readouterr().err == "drumline: stall: rank 1 waits\n"
    assert not claim_report(Path(options_of(tmp_path).folder))


def test_a_run_folder_that_takes_nothing_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "watch").touch()  # no folder can be made there

    async def run() -> None:
        reporter = SidecarReporter(options_of(tmp_path))
        for _ in range(3):
            reporter.write_status({})
            await reporter.drain()

    asyncio.run(run())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("drumline: the watchdog could not write to the run folder: ")


def test_nodes_that_never_connected_are_a_warning_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = [
        Peer(number, f"node-{number}", f"10.0.0.{number}", 4000 + number) for number in range(1, 7)
    ]
    network = SidecarNetwork(
        me=0, peers=peers, secret=b"", on_message=lambda node, message: None, listener=None
    )
    network._heard_at[6] = 0.0
    network._results[1] = "timed out"
    options = options_of(tmp_path)
    leader = Leader(
        options, LocalRanks(options), network, SidecarReporter(options), lambda *_: None
    )
    leader._check_connections(FIRST_CONNECTION_S - 1)
    assert leader.notices == []
    for _ in range(2):
        leader._check_connections(FIRST_CONNECTION_S + 1)
    (notice,) = leader.notices
    warning = notice.message
    assert notice.kind == "warning"
    assert (
        "the sidecar on node-a has no connection with node-1 (10.0.0.1 port 4001: timed out), "
        in warning
    )
    assert "node-3 (10.0.0.3 port 4003) and 2 more: each side watches only its own ranks" in warning
    assert "Try: let hosts reach each other on all TCP ports" in warning
    assert capsys.readouterr().err == f"drumline: {warning}\n"
