"""BatchNorm in sharded modes, and parameters or blocks that one rank leaves out, on NCCL ranks that
share one GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.gpu.test_nccl_ranks import OWN_HOSTS, Command, losses, train

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.nccl_ranks,
]
TASKS = """
import os
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from drumline import Loss, Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(33, 33)
        self.norm = nn.BatchNorm1d(33)

    def forward(self, inputs):
        return inputs + torch.tanh(self.norm(self.inner(inputs)))

class Network(nn.Module):
    def __init__(self, leaves_out):
        super().__init__()
        self.leaves_out = leaves_out
        self.first = nn.Linear(6, 33)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.spare = nn.Linear(33, 33)
        self.last = nn.Linear(33, 2)

    def forward(self, inputs, uses_all):
        hidden = self.first(inputs)
        for number, block in enumerate(self.blocks):
            if uses_all or number != 1 or self.leaves_out != "block":
                hidden = block(hidden)
        if uses_all or self.leaves_out != "spare":
            hidden = hidden + self.spare(hidden)
        return self.last(hidden)

class UsesAll(Task):
    leaves_out = "nothing"
    calls = 0
    defaults = {"train.steps": 24, "train.batch_size": 48, "train.step": "eager", "optim.lr": 0.05,
                "log.every_steps": 1, "log.display": "plain", "checkpoint.every_steps": 2}

    def model(self):
        return Network(self.leaves_out)

    def train_data(self):
        inputs = torch.randn(480, 6, generator=torch.Generator().manual_seed(5))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss(self, model, batch):
        self.calls += model.training
        uses_all = self.calls < 6 or os.environ.get("RANK") != "1"
        scores = model(batch[0], uses_all)
        return Loss(functional.cross_entropy(scores, batch[1], reduction="sum"))

class LeavesOutALayer(UsesAll):
    leaves_out = "spare"

class LeavesOutABlock(UsesAll):
    leaves_out = "block"
"""
RANKS = [("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(OWN_HOSTS)
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def train_in(folder: Path, task: str, mode: str, procs: int, *words: str) -> Command:
    shards = ("--dist.shard_ranks", "2") if mode == "hsdp" else ()
    return train(folder, task, mode, "--dist.mode", mode, *shards, *words, procs=procs)


@pytest.mark.parametrize(("mode", "procs"), RANKS)
def test_batchnorm_trains_in_shards_as_with_ddp(folder: Path, mode: str, procs: int) -> None:
    for each in ("ddp", mode):
        command = train_in(folder, "UsesAll", each, procs)
        assert command.process.returncode == 0, command.output
    assert losses(folder, mode) == pytest.approx(losses(folder, "ddp"), rel=1e-3)


@pytest.mark.parametrize(("mode", "procs"), [("ddp", 2), ("ddp", 3), ("zero1", 2), *RANKS])
def test_parameters_that_one_rank_leaves_out_are_named(folder: Path, mode: str, procs: int) -> None:
    command = train_in(folder, "LeavesOutALayer", mode, procs)
    assert command.process.returncode == 1, command.output
    sentence = r"error: the loss does not use these parameters: spare\.weight and spare\.bias \[rank 1 on \S+, step 5\]"
    assert re.search(sentence, command.output), command.output
    assert "--dist.find_unused_parameters" in command.output
    assert "restarting the ranks" not in command.output, command.output


@pytest.mark.parametrize(("mode", "procs"), RANKS)
def test_a_block_that_one_rank_leaves_out_is_named(folder: Path, mode: str, procs: int) -> None:
    command = train_in(folder, "LeavesOutABlock", mode, procs)
    assert command.process.returncode == 1, command.output
    assert re.search(
        r"error: the loss does not call the block blocks\.1, .* \[rank 1 on \S+, step 5\]",
        command.output,
    )
    assert "call it in every batch" in command.output
    assert "restarting the ranks" not in command.output, command.output


@pytest.mark.parametrize("task", ["LeavesOutALayer", "LeavesOutABlock"])
def test_with_ddp_the_setting_lets_the_run_continue(folder: Path, task: str) -> None:
    command = train_in(folder, task, "ddp", 2, "--dist.find_unused_parameters")
    assert command.process.returncode == 0, command.output
