"""`--dist.mode` on NCCL ranks that share one GPU: every mode trains as ddp, in fp32, bf16 and fp16;
a killed run resumes bit for bit; a stopped one is named; modes and numbers of ranks change between
starts; optimizer state may be in the host's memory; blocks are compiled."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.gpu.test_nccl_ranks import HOST, OWN_HOSTS, Command, losses, pid_of, run, running, train
from tests.jobs import assert_same_bits, newest

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.nccl_ranks,
]
TASKS = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from drumline import EMA, Loss, Task
from drumline.training.tasks.built_in import GPT

class Words(Task):
    defaults = {"train.steps": 24, "train.batch_size": 24, "train.accumulate": 2, "train.deterministic": True,
                "optim.name": "adamw", "optim.lr": 0.003, "optim.clip_norm": 0.5, "log.every_steps": 4,
                "log.display": "plain", "checkpoint.every_steps": 8, "checkpoint.every_epochs": 0}

    def model(self):
        # 37 and 33 rows divide by neither 2 nor 4; the embedding is the output layer, too.
        return GPT(vocab_size=37, context=16, layers=3, heads=3, width=33)

    def train_data(self):
        start = torch.randint(0, 37, (240, 1), generator=torch.Generator().manual_seed(5))
        words = (start + 5 * torch.arange(17)) % 37
        return TensorDataset(words[:, :-1], words[:, 1:])

    def eval_data(self):
        return self.train_data()

    def loss(self, model, batch):
        scores = model(batch[0])
        return Loss(functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), reduction="sum") / 16)

    def hooks(self):
        return [EMA(0.9)]
"""
MODES = ("ddp", "zero1", "fsdp", "hsdp")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(OWN_HOSTS)
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def train_in(folder: Path, mode: str, name: str, *words: str, procs: int = 2) -> Command:
    shards = ("--dist.shard_ranks", "2") if mode == "hsdp" else ()
    command = train(folder, "Words", name, "--dist.mode", mode, *shards, *words, procs=procs)
    assert command.process.returncode == 0, command.output
    return command


@pytest.mark.parametrize(
    ("procs", "words", "tolerance"),
    [
        (2, (), 1e-4),
        (4, (), 1e-4),
        (2, ("--train.precision", "bf16"), 0.02),
        (2, ("--train.precision", "fp16"), 0.02),
        (2, ("--model.activation_checkpointing", "every:2", "--dist.wrap", "Block"), 1e-4),
    ],
    ids=["fp32", "fp32 on 4", "bf16", "fp16", "recomputed"],
)
def test_every_mode_trains_as_ddp_does(
    folder: Path, procs: int, words: tuple[str, ...], tolerance: float
) -> None:
    for mode in MODES:
        train_in(folder, mode, mode, *words, procs=procs)
        assert losses(folder, mode) == pytest.approx(losses(folder, "ddp"), rel=tolerance), mode
    assert losses(folder, "ddp")[-1] < losses(folder, "ddp")[0]


def test_parameters_are_gathered_in_bf16(folder: Path) -> None:
    train_in(folder, "ddp", "ddp", "--train.precision", "bf16")
    for mode in MODES[1:]:
        train_in(folder, mode, mode, "--train.precision", "bf16", "--dist.shard_dtype", "bf16")
        assert losses(folder, mode) == pytest.approx(losses(folder, "ddp"), rel=0.03), mode
    assert newest(folder / "fsdp").tensors["model"]["blocks.0.mlp_in.weight"].dtype is torch.float32


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_killed_run_resumes_with_the_same_bits(folder: Path, mode: str) -> None:
    steps = ("--train.steps", "200", "--checkpoint.every_steps", "40")
    train_in(folder, mode, "whole", *steps)
    shards = ("--dist.shard_ranks", "2") if mode == "hsdp" else ()
    words = (
        "train",
        "tasks.py:Words",
        "--procs",
        "2",
        "--run",
        "killed",
        "--dist.mode",
        mode,
        *shards,
        *steps,
    )
    with running(folder, *words, "--max-restarts", "0") as command:
        command.wait_for(r"saved step 80 ")
        os.kill(pid_of(folder, "killed", 1), signal.SIGKILL)
        assert command.finish() != 0, command.output
    train_in(folder, mode, "killed", *steps)
    assert_same_bits(newest(folder / "whole"), newest(folder / "killed"))
    verified = run(folder, "verify", "killed")
    assert verified.process.returncode == 0, verified.output


def test_modes_and_numbers_of_ranks_change_between_starts(folder: Path) -> None:
    # by default it follows the number of steps, which grows here
    rate = ("--optim.schedule", "constant")
    train_in(folder, "ddp", "whole", "--train.steps", "60", *rate, procs=1)
    legs = [("ddp", 2), ("fsdp", 3), ("zero1", 2), ("hsdp", 4), ("fsdp", 2), ("ddp", 1)]
    for number, (mode, procs) in enumerate(legs, 1):
        train_in(folder, mode, "legs", "--train.steps", str(10 * number), *rate, procs=procs)
    # Adam divides by the size of gradients, so that weights of small ones differ in their last
    # digits.
    expected = newest(folder / "whole").tensors["model"]
    model = newest(folder / "legs").tensors["model"]
    assert model.keys() == expected.keys()
    for name, weights in expected.items():
        assert float((model[name] - weights).norm() / weights.norm()) < 0.01, name


def test_the_optimizer_may_run_on_the_host(folder: Path) -> None:
    train_in(folder, "ddp", "ddp")
    train_in(folder, "fsdp", "host", "--dist.offload_optimizer", "--train.on_nan", "skip")
    assert losses(folder, "host") == pytest.approx(losses(folder, "ddp"), rel=1e-3)
    train_in(
        folder,
        "fsdp",
        "host",
        "--dist.offload_optimizer",
        "--train.on_nan",
        "skip",
        "--train.steps",
        "32",
    )
    train_in(folder, "fsdp", "meta", "--dist.meta_init", "--dist.offload_optimizer")


def test_a_model_without_memory_begins_with_the_same_weights_in_every_mode(folder: Path) -> None:
    for mode in MODES:
        train_in(folder, mode, mode, "--dist.meta_init")
        assert losses(folder, mode) == pytest.approx(losses(folder, "ddp"), rel=1e-4), mode


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_stopped_rank_is_named_with_what_the_others_wait_in(folder: Path, mode: str) -> None:
    shards = ("--dist.shard_ranks", "2") if mode == "hsdp" else ()
    words = (
        "--run",
        "stopped",
        "--dist.mode",
        mode,
        *shards,
        "--train.steps",
        "100000",
        "--watch.on_hang",
        "stop",
    )
    with running(
        folder, "train", "tasks.py:Words", "--procs", "2", "--max-restarts", "0", *words
    ) as command:
        command.wait_for(r"saved step 16 ")
        os.kill(pid_of(folder, "stopped", 1), signal.SIGSTOP)
        assert command.finish() != 0, command.output
    waits = r"1 rank is blocked in (all_gather|reduce_scatter|all_reduce|broadcast) #\d+"
    assert re.search(
        rf"rank 1 on {re.escape(HOST)} is stopped by a signal.*{waits}", command.output
    ), command.output


@pytest.mark.parametrize("mode", MODES[1:])
def test_blocks_are_compiled(folder: Path, mode: str) -> None:
    train_in(folder, mode, "eager")
    command = train_in(folder, mode, "compile", "--train.step", "compile")
    assert "operation by operation" not in command.output, command.output
    assert losses(folder, "compile") == pytest.approx(losses(folder, "eager"), rel=1e-3)
