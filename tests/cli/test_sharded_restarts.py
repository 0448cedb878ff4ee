"""`drumline train --dist.mode` under the watchdog: a rank that is killed, stopped or blocked is
named with what the others wait for, the ranks are restarted, and the run ends with the same bits as
one without faults."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.test_command import drumline
from tests.jobs import assert_same_bits, newest

pytestmark = pytest.mark.usefixtures("warm")
# Each fault once, on the last rank, in this step and pass: `kill:forward:4`.
TASK = """
import os, signal, time
from pathlib import Path
import torch
from torch.nn import functional
from torch.utils.data import TensorDataset
from drumline import EMA, Loss, Task
from drumline.training.tasks.built_in import GPT

FAIL = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "block": lambda: time.sleep(600),
}

class Words(Task):
    faults: str = ""
    defaults = {"train.steps": 10, "train.batch_size": 8, "optim.name": "adamw", "optim.lr": 0.01,
                "optim.clip_norm": 0.5, "model.dropout": 0.1, "log.display": "plain", "checkpoint.every_steps": 2,
                "checkpoint.every_epochs": 0, "checkpoint.background": False}

    def model(self):
        return GPT(vocab_size=11, context=7, layers=2, heads=1, width=9, dropout=self.config.model.dropout)

    def train_data(self):
        words = torch.arange(80).unsqueeze(1) * torch.arange(8) % 11
        return TensorDataset(words[:, :-1], words[:, 1:])

    def hooks(self):
        return [EMA(0.9)]

    def loss(self, model, batch):
        time.sleep(0.05)  # so that the watchdog sees it train
        if not model.training:
            return self.sum_of(model(batch[0]), batch)
        saved = sorted(Path("run/checkpoints").glob("step-*"))
        self.step = getattr(self, "step", int(saved[-1].name[5:]) if saved else 0) + 1
        self.fail_if_due("forward")
        scores = model(batch[0])
        scores.register_hook(lambda grad: self.fail_if_due("backward"))
        return self.sum_of(scores, batch)

    def sum_of(self, scores, batch):
        return Loss(functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), reduction="sum"))

    def fail_if_due(self, phase):
        is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
        for fault in self.faults.split() if is_last else ():
            kind, when, step = fault.split(":")
            if (when, int(step)) == (phase, self.step) and not Path(kind).exists():
                Path(kind).touch()
                FAIL[kind]()
"""
# By fault: what is reported of the rank and of the others. gloo reduces and scatters by an
# all-reduce.
BLOCKED = r"\d+ ranks? (is|are) blocked in (all_gather|all_reduce|reduce_scatter) #\d+"
FAULTS = {
    "kill:forward:4": r"failure: {} was killed by SIGKILL at step 3, in forward; \d+ ranks? lost the connection to it",
    "stop:backward:6": rf"hang: {{}} is stopped by a signal, in backward since step 5; {BLOCKED}",
    # On a busy machine what it has just read may count as work.
    "block:forward:8": r"hang: {} (has been|is slow but alive:) in forward since step 7 "
    rf"\(.*mine\.py:\d+ in <lambda>\).*; {BLOCKED}",
}


@pytest.mark.soak
def test_killed_and_stopped_ranks_are_named_and_the_run_has_the_same_bits(tmp_path: Path) -> None:
    assert_recovers(tmp_path, "fsdp", 2, list(FAULTS)[:2])


def assert_recovers(folder: Path, mode: str, world_size: int, faults: Sequence[str]) -> None:
    shards = ["--dist.shard_ranks", "2"] if mode == "hsdp" else []
    words = [
        "train",
        "mine.py:Words",
        "--procs",
        str(world_size),
        "--dist.mode",
        mode,
        *shards,
        "--run",
        "run",
    ]
    for name, planted in (
        ("whole", []),
        ("faulty", ["--task.faults", " ".join(faults), "--watch.hang_s", "3"]),
    ):
        (folder / name).mkdir()
        (folder / name / "mine.py").write_text(TASK)
        result = drumline(*words, *planted, cwd=folder / name, timeout_s=400)
        assert result.returncode == 0, result.stderr
    rank = rf"rank {world_size - 1} on {re.escape(socket.gethostname())}"
    lines = result.stderr.splitlines()
    for fault in faults:
        expected = f"drumline: {FAULTS[fault].format(rank)}"
        assert [line for line in lines if re.match(expected, line)], f"{expected}\n{result.stderr}"
    # Steps were taken in between, so each is the first.
    restarts = [
        line for line in lines if line.startswith("drumline: restarting the ranks (restart 1 of ")
    ]
    assert len(restarts) == len(faults), result.stderr
    faulty, whole = (newest(folder / name / "run") for name in ("faulty", "whole"))
    for each_run in (faulty, whole):
        each_run.documents["progress"].pop("facts")  # with the settings, which differ
    assert_same_bits(faulty, whole)
    assert drumline("verify", "run", cwd=folder / "faulty").returncode == 0
