"""How the ranks of the next group of nodes find out who has what; and what is refused before the
first step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from drumline.base.errors import TrainingError, UsageError
from drumline.checkpoint import store
from drumline.rank.rendezvous.node_group import LiveNode, NodeGroup
from drumline.training.job.job import Job
from drumline.training.kept_state import (
    GroupState,
    KeptState,
    check_continues,
    check_newest,
    report_regrouped,
)
from drumline.training.run_context import RunContext


def state_at(step: int, finished: int | None = None) -> dict[str, Any]:
    cursor = {"epoch": 0, "position": step}
    return {
        "step": step, "finished_at": [step if finished is None else finished], "cursor": cursor, "saved_step": 1,
        "metrics": {}, "pending": [],
    }  # fmt: skip


def group_of(positions: list[dict[str, Any] | None], *, num_shards: int) -> GroupState:
    """Of all ranks, in their order; None: it has just joined."""
    return GroupState(
        {rank: position for rank, position in enumerate(positions) if position is not None},
        num_shards,
    )


def test_a_replica_that_missed_a_round_gets_the_shared_weights_and_a_new_one_all() -> None:
    group = group_of([state_at(10, 5), state_at(12, 10), None], num_shards=1)
    assert [group.source_of(rank) for rank in range(3)] == [1, 1, 1]
    assert [group.lacks(rank) for rank in range(3)] == ["shared", "", "all"]
    assert (group.progress.step, group.progress.cursor.position) == (12, 12)
    assert group_of([state_at(5, 5), state_at(5, 5)], num_shards=1).source_of(1) == 0


def test_a_replica_of_several_ranks_is_whole() -> None:
    group = group_of(
        [state_at(10, 5), state_at(10, 5), state_at(11, 5), state_at(10, 5), None, None],
        num_shards=1,
    )
    group.check_replica((0, 1))
    group.check_replica((4, 5))
    with pytest.raises(TrainingError) as refused:
        group.check_replica((2, 3))
    assert (
        refused.value.what
        == "rank 2 and rank 3 train one replica, and have left it at the steps 10 and 11"
    )
    assert (
        refused.value.next_step
        == "nothing: their launcher starts them again, and they join the other nodes"
    )


def test_shards_come_from_the_rank_with_the_same_ones() -> None:
    group = group_of([state_at(8), state_at(8), state_at(7), state_at(7), None, None], num_shards=2)
    assert [group.source_of(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [group.lacks(rank) for rank in range(6)] == ["", "", "all", "all", "all", "all"]


def test_a_step_that_no_node_has_whole_is_lost() -> None:
    group = group_of([state_at(8), state_at(7), state_at(7), state_at(7)], num_shards=2)
    with pytest.raises(TrainingError, match="shard 1 of step 8 is lost: no node has it") as refused:
        group.source_of(3)
    assert (
        refused.value.next_step
        == "nothing: the launchers restart all ranks from the newest checkpoint"
    )


def test_a_node_that_the_others_have_overtaken_does_not_continue_from_memory(
    tmp_path: Path,
) -> None:
    """Its process was stopped, and they have saved, and ended."""
    check_newest(tmp_path, group_of([state_at(8)], num_shards=1))
    store.write(tmp_path, 20, tensors={}, documents={"progress": {"step": 20}}, metrics={})
    check_newest(tmp_path, group_of([state_at(20)], num_shards=1))
    with pytest.raises(
        TrainingError, match=r"the run is at step 20 in .*, and this node at step 13: the "
    ) as refused:
        check_newest(tmp_path, group_of([state_at(13)], num_shards=1))
    assert (
        refused.value.next_step
        == "nothing: its launcher starts it again, and it resumes from there"
    )
    for file in tmp_path.glob("*/progress.json"):
        file.write_text("{}")
    # it is corrupt, and was so when the run resumed
    check_newest(tmp_path, group_of([state_at(13)], num_shards=1))


def test_a_group_that_trains_holds_no_second_copy() -> None:
    snapshot = store.Snapshot({"model": {"a": torch.ones(2)}}, {})
    replica = {"weights": [torch.ones(2)]}
    kept_state = KeptState({}, snapshot, replica, torch.zeros(1))
    kept_state.release()
    assert (snapshot.tensors, replica) == ({}, {})


def job_of(num_shards: int | None, local_ranks: int, stream: object = None) -> Job:
    sharded = (
        None if num_shards is None else SimpleNamespace(plan=SimpleNamespace(num_shards=num_shards))
    )
    ddp = SimpleNamespace(local_world_size=local_ranks)
    loader = SimpleNamespace(stream_state=lambda: stream)
    return cast(Job, SimpleNamespace(sharded=sharded, ddp=ddp, loader=loader))


def test_what_cannot_continue_is_refused() -> None:
    check_continues(job_of(None, 2))
    check_continues(job_of(2, 2))
    with pytest.raises(UsageError) as refused:
        check_continues(job_of(4, 2))
    assert "needs a whole model on each node, and 4 ranks hold one, with 2 on a node" in str(
        refused.value
    )
    assert "set --dist.shard_ranks 2" in str(refused.value.next_step)
    with pytest.raises(UsageError) as refused:
        check_continues(job_of(None, 1, stream={"at": 3}))
    assert "the training data is a stream with a state of its own on each rank" in str(
        refused.value
    )
    assert "use data with indices" in str(refused.value.next_step)


@pytest.mark.parametrize(
    ("lost", "joined", "text"),
    [
        ([1], [], "node 1 (b) was lost by step 7; the others continue"),
        ([1, 2], [], "node 1 (b) and node 2 (c) were lost by step 7; the others continue"),
        ([], [2], "node 2 (c) joined after step 7, from the memory of the others"),
        ([], [], "the same nodes continue after step 7: a connection between them was lost"),
        ([1], [1], "node 1 (b) joined after step 7, from the memory of the others"),
    ],
)
def test_one_sentence_for_what_has_changed(lost: list[int], joined: list[int], text: str) -> None:
    every = [LiveNode(number, "abc"[number], "127.0.0.1", 1, str(number)) for number in range(3)]
    names = [tuple(str(every[number]) for number in some) for some in (lost, joined)]
    events: list[dict[str, Any]] = []
    reporter = SimpleNamespace(
        report=lambda kind, **fields: events.append({"kind": kind, **fields})
    )
    context = cast(RunContext, SimpleNamespace(progress=SimpleNamespace(step=8), reporter=reporter))
    report_regrouped(context, NodeGroup(1, (every[0],), *names), None)
    assert events == [
        {
            "kind": "regrouped", "step": 7, "lost": list(names[0]), "joined": list(names[1]), "nodes": ["node 0 (a)"],
            "seconds": None, "message": text,
        }
    ]  # fmt: skip
