"""What a rank reports that is preempted and cannot save."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from drumline.distributed.start.rank_store import host_store
from drumline.distributed.stop_vote import StopVote
from drumline.engine import preemption
from drumline.engine.preemption import Preemption
from drumline.net.sealed_store import SealedStore


class GivenUp:
    """A vote that ended without a step to stop at."""

    is_decided, stop = True, None

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
    one._place, one._first = {"host": "node-a", "rank": 0}, (signal.SIGTERM, 0.0)
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
    one._place, one._store, one._is_joined = {"host": f"node-{number}", "rank": number}, store, True
    one._vote = StopVote(store, rank=number, world_size=3, step=lambda: 7)
    one._nodes, one._node, one._local_ranks = [f"asked/{node}" for node in range(3)], number, [f"pid/{number}"]
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
    assert (ended, [one.is_asked for one in some]) == ([], [False] * 3), "the others may be asked, too"
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
