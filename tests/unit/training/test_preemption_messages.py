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
from drumline.rank.tcp_store import open_tcp_store
from drumline.training.between_steps import preemption
from drumline.training.between_steps.preemption import Preemption, StopRequestWatcher
from drumline.training.job.job import Progress


class GivenUp:
    """A vote that ended without a step to stop at."""

    is_decided = True
    stop = None

    def __init__(self, asked_rank: int) -> None:
        self.cause = {"signal": "SIGTERM", "host": "node-a", "rank": asked_rank}

    def tick(self) -> bool:
        return False

    def missing_ranks(self) -> list[int]:
        return [1, 4, 5, 6]


def alone_with(vote: GivenUp) -> StopRequestWatcher:
    group: Any = SimpleNamespace(vote=vote, nodes=[], may_leave=False)
    watcher = StopRequestWatcher()
    watcher.join({"host": "node-a", "rank": 0}, group)
    return watcher


@pytest.mark.parametrize("asked_rank", [0, 3])
def test_ranks_that_do_not_answer_are_named_by_the_one_that_asked_first(
    asked_rank: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher = alone_with(GivenUp(asked_rank))
    watcher.first_signal = signal.SIGTERM
    watcher.received_at = 0.0
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    watcher.turn()
    assert ended == [143]
    assert "".join(capfd.readouterr()) == (
        ""
        if asked_rank
        else "drumline: rank 0 on node-a received SIGTERM and exits without a save: ranks 1, 4-6 did not answer\n"
        "  try: find out what blocks ranks 1, 4-6; rerun the same command to resume from the newest checkpoint\n"
    )


def test_a_notice_that_the_others_do_not_answer_is_reported_once_and_the_run_continues(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vote = GivenUp(0)
    vote.cause["signal"] = "a notice at leave.txt"
    watcher = alone_with(vote)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    watcher.turn()
    watcher.turn()
    assert ended == []
    assert [record.getMessage() for record in caplog.records] == [
        "received a notice at leave.txt, but ranks 1, 4-6 did not answer: the run continues; if the machine is "
        "reclaimed, the steps after the newest checkpoint are lost"
    ]


def on_three_nodes(store: SealedStore, number: int) -> Any:
    preempted: Any = Preemption()
    in_a_group(preempted, store, rank=number, num_nodes=3, host=f"node-{number}")
    return preempted


def test_a_node_that_is_asked_alone_leaves_and_all_that_are_asked_stop_together(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(preemption, "ALL_NODES_S", 1000.0)
    store = SealedStore(host_store("127.0.0.1", 0, timeout_s=30)[0], None)
    nodes = [on_three_nodes(store, number) for number in range(3)]
    nodes[2].watcher.turn([signal.SIGTERM])
    for node in nodes:
        node.watcher.turn()
    assert (ended, [node.is_asked for node in nodes]) == ([], [False] * 3), (
        "the others may be asked, too"
    )
    nodes[2].watcher._group.node_asked_at -= preemption.ALL_NODES_S
    for node in nodes:
        node.watcher.turn()
    assert (ended, [node.is_asked for node in nodes]) == ([75], [False] * 3)
    message = "drumline: node-2 received SIGTERM and leaves; the other nodes continue without it\n"
    assert "".join(capfd.readouterr()) == message
    for node in nodes[:2]:
        node.watcher.turn([signal.SIGTERM])
    for node in [*nodes, *nodes, *nodes]:
        node.watcher.turn()
    assert (ended, [node.is_asked for node in nodes]) == ([75], [True] * 3)


def test_a_node_that_leaves_shows_what_its_code_has_printed(
    monkeypatch: pytest.MonkeyPatch, ended: list[int], tmp_path: Path
) -> None:
    monkeypatch.setattr(preemption, "ALL_NODES_S", -1.0)
    preempted = on_three_nodes(SealedStore(host_store("127.0.0.1", 0, timeout_s=30)[0], None), 2)
    with (tmp_path / "printed").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        print("loss 0.5")
        preempted.watcher.turn([signal.SIGTERM])
        assert ((tmp_path / "printed").read_text(), ended) == ("loss 0.5\n", [75])


def in_a_group(
    preempted: Any, store: SealedStore, *, rank: int, num_nodes: int, host: str = "node-1"
) -> None:
    connection = SimpleNamespace(store=store)
    ddp: Any = SimpleNamespace(
        host=host, rank=rank, local_world_size=1, world_size=num_nodes, get_local_rank=lambda: 0,
        connection=connection,
    )  # fmt: skip
    preempted.watcher.pipe = SimpleNamespace()
    preempted.join(ddp, Progress(step=7), may_leave=True)
    preempted.begin()
    preempted.watcher._take_events()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    return codes


def with_a_lost_store() -> Any:
    """A node of two; the other one had the store, and is lost."""
    preempted: Any = Preemption()
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    in_a_group(
        preempted,
        SealedStore(open_tcp_store("127.0.0.1", server.port, timeout_s=30), None),
        rank=1,
        num_nodes=2,
    )
    del server
    return preempted


@pytest.mark.parametrize("is_asked_before", [True, False])
def test_the_last_node_that_is_asked_while_nodes_change_saves_in_the_next_group(
    ended: list[int], is_asked_before: bool
) -> None:
    preempted = with_a_lost_store()
    if not is_asked_before:
        preempted.watcher.turn()
    preempted.watcher.turn([signal.SIGTERM])
    assert (ended, preempted.is_asked, preempted.watcher.is_between_groups) == ([], False, True)
    in_a_group(
        preempted,
        SealedStore(host_store("127.0.0.1", 0, timeout_s=30)[0], None),
        rank=0,
        num_nodes=1,
    )
    for _ in range(3):  # it joins, proposes and answers
        preempted.watcher.turn()
    assert (ended, preempted.is_asked) == ([], True)
    assert (preempted.cause["signal"], preempted.cause["rank"]) == ("SIGTERM", 0)


def test_a_rank_that_its_launcher_ends_while_nodes_change_exits_at_once(ended: list[int]) -> None:
    preempted = with_a_lost_store()
    with subprocess.Popen(["true"]) as other:
        pass
    preempted.watcher._group.local_pids = [other.pid]
    preempted.watcher.turn([signal.SIGTERM])
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
    preempted = Preemption({"DRUMLINE_GRACE_S": grace})
    preempted.watcher.first_signal = number
    preempted.watcher.received_at = time.monotonic()
    assert least <= preempted.time_left_s() <= most
    preempted.watcher.first_signal = number
    preempted.watcher.received_at = time.monotonic() - 100.0
    assert preempted.time_left_s() == (0.0 if least == 0.0 else 20.0)
