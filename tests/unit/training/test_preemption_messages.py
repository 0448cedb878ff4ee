"""What a rank reports that is preempted and cannot save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from drumline.rank.rendezvous.rank_store import host_store
from drumline.rank.sealed_store import SealedStore
from drumline.rank.stop_vote import StopVote
from drumline.rank.tcp_store import open_tcp_store
from drumline.training.between_steps import preemption
from drumline.training.between_steps.preemption import Preemption
from drumline.training.job.job import Progress


class GivenUp:
    """A vote that ended without a step to stop at."""

    is_decided = True
    stop = None

    def __init__(self, told: int) -> None:
        self.cause = {"signal": "SIGTERM", "host": "node-a", "rank": told}

    def tick(self) -> bool:
        return False

    def missing_ranks(self) -> list[int]:
        return [1, 4, 5, 6]


@pytest.mark.parametrize("told", [0, 3])
def test_ranks_that_do_not_answer_are_named_by_the_one_that_asked_first(
    told: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one: Any = Preemption()
    one._place = {"host": "node-a", "rank": 0}
    one._first = (signal.SIGTERM, 0.0)
    one._vote = GivenUp(told)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    one._tick()
    assert ended == [143]
    assert "".join(capfd.readouterr()) == (
        ""
        if told
        else "drumline: rank 0 on node-a received SIGTERM and exits without a save: ranks 1, 4-6 did not answer\n"
        "  try: find out what blocks ranks 1, 4-6; rerun the same command to resume from the newest checkpoint\n"
    )


def test_a_notice_that_the_others_do_not_answer_is_reported_once_and_the_run_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one: Any = Preemption()
    one._place, one._vote = {"host": "node-a", "rank": 0}, GivenUp(0)
    one._vote.cause["signal"] = "a notice at leave.txt"
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    one._tick()
    one._tick()
    assert (ended, one.is_asked) == ([], False)
    assert [record.getMessage() for record in caplog.records] == [
        "received a notice at leave.txt, but ranks 1, 4-6 did not answer: the run continues; if the machine is "
        "reclaimed, the steps after the newest checkpoint are lost"
    ]


def on_three_nodes(store: SealedStore, number: int) -> Any:
    one: Any = Preemption()
    one._place = {"host": f"node-{number}", "rank": number}
    one._store = store
    one._is_joined = True
    one._vote = StopVote(store, rank=number, world_size=3, step=lambda: 7)
    one._may_leave = True
    one._nodes = [f"asked/{node}" for node in range(3)]
    one._own_node = f"asked/{number}"
    one._local_ranks = [f"pid/{number}"]
    return one


def test_a_node_that_is_asked_alone_leaves_and_all_that_are_asked_stop_together(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(preemption, "ALL_NODES_S", 1000.0)
    store = SealedStore(host_store("127.0.0.1", 0, timeout_s=30)[0], None)
    some = [on_three_nodes(store, number) for number in range(3)]
    some[2]._receive(signal.SIGTERM)
    for one in some:
        one._tick()
    assert (ended, [one.is_asked for one in some]) == ([], [False] * 3), (
        "the others may be asked, too"
    )
    some[2]._node_asked_at -= preemption.ALL_NODES_S
    for one in some:
        one._tick()
    assert (ended, [one.is_asked for one in some]) == ([75], [False] * 3)
    message = "drumline: node-2 received SIGTERM and leaves; the other nodes continue without it\n"
    assert "".join(capfd.readouterr()) == message
    for one in some[:2]:
        one._receive(signal.SIGTERM)
    for one in [*some, *some]:
        one._tick()
    assert (ended, [one.is_asked for one in some]) == ([75], [True] * 3)


def test_a_node_that_leaves_shows_what_its_code_has_printed(
    monkeypatch: pytest.MonkeyPatch, ended: list[int], tmp_path: Path
) -> None:
    monkeypatch.setattr(preemption, "ALL_NODES_S", -1.0)
    one = on_three_nodes(SealedStore(host_store("127.0.0.1", 0, timeout_s=30)[0], None), 2)
    with (tmp_path / "printed").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        print("loss 0.5")
        one._receive(signal.SIGTERM)
        one._tick()
        assert ((tmp_path / "printed").read_text(), ended) == ("loss 0.5\n", [75])


def in_a_group(one: Any, store: SealedStore, *, rank: int, num_nodes: int) -> None:
    connection = SimpleNamespace(store=store)
    ddp: Any = SimpleNamespace(
        host="node-1", rank=rank, local_world_size=1, world_size=num_nodes, get_local_rank=lambda: 0,
        _connection=connection,
    )  # fmt: skip
    one._pipe = one._pipe or SimpleNamespace()
    one.join(ddp, Progress(step=7), may_leave=True)
    one.begin()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def with_a_lost_store() -> Any:
    """A node of two; the other one had the store, and is lost."""
    one: Any = Preemption()
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    in_a_group(
        one,
        SealedStore(open_tcp_store("127.0.0.1", server.port, timeout_s=30), None),
        rank=1,
        num_nodes=2,
    )
    del server
    return one


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_the_last_node_that_is_asked_while_nodes_change_saves_in_the_next_group(
    ended: list[int], is_asked_before: bool
) -> None:
    one = with_a_lost_store()
    if not is_asked_before:
        one._with_store(one._tick)
    one._receive(signal.SIGTERM)
    one._with_store(one._tick)
    assert (ended, one.is_asked, one.is_between_groups) == ([], False, True)
    in_a_group(
        one, SealedStore(host_store("127.0.0.1", 0, timeout_s=30)[0], None), rank=0, num_nodes=1
    )
    one._tick()
    assert (ended, one.is_asked) == ([], True)
    assert (one.cause["signal"], one.cause["rank"]) == ("SIGTERM", 0)


def test_a_rank_that_its_launcher_ends_while_nodes_change_exits_at_once(ended: list[int]) -> None:
    one = with_a_lost_store()
    with subprocess.Popen(["true"]) as other:
        pass
    one._local_pids = [other.pid]
    one._receive(signal.SIGTERM)
    assert ended == [143]


@pytest.mark.parametrize(
    ("number", "grace", "most", "least"),
    [
        (signal.SIGTERM, "15", 12.0, 0.0),  # a part is left for the exit
        (signal.SIGTERM, "", 20.0, 20.0),  # another launcher, which does not say
        (signal.SIGUSR1, "15", 20.0, 20.0),  # the sender allows time
    ],
)
def test_what_is_left_of_the_grace_period_is_for_the_mirror(
    number: signal.Signals, grace: str, most: float, least: float
) -> None:
    asked: Any = Preemption()
    asked.environment = {"DRUMLINE_GRACE_S": grace}
    asked._first = (number, time.monotonic())
    assert least <= asked.time_left_s() <= most
    asked._first = (number, time.monotonic() - 100.0)
    assert asked.time_left_s() == (0.0 if least == 0.0 else 20.0)
