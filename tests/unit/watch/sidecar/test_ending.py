"""When a sidecar is done, and what it says of itself when it is not well."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from drumline.watch.sidecar.channel import Channel, Peer
from drumline.watch.sidecar.ending import LINGER_S, Ending
from drumline.watch.sidecar.main import Sidecar
from drumline.watch.sidecar.telling import Teller
from drumline.watch.sidecar.terms import Terms
from drumline.watch.sidecar.unheard import PATIENCE_S, Unheard


@dataclass
class Ranks:
    """Of this node, and what was said of the run."""

    has_begun: bool = True
    is_over: bool = False
    ended_well: bool = False
    has_acted: bool = False
    others_left: bool = True

    def has_nobody_left(self) -> bool:
        return self.others_left


def ending(folder: Path, ranks: Ranks, *, is_told: bool = False, has_lost_starter: bool = False) -> Ending:
    (folder / "sidecar.pid").write_text(str(os.getpid()))
    one = Ending(folder, cast(Any, ranks), cast(Any, ranks))
    one.is_told, one.has_lost_starter = is_told, has_lost_starter
    return one


@pytest.mark.parametrize(
    ("ranks", "signs", "at_once", "later"),
    [
        (Ranks(), {}, False, False),
        (Ranks(), {"is_told": True}, False, False),
        (Ranks(), {"has_lost_starter": True}, False, False),
        (Ranks(has_acted=True), {}, False, False),
        (Ranks(has_acted=True), {"is_told": True}, True, True),
        (Ranks(is_over=True, ended_well=True), {}, True, True),
        (Ranks(is_over=True, ended_well=True, others_left=False), {}, False, True),
        (Ranks(is_over=True), {}, False, True),
        (Ranks(is_over=True, has_acted=True), {}, True, True),
        (Ranks(has_begun=False), {}, False, False),
        (Ranks(has_begun=False), {"is_told": True}, False, False),
        (Ranks(has_begun=False), {"has_lost_starter": True}, False, True),
        (Ranks(has_begun=False), {"has_lost_starter": True, "is_told": True}, True, True),
    ],
)
def test_a_sidecar_ends_when_nothing_is_left_to_say(
    tmp_path: Path, ranks: Ranks, signs: dict[str, bool], at_once: bool, later: bool
) -> None:
    one = ending(tmp_path, ranks, **signs)
    assert one.is_due(100.0) is at_once
    assert one.is_due(100.0 + LINGER_S / 2) is at_once
    assert one.is_due(100.1 + LINGER_S) is later


def test_a_sidecar_whose_place_is_taken_or_gone_leaves_at_once(tmp_path: Path) -> None:
    one = ending(tmp_path, Ranks())
    assert not one.is_due(0.0)
    (tmp_path / "sidecar.pid").write_text(str(os.getppid()))
    assert one.is_due(0.2)
    (tmp_path / "sidecar.pid").unlink()
    assert one.is_due(0.4)


def terms_of(folder: Path) -> Terms:
    run = str(folder / "run")
    return Terms(
        folder=str(folder), owns_folder=False, node=0, host="node-a", ranks=(0,), world_size=1, run=run
    )


def test_an_error_of_its_own_is_told_once_and_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail() -> None:
        raise KeyError("pulse")

    async def run() -> None:
        sidecar = Sidecar(terms_of(tmp_path))
        for _ in range(3):
            sidecar._spawn(fail())
        await asyncio.sleep(0.05)

    asyncio.run(run())
    (line,) = capsys.readouterr().err.splitlines()
    told = "drumline: the watch on node-a has an error of its own, and goes on: KeyError: 'pulse' (test_ending.py, "
    assert line.startswith(told)


def test_a_run_folder_that_takes_nothing_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "watch").touch()  # no folder can be made there

    async def run() -> None:
        teller = Teller(terms_of(tmp_path))
        for _ in range(3):
            teller.show_status({})
            await teller.drain()

    asyncio.run(run())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("drumline: the watch could not write to the run folder: ")


def test_a_node_that_was_never_heard_is_told_of_once() -> None:
    peers = [Peer(number, f"node-{number}", f"10.0.0.{number}", 4000 + number) for number in range(1, 6)]
    channel = Channel(me=0, peers=peers, secret=b"", on_message=lambda node, message: None, listener=None)
    channel._heard[5] = 0.0
    channel._how[1] = "timed out"
    unheard = Unheard("node-a")
    assert unheard.look(None, PATIENCE_S + 1) is None
    assert unheard.look(channel, PATIENCE_S - 1) is None
    warning = unheard.look(channel, PATIENCE_S + 1)
    assert warning is not None
    assert "the watch on node-a hears nothing of node-1 (10.0.0.1 port 4001: timed out), " in warning
    assert "node-3 (10.0.0.3 port 4003), 1 more: each side watches its own ranks alone" in warning
    assert "Next: let the hosts reach each other on all TCP ports" in warning
    assert unheard.look(channel, PATIENCE_S + 2) is None
