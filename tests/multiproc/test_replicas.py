"""The replica comparison: one flipped bit on one rank is found, named, not saved, and repaired if
so asked."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.base.errors import DrumlineError, TrainingError
from drumline.config.schema import CheckpointConfig, Config, DistConfig, OptimConfig
from drumline.parallel.replicas import ReplicaComparison, replica_tensors
from drumline.parallel.wrap import LiveBuffers
from drumline.runs import catalog
from drumline.runs.events import read_events
from drumline.training.loop import Loop
from drumline.training.manager import RunManager
from tests.jobs import NO_SIDECAR, Normalised, make_config, newest, train_here
from tests.ranks import run_ranks

WHERE = ["0.weight", "1.running_var", "1.num_batches_tracked", "2.bias/exp_avg_sq", "2.weight/step"]


def flip(tensor: Tensor, *, byte: int = 0, bit: int = 3) -> None:
    tensor.detach().reshape(-1).view(torch.uint8)[byte] ^= 1 << bit


class Replica:
    """A small model under DDP that has been trained for two steps."""

    def __init__(self, ddp: RunManager, **options: Any) -> None:
        self.ddp = ddp
        self.model = ddp.wrap(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        host = f"node-{ddp.rank}"
        self.comparison = ReplicaComparison(
            self.model, self.optimizer, host=host, device=ddp.device, **options
        )
        self.train(2)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 6)).square().sum().backward()
            self.optimizer.step()
            LiveBuffers(self.model).broadcast()

    def tensors(self) -> dict[str, Tensor]:
        return replica_tensors(self.model, self.optimizer, include_buffers=True)

    def check(self, step: int) -> str:
        try:
            self.comparison.check(step)
        except TrainingError as error:
            return str(error)
        return "all agree"


def flip_everywhere_in_turn() -> dict[str, list[str]]:
    """The last rank's bits flip; what is said before, with the damage, and after it was undone."""
    messages = {}
    with RunManager(watch=NO_SIDECAR) as ddp:
        replica = Replica(ddp)
        for number, name in enumerate(WHERE):
            before = replica.check(10 * number)
            if ddp.rank == ddp.world_size - 1:
                flip(replica.tensors()[name])
            findings = replica.check(10 * number + 5)
            if ddp.rank == ddp.world_size - 1:
                flip(replica.tensors()[name])
            messages[name] = [before, findings, replica.check(10 * number + 6)]
    return messages


def test_a_flipped_bit_is_found_and_named() -> None:
    rank = 2
    for message in run_ranks(3, flip_everywhere_in_turn):
        for number, name in enumerate(WHERE):
            assert message[name] == [
                "all agree",
                f"the replicas differ at step {10 * number + 5}: rank {rank} (node-{rank}) differs from the other "
                f"{rank} ranks in {name}; all agreed at step {10 * number} "
                f"[rank {rank} on node-{rank}, step {10 * number + 5}]\n  try: rerun the same command "
                "to resume from the newest checkpoint, which was compared before it was saved; test the memory of "
                f"node-{rank}{CODE}",
                "all agree",
            ]


CODE = "; if it happens again at the same step, look for code that differs across ranks"


def test_two_ranks_cannot_tell_which_is_right() -> None:
    for message in run_ranks(2, flip_everywhere_in_turn):
        for number, name in enumerate(WHERE):
            assert message[name][1] == (
                f"the replicas differ at step {10 * number + 5}: rank 0 (node-0) and rank 1 (node-1) differ in {name}, "
                f"and no majority shows which is right; all agreed at step {10 * number} "
                f"[step {10 * number + 5}]\n  try: rerun the same command "
                "to resume from the newest checkpoint, which was compared before it was saved; test the "
                f"memory of node-0 and node-1{CODE}"
            )


