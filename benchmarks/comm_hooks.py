"""What `--dist.comm` does to bytes, time and loss on a slow link between two hosts, with one rank
each.

    make bench-comm         (or: python -m benchmarks.comm_hooks --mbit 100,10 --steps 500; as root, on Linux)

The hosts are network namespaces of this machine. Each row trains the same small GPT on the same
text for the same number of steps, one row after the other. Bytes are what a host's interface has
sent; bytes and milliseconds of a step are medians over the steps after the first tenth, which
PowerSGD does not compress. The loss is that of the evaluation at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from drumline import Hook
from drumline.runs.events import read_events
from drumline.training.tasks.built_in import LanguageModel

ROOT = Path(__file__).parents[1]
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
PORT = "29500"
ROWS = {
    "none": ["--dist.comm", "none"],
    "bf16": ["--dist.comm", "bf16"],
    "fp16": ["--dist.comm", "fp16"],
    "powersgd, rank 2": ["--dist.comm", "powersgd", "--dist.powersgd_rank", "2"],
}


class CountBytes(Hook):
    """Notes the time and the bytes sent so far after each step, on rank 0, and writes them at the
    end."""

    def __init__(self) -> None:
        self.noted: list[tuple[float, int]] = []

    def after_step(self, run: Any) -> None:
        self.noted.append((time.perf_counter(), int(SENT.read_text())))

    def end(self, run: Any) -> None:
        if run.rank == 0:
            (Path(run.folder) / "noted.json").write_text(json.dumps(self.noted))


class CountedText(LanguageModel):
    """A GPT on the source of Python, whose steps are counted."""

    defaults: ClassVar[dict[str, Any]] = {
        "model.name": "gpt",
        "model.context": 64,
        "data.name": "tokens",
        "optim.name": "adamw",
        "optim.lr": 2e-3,
        "optim.clip_norm": 1.0,
        "optim.warmup_steps": 10,
        "train.batch_size": 8,
        "train.eval_every_epochs": 0,
        "checkpoint.every_epochs": 0,
        "dist.threads": 1,
        "watch.sidecar": "off",
        "log.display": "plain",
    }

    def eval_data(self) -> Any:
        data = super().eval_data()
        data._rows = data._rows[:1024]  # enough for the loss, and faster
        return data

    def hooks(self) -> list[Hook]:
        return [CountBytes()]


def train(bed: Any, run: Path, words: list[str], *, steps: int) -> tuple[float, float, float]:
    """One row: megabytes and milliseconds of a step, and the loss at the end."""
    first = max(2, steps // 10)
    noted, loss = train_on_hosts(
        bed, run, ["--dist.powersgd_start", str(first), *words], steps=steps
    )
    pairs = list(pairwise(noted[first:]))
    seconds = statistics.median(now[0] - before[0] for before, now in pairs)
    sent = statistics.median(now[1] - before[1] for before, now in pairs)
    return sent / 1e6, seconds * 1e3, loss


def train_on_hosts(
    bed: Any, run: Path, words: list[str], *, steps: int, task: str | None = None
) -> tuple[list[tuple[float, int]], float]:
    """Train `CountedText`, or this task, on all hosts of a testbed, with one rank each: the time
    and the bytes that the first host has sent after each step, and the loss at the end."""
    flags = ["--train.steps", str(steps), "--run", str(run), *words]
    jobs = []
    for rank, host in enumerate(bed.hosts):
        rank_variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(bed.hosts)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        master = {
            "MASTER_ADDR": bed.hosts[0].address,
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        environment = {**rank_variables, **master, "PYTHONPATH": str(ROOT)}
        trained = task or f"{Path(__file__)}:CountedText"
        jobs.append(
            host.start(sys.executable, "-m", "drumline", "train", trained, *flags, env=environment)
        )
    codes = [job.wait(timeout_s=3600) for job in jobs]
    if any(codes):
        raise SystemExit("\n".join(job.text() for job in jobs))
    (end,) = (
        event
        for event in read_events(run / "events" / "rank-00000.jsonl")
        if event["kind"] == "end"
    )
    return json.loads((run / "noted.json").read_text()), end["metrics"]["loss"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", default="25,100", help="the links, in Mbit/s [25,100]")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each row [100]")
    options = parser.parse_args()
    from tests.multinode.hosts import Testbed

    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, Linux {platform.release()}"
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"GPT 4 layers of 128 on text, batch 8 x 64, {options.steps} steps, 2 hosts with one rank each, gloo"
    )
    for mbit in options.mbit.split(","):
        print(f"{mbit} Mbit/s          MB a step   ms a step            loss", flush=True)
        times: list[float] = []
        for name, words in ROWS.items():
            with (
                tempfile.TemporaryDirectory() as scratch,
                Testbed(Path(scratch) / "bed", ["a", "b"]) as bed,
            ):
                for host in bed.hosts:
                    host.set_bandwidth(float(mbit))
                sent, took, loss = train(bed, Path(scratch) / "run", words, steps=options.steps)
            times.append(took)
            print(
                f"{name:<20} {sent:>8.3f} {took:>11.1f}  x {took / times[0]:.2f} {loss:>12.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
