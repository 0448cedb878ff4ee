"""A batch of one rank leaves out parameters, or a block, after some steps: that rank names them, in
every mode."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.base.errors import TrainingError, UnusedParametersError
from drumline.config.schema import Config, DistConfig
from drumline.parallel.blocks import find_blocks
from drumline.training.failure_report import can_restart
from drumline.training.tasks.base import Loss
from tests.jobs import Classify, make_config, train_here
from tests.ranks import RanksFailed, run_ranks

# The passes before the first step are on copies of the task, so its own calls are its steps.
FIRST_UNUSED = 4
ADVICE = (
    "use them in every batch, freeze them (requires_grad=False), or set --dist.find_unused_parameters (drumline doctor "
    "TASK tries several)"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.spare = nn.Linear(8, 8)

    def forward(self, inputs: Tensor, uses_spare: bool) -> Tensor:
        hidden = inputs + torch.tanh(self.inner(inputs))
        return hidden + self.spare(hidden) if uses_spare else hidden


class Network(nn.Module):
    """`leaves_out`: what a batch may leave out; a layer of a block, a layer outside blocks, or a
    block."""

    def __init__(self, leaves_out: str, *, has_buffers: bool) -> None:
        super().__init__()
        self.leaves_out = leaves_out
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if has_buffers else nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.spare = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, inputs: Tensor, uses_all: bool) -> Tensor:
        hidden = self.norm(self.first(inputs))
        for number, block in enumerate(self.blocks):
            is_left_out = number == 1 and not uses_all
            if is_left_out and self.leaves_out == "block":
                continue
            hidden = block(hidden, not (is_left_out and self.leaves_out == "blocks.1.spare"))
        if uses_all or self.leaves_out != "spare":
            hidden = hidden + self.spare(hidden)
        return self.last(hidden)


class Branching(Classify):
    """Rank 1 leaves out a part of its model from one step on."""

    leaves_out: ClassVar[str] = "spare"
    has_buffers: ClassVar[bool] = True
    first_unused: ClassVar[int] = FIRST_UNUSED
    calls = 0

    def model(self) -> nn.Module:
        return Network(self.leaves_out, has_buffers=self.has_buffers).double()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        self.calls += model.training
        is_rank_one = os.environ.get("RANK") == "1"
        scores = model(inputs, not (is_rank_one and self.calls >= self.first_unused))
        return Loss(functional.cross_entropy(scores, targets, reduction="sum"))


class WithoutBuffers(Branching):
    has_buffers = False


class InBlock(Branching):
    leaves_out = "blocks.1.spare"


class InBlockWithoutBuffers(InBlock):
    has_buffers = False


class WholeBlock(WithoutBuffers):
    leaves_out = "block"


class WholeBlockOnAllRanks(WholeBlock):
    """Every second step leaves out a block, on all ranks."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        self.calls += model.training
        scores = model(inputs, self.calls % 2 == 1)
        return Loss(functional.cross_entropy(scores, targets, reduction="sum"))


class WholeBlockAtOnce(WholeBlock):
    first_unused = 0


def config_in(mode: str, **dist: Any) -> Config:
    """With a log line in every step: its sum over ranks is a collective, too."""
    exact = {"exact": "elastic"} if mode == "elastic" else {}
    config = make_config(batch_size=24, samples=96, epochs=3, **exact)
    mode = "ddp" if mode == "elastic" else mode
    shard_ranks = 2 if mode == "hsdp" else None
    dist_config = DistConfig(mode=mode, shard_ranks=shard_ranks, **dist)  # type: ignore[arg-type]
    return replace(config, dist=dist_config, log=replace(config.log, every_steps=1))


def error_of_rank_one(world_size: int, config: Config, task: type[Branching], run: Path) -> str:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(world_size, train_here, config, task, run, timeout_s=60)
    return caught.value.errors[1]


def message_of(trace: str) -> str:
    """The error's own lines, at the end of its traceback."""
    match = re.search(r"\.UnusedParametersError: (.*)", trace, re.DOTALL)
    assert match is not None, trace
    return match[1].strip()


SOAK = pytest.mark.soak


def test_no_restart_is_tried() -> None:
    """The same batch would lead to it."""
    assert not can_restart(
        UnusedParametersError("the loss does not use these parameters: a"), has_checkpoint=True
    )
    assert can_restart(TrainingError("the loss has a weight in some batches"), has_checkpoint=True)