def differ_otherwise() -> list[str]:
    """Two ranks with damage of their own; then a rank that lacks a tensor; then buffers that need
    not agree."""
    messages = []
    with RunManager(watch=NO_SIDECAR) as ddp:
        replica = Replica(ddp)
        if ddp.rank in (1, 2):
            flip(replica.tensors()["0.bias" if ddp.rank == 1 else "2.weight"])
        messages.append(replica.check(3))
        for on_difference in ("stop", "broadcast"):
            replica = Replica(ddp, on_difference=on_difference)
            if ddp.rank == 1:
                replica.optimizer.state.clear()
            messages.append(replica.check(3))
        replica = Replica(ddp, include_buffers=False)
        if ddp.rank == 1:
            flip(replica.tensors()["1.running_mean"])
        messages.append(replica.check(3))
    return messages


def test_other_differences() -> None:
    for two, stopped, broadcast, buffers in run_ranks(4, differ_otherwise):
        assert (
            "ranks 1, 2 (node-1 and node-2) differ from the other 2 ranks in 0.bias and 1 more tensor"
            in two
        )
        assert "this was the first comparison" in two
        for text in (stopped, broadcast):
            assert (
                "rank 1 (node-1) differs from the other 3 ranks in 0.weight/step and 17 more tensors"
                in text
            )
            assert "; the tensors differ in type or shape, or are missing on some ranks" in text
            assert "try: look for code that differs across ranks" in text
        assert buffers == "all agree"


