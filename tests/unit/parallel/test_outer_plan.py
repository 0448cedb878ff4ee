"""When parts of a model have their rounds, how parameters are split into parts, and what bytes
lose."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drumline.config.rules import sync_interval
from drumline.parallel.outer_sync import OuterSync, SyncPlan, split_evenly
from drumline.parallel.replica_groups import BLOCK, ReplicaGroups, decode, encode
from drumline.parallel.wrap import LiveBuffers

WRONG = (
    "diloco",
    "diloco:0",
    "diloco:x",
    "local:-3",
    "adam:4",
    "diloco:\u0663",
    "diloco:9999999999",
    "",
)


@pytest.mark.parametrize(
    ("text", "steps"),
    [("step", 0), ("local:1", 1), ("diloco:500", 500), *((text, None) for text in WRONG)],
)
def test_the_forms_of_the_setting(text: str, steps: int | None) -> None:
    assert sync_interval(text) == steps


def test_each_part_has_one_round_in_h_steps() -> None:
    plan = SyncPlan(every=10, parts=3)
    rounds = {step: [part for part in range(3) if plan.is_due(part, step)] for step in range(1, 21)}
    assert {step: parts for step, parts in rounds.items() if parts} == {
        3: [0], 6: [1], 10: [2], 13: [0], 16: [1], 20: [2]
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_parts_are_consecutive_and_about_as_large(count: int) -> None:
    sizes = [100, 1, 100, 1, 98]
    parameters = {str(number): nn.Parameter(torch.zeros(size)) for number, size in enumerate(sizes)}
    parts = split_evenly(parameters, count)
    assert [name for part in parts for name in part] == list(parameters)
    assert len(parts) == count
    assert all(parts)
    largest = max(sum(parameter.numel() for parameter in part.values()) for part in parts)
    assert largest <= 300 / count + 100


@pytest.mark.parametrize(
    ("wire", "bytes_each", "most"), [("fp32", 4, 0.0), ("bf16", 2, 1 / 256), ("int8", 1, 1 / 254)]
)
def test_what_bytes_lose(wire: str, bytes_each: int, most: float) -> None:
    torch.manual_seed(1)
    rows = torch.randn(3, 4 * BLOCK) * torch.logspace(-6, 3, 4).repeat_interleave(BLOCK)
    rows[1, :BLOCK] = 0.0
    sent = encode(rows, wire)
    assert sent.dtype == torch.uint8
    assert sent.shape[1] == pytest.approx(4 * BLOCK * bytes_each, rel=0.02)
    again = decode(sent, wire, torch.float32)
    largest = rows.unflatten(1, (-1, BLOCK)).abs().amax(2, keepdim=True)
    assert ((again - rows).unflatten(1, (-1, BLOCK)).abs() <= most * largest + 1e-30).all()


# A checkpoint that was saved while a part was on its way, resumed with other settings


@pytest.fixture
def alone() -> Iterator[ReplicaGroups]:
    """One replica, on a real group of one: the mean of what all have changed is what it has
    changed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ReplicaGroups(
        members=(0,), leaders=(0,), within=None, across=dist.group.WORLD, weight=1.0
    )
    dist.destroy_process_group()


class Counted:
    """A model whose weights are the number of steps that it has taken."""

    def __init__(self, plan: SyncPlan, groups: ReplicaGroups) -> None:
        self.model = nn.Linear(3, 2)
        for parameter in self.model.parameters():
            nn.init.zeros_(parameter)
        self.sync = OuterSync(self.model, plan, groups, sends_buffers=False)

    def train(self, first: int, last: int, *, is_last: bool = False) -> None:
        for step in range(first, last + 1):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(1)
            self.sync.after_step(step, is_last=is_last and step == last)

    def own(self) -> set[float]:
        return {
            value for parameter in self.model.parameters() for value in parameter.flatten().tolist()
        }

    def shared(self) -> set[float]:
        with self.sync.shared_weights():
            return self.own()