@pytest.mark.parametrize(
    ("mode", "world_size", "task"),
    [
        ("ddp", 2, Branching),
        pytest.param("ddp", 3, WithoutBuffers, marks=SOAK),
        pytest.param("ddp", 2, WithoutBuffers, marks=SOAK),
        pytest.param("ddp", 3, Branching, marks=SOAK),
        ("fsdp", 2, InBlock),
        pytest.param("zero1", 3, WithoutBuffers, marks=SOAK),
        pytest.param("fsdp", 3, WithoutBuffers, marks=SOAK),
        pytest.param("fsdp", 2, Branching, marks=SOAK),
        pytest.param("fsdp", 3, InBlockWithoutBuffers, marks=SOAK),
        pytest.param("zero1", 2, Branching, marks=SOAK),
        pytest.param("hsdp", 4, Branching, marks=SOAK),
        pytest.param("hsdp", 4, InBlockWithoutBuffers, marks=SOAK),
        pytest.param("elastic", 2, Branching, marks=SOAK),
        pytest.param("elastic", 3, WithoutBuffers, marks=SOAK),
    ],
)
def test_parameters_that_a_later_step_leaves_out_are_named(
    mode: str, world_size: int, task: type[Branching], tmp_path: Path
) -> None:
    message = message_of(error_of_rank_one(world_size, config_in(mode), task, tmp_path))
    name = task.leaves_out
    assert f"not use these parameters: {name}.weight and {name}.bias" in message
    assert f"try: {ADVICE}" in message


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=SOAK)])
def test_they_are_named_with_accumulation_and_inside_replicas_too(
    world_size: int, tmp_path: Path
) -> None:
    """The micro-batches before have used them, and all ranks of this node are one replica."""
    config = config_in("ddp", sync="diloco:2", sync_within="node")
    config = replace(config, train=replace(config.train, accumulate=2))
    message = message_of(error_of_rank_one(world_size, config, Branching, tmp_path))
    assert message.startswith("the loss does not use these parameters: spare.weight and spare.bias")


def test_replicas_that_train_alone_may_leave_them_out(tmp_path: Path) -> None:
    results = run_ranks(2, train_here, config_in("ddp", sync="local:2"), Branching, tmp_path)
    assert results[0].step == results[1].step > FIRST_UNUSED


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [("fsdp", 2), pytest.param("zero1", 3, marks=SOAK), pytest.param("hsdp", 4, marks=SOAK)],
)
def test_a_block_that_a_later_step_leaves_out_is_named(
    mode: str, world_size: int, tmp_path: Path
) -> None:
    message = message_of(error_of_rank_one(world_size, config_in(mode), WholeBlock, tmp_path))
    assert message == (
        "the loss does not call the block blocks.1, which it called in the first step; with --dist.mode "
        f"{mode} ranks gather a block together when they call it\n"
        "  try: call it in every batch (multiply the output by 0 where it is not needed), or use --dist.mode ddp with "
        "--dist.find_unused_parameters"
    )


def test_a_block_that_one_rank_never_calls_is_named_before_the_first_step(tmp_path: Path) -> None:
    assert "blocks.1" in find_blocks(Network("block", has_buffers=False))
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, train_here, config_in("fsdp"), WholeBlockAtOnce, tmp_path, timeout_s=60)
    for error in caught.value.errors.values():
        assert (
            "UsageError: ranks call different blocks in the same batch, and with --dist.mode fsdp they gather"
            in error
        )
        assert re.search(r"ranks 0, 2 \(\S+\): blocks\.1; rank 1 \(\S+\): blocks\.2", error), error
        advice = "call the same blocks on every rank (multiply the output by 0 where it is not needed), or use --dist"
        assert f"try: {advice}" in error


@pytest.mark.parametrize(
    "mode", ["ddp", pytest.param("fsdp", marks=SOAK), pytest.param("zero1", marks=SOAK)]
)
def test_the_setting_that_the_error_names_lets_the_run_continue(mode: str, tmp_path: Path) -> None:
    results = run_ranks(
        2, train_here, config_in(mode, find_unused_parameters=True), Branching, tmp_path
    )
    assert results[0].step == results[1].step > FIRST_UNUSED


@pytest.mark.soak
def test_a_block_that_one_rank_never_calls_trains_as_the_error_says(tmp_path: Path) -> None:
    results = run_ranks(
        2, train_here, config_in("ddp", find_unused_parameters=True), WholeBlockAtOnce, tmp_path
    )
    assert results[0].step == results[1].step > FIRST_UNUSED