class Heard(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger("drumline").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def repair(damaged: int) -> tuple[bool, bool, list[str]]:
    """Whether the damage was undone, whether training continues from there, and the warnings."""
    with RunManager(watch=NO_SIDECAR) as ddp:
        replica = Replica(ddp, on_difference="broadcast")
        heard = Heard()
        replica.comparison.check(2)
        before = {name: tensor.clone() for name, tensor in replica.tensors().items()}
        if ddp.rank == damaged:
            for name in WHERE:
                flip(replica.tensors()[name])
        replica.comparison.check(3)
        after = replica.tensors()
        repaired = all(torch.equal(before[name], after[name]) for name in before)
        replica.train(2)
        replica.comparison.check(5)
        return repaired, replica.comparison.last_agreed == 5, heard.messages


@pytest.mark.parametrize(("world_size", "damaged"), [(2, 1), (3, 0), (4, 2)])
def test_broadcast_gives_all_ranks_what_the_majority_holds(world_size: int, damaged: int) -> None:
    answers = run_ranks(world_size, repair, damaged)
    assert all(repaired and goes_on for repaired, goes_on, _ in answers)
    (warning,), *others = (messages for _, _, messages in answers)
    assert others == [[]] * (world_size - 1)
    who = {
        2: "rank 0 (node-0) and rank 1 (node-1) differ in 0.weight and 4 more tensors, and no majority shows which "
        "is right; all agreed at step 2; all ranks continue with the tensors of rank 0. Test the "
        "memory of node-0 and node-1",
        3: "rank 0 (node-0) differs from the other 2 ranks in 0.weight and 4 more tensors; all agreed at step 2; all "
        "ranks continue with the tensors of rank 1. Test the memory of node-0",
        4: "rank 2 (node-2) differs from the other 3 ranks in 0.weight and 4 more tensors; all agreed at step 2; all "
        "ranks continue with the tensors of rank 0. Test the memory of node-2",
    }
    assert warning == f"the replicas differ at step 3: {who[world_size]}"


class Busy(Normalised):
    """Everything that could make replicas differ, and must not: BatchNorm, dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)
        ).double()


ADAMW = OptimConfig(name="adamw", lr=0.01, schedule="constant", clip_norm=0.5)


def watched(**watch: Any) -> Config:
    checkpoint = CheckpointConfig(every_steps=2, keep_last=100)
    # The last batch of an epoch has 5 samples for 3 ranks of 2 micro-batches, each of 2 samples
    # otherwise.
    config = make_config(
        batch_size=12, samples=41, optim=ADAMW, accumulate=2, checkpoint=checkpoint, augment=True
    )
    return replace(config, watch=replace(NO_SIDECAR, **watch))


def train_damaged(config: Config, run: Path, name: str, at_step: int) -> tuple[str, list[int]]:
    """Train while a bit flips on rank 1 after a step; how it ended, and when replicas were
    compared."""
    take_step = Loop.take_step
    check = ReplicaComparison.check
    compared: list[int] = []

    def damaging(self: Loop, *args: Any) -> None:
        take_step(self, *args)
        if self.progress.step == at_step and self.job.ddp.rank == 1:
            flip(replica_tensors(self.job.model, self.job.optimizer, include_buffers=True)[name])

    def counting(self: ReplicaComparison, step: int) -> None:
        compared.append(step)
        check(self, step)

    Loop.take_step = damaging
    ReplicaComparison.check = counting
    try:
        train_here(config, Busy, run)
    except DrumlineError as error:
        return str(error), compared
    finally:
        Loop.take_step = take_step
        ReplicaComparison.check = check
    return "trained to the end", compared


DAMAGED = ("4.weight", "1.running_mean", "4.bias/exp_avg_sq")


def train_damaged_in_turn(config: Config, root: Path) -> list[tuple[str, list[int]]]:
    # The flip comes after step 4, at which a save is due.
    return [train_damaged(config, root / name.replace("/", " "), name, 4) for name in DAMAGED]


def test_damage_is_not_saved(tmp_path: Path) -> None:
    for rank, ends in enumerate(
        run_ranks(3, train_damaged_in_turn, watched(replicas_every=3), tmp_path)
    ):
        for name, (said, compared) in zip(DAMAGED, ends, strict=True):
            assert "the replicas differ at step 4: rank 1 (" in said
            assert f") differs from the other 2 ranks in {name}; all agreed at step 3" in said
            assert compared == [0, 2, 3, 4]
            run = tmp_path / name.replace("/", " ")
            assert catalog.list_steps(run / "checkpoints") == [2]
            events = read_events(run / "events" / f"rank-{rank:05d}.jsonl")
            (error,) = [event["message"] for event in events if event["kind"] == "error"]
            assert name in error


def test_a_run_that_is_set_to_continue_warns_and_trains_to_the_end(tmp_path: Path) -> None:
    config = watched(replicas_every=1, on_difference="broadcast")
    for message, compared in run_ranks(
        3, train_damaged, config, tmp_path / "damaged", "4.weight", 4
    ):
        assert message == "trained to the end"
        assert compared == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    run_ranks(3, train_damaged, config, tmp_path / "whole", "4.weight", -1)
    damaged = newest(tmp_path / "damaged")
    whole = newest(tmp_path / "whole")
    for file in ("model", "optimizer"):
        for name, tensor in whole.tensors[file].items():
            assert torch.equal(tensor, damaged.tensors[file][name]), name
    events = {
        run: [
            event["message"]
            for rank in range(3)
            for event in read_events(tmp_path / run / "events" / f"rank-{rank:05d}.jsonl")
            if event["kind"] == "warning" and "replicas" in event["message"]
        ]
        for run in ("damaged", "whole")
    }
    assert len(events["damaged"]) == 1
    assert (
        "all ranks continue with the tensors of rank 0. Test the memory of " in events["damaged"][0]
    )
    assert events["whole"] == []


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    for message, compared in run_ranks(
        2, train_damaged, watched(replicas_every=0), tmp_path, "4.weight", 4
    ):
        assert message == "trained to the end"
        assert compared == []


def test_statistics_that_are_each_ranks_own_are_not_compared(tmp_path: Path) -> None:
    config = replace(watched(replicas_every=1), dist=DistConfig(broadcast_buffers=False))
    for message, compared in run_ranks(2, train_damaged, config, tmp_path, "1.running_mean", -1):
        assert message == "trained to the end"
        assert compared == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