def resumed(saved: Counted, plan: SyncPlan, groups: ReplicaGroups) -> Counted:
    new = Counted(plan, groups)
    state = copy.deepcopy(saved.sync.state_dict())
    with saved.sync.shared_weights():
        new.model.load_state_dict(saved.model.state_dict())
    new.sync.load_outer_state(saved.sync.outer_state())
    new.sync.load_state_dict(state)
    return new


def test_a_part_on_its_way_arrives_when_h_has_changed(alone: ReplicaGroups) -> None:
    before = Counted(SyncPlan(every=6, overlap=3), alone)
    before.train(1, 7)
    job = resumed(before, SyncPlan(every=4, overlap=3), alone)
    assert (job.own(), job.shared()) == ({7}, {0})
    job.train(8, 8)  # a round is due, but one is in progress
    assert job.shared() == {0}
    job.train(9, 9)
    assert (job.own(), job.shared()) == ({9}, {6})
    job.train(10, 15)
    assert (job.own(), job.shared()) == ({15}, {12})


def test_what_was_on_its_way_is_sent_again_in_other_parts(
    alone: ReplicaGroups, caplog: pytest.LogCaptureFixture
) -> None:
    before = Counted(SyncPlan(every=6, overlap=3, wire="int8"), alone)
    before.train(1, 7)
    with caplog.at_level(logging.WARNING, "drumline"):
        job = resumed(before, SyncPlan(every=8, parts=2, overlap=3, wire="int8"), alone)
    assert ["dist.sync_parts" in record.message for record in caplog.records] == [True]
    assert (job.own(), job.shared()) == ({7}, {0})
    job.train(8, 11)  # the second part's round
    assert job.own() == {11}
    assert job.shared() == {0, 8}
    job.train(12, 13, is_last=True)
    assert job.own() == job.shared() == {13}


def test_a_replica_that_missed_the_end_of_a_round_keeps_its_steps_since() -> None:
    groups = ReplicaGroups(members=(0,), leaders=(0, 1), within=None, across=None, weight=0.5)
    model = nn.Linear(2, 1, bias=False)
    sync = OuterSync(model, SyncPlan(every=4, overlap=2), groups, sends_buffers=False)
    begun = torch.tensor([1.0, 1.0])
    own_weights = torch.tensor([3.0, 1.5])
    shared = torch.tensor([10.0, 20.0])
    # after the round at step 4 had begun
    for finished, expected in ((0, own_weights), (4, shared + own_weights - begun)):
        with torch.no_grad():
            model.weight.copy_(shared)  # from the rank that has seen its end
        sync.load_outer_state({})
        replica_state = {
            "weights": [own_weights],
            "begun": [begun],
            "buffers": [],
            "finished_at": [0],
        }
        sync.load_own_state(replica_state, [finished])
        assert model.weight.flatten().tolist() == expected.tolist()
        assert sync.finished_at == [finished]
    assert sync.pending(4, is_last=False) == []
    assert sync.pending(8, is_last=False) == sync.pending(5, is_last=True) == [0]


def test_a_round_has_not_ended_before_all_ranks_have_its_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node is lost while the buffers are sent: the round is repeated, and the shared buffers are
    as before."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    groups = ReplicaGroups(members=(0,), leaders=(0,), within=None, across=None, weight=1.0)
    sync = OuterSync(model, SyncPlan(every=5), groups, sends_buffers=True)
    model(torch.randn(6, 3))

    def lose_node(buffers: LiveBuffers) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(LiveBuffers, "broadcast", lose_node)
    with pytest.raises(RuntimeError, match="Connection closed"):
        sync.after_step(5, is_last=False)
    assert sync.finished_at == [0]
    assert sync.pending(5, is_last=False) == [0]
    with sync.shared_weights():
        assert not model[1].running_mean.any()
