"""Many starts of one healthy hsdp job: four ranks on two nodes, SGD with momentum, parameters of
uneven rows.

    python3 -m tests.hsdp_starts --count 200 --jobs 4        (make soak-hsdp)

About one start in 200 crashed (`Attempting to broadcast a dimension` in SGD's momentum, or SIGSEGV
in `zero_grad`): the thread of the progress monitor read a gradient, once a second
(tests/gradient_race.py). `--press` makes that thread look a thousand times as often, and nearly
every start crash. A rank is forked from this process, which has torch loaded, and runs `drumline
train`; a crash leaves the stacks of all of its threads. The output of a start that failed is kept
and shown.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from drumline.cli import main as drumline_main
from drumline.rank.watched.progress_monitor import ProgressMonitor
from drumline.training.tasks.base import Loss, Task
from tests.ranks import free_port

PRELOADED = (
    "drumline.cli.train_command",
    "drumline.cli.train_rank",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
NUM_NODES = 2
RANKS_PER_NODE = 2
WORLD_SIZE = NUM_NODES * RANKS_PER_NODE
NUM_FEATURES = 7
NUM_HIDDEN = 32
NUM_CLASSES = 5
START_LIMIT_S = 300.0
POLL_S = 0.02


class Block(nn.Module):
    """33 rows do not divide by two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(NUM_HIDDEN, NUM_HIDDEN + 1)
        self.norm = nn.BatchNorm1d(NUM_HIDDEN + 1)
        self.down = nn.Linear(NUM_HIDDEN + 1, NUM_HIDDEN)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = functional.relu(self.norm(self.up(inputs)))
        return inputs + self.down(hidden)


class UnevenRows(Task):
    """A small network with parameters of 33 and 5 rows."""

    defaults: ClassVar = {
        "train.batch_size": 32,
        "train.steps": 30,
        "dist.device": "cpu",
        "dist.mode": "hsdp",
        "optim.name": "sgd",
        "optim.lr": 0.02,
        "log.every_steps": 5,
        "checkpoint.every_steps": 7,
    }

    def model(self) -> nn.Module:
        blocks = nn.ModuleList(Block() for _ in range(2))
        return nn.Sequential(
            nn.Linear(NUM_FEATURES, NUM_HIDDEN),
            nn.Sequential(*blocks),
            nn.Linear(NUM_HIDDEN, NUM_CLASSES),
        )

    def train_data(self) -> Dataset[Any]:
        return _points(203)

    def eval_data(self) -> Dataset[Any]:
        return _points(41)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        inputs, targets = batch
        return Loss(functional.cross_entropy(model(inputs), targets, reduction="sum"))


def _points(length: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(length, NUM_FEATURES, generator=generator)
    targets = torch.randint(NUM_CLASSES, (length,), generator=generator)
    return TensorDataset(inputs, targets)


@dataclass
class Start:
    """One start of the job."""

    number: int
    folder: Path
    arguments: list[str]
    is_pressed: bool = False
    """Whether the progress monitor looks much more often than once a second."""
    began_at: float = field(default_factory=time.monotonic)
    running: dict[int, int] = field(default_factory=dict)
    """The rank of each process that has not exited, by its pid."""
    failures: list[str] = field(default_factory=list)

    def fork_ranks(self) -> None:
        port = free_port()
        for rank in range(WORLD_SIZE):
            pid = os.fork()
            if pid == 0:
                self._become_rank(rank, port)
            self.running[pid] = rank

    def _become_rank(self, rank: int, port: int) -> None:
        """In the child: `drumline train`, with its output in a file."""
        code = 1
        try:
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD_SIZE),
                "LOCAL_RANK": str(rank % RANKS_PER_NODE),
                "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "DRUMLINE_NODE_START": f"start-{rank // RANKS_PER_NODE}",
            }
            os.environ.update(environment)
            output = os.open(self.folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.enable(output, all_threads=True)
            if self.is_pressed:
                ProgressMonitor.__init__.__kwdefaults__["every_s"] = 0.001
            run = self.folder / "run"
            code = drumline_main(
                ["train", f"{__file__}:UnevenRows", "--run", str(run), *self.arguments]
            )
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def note_exit(self, pid: int, status: int) -> None:
        rank = self.running.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            self.failures.append(f"rank {rank} was killed by {signal.Signals(-code).name}")
        elif code > 0:
            self.failures.append(f"rank {rank} exited with code {code}")

    def end_if_late(self) -> None:
        if self.running and time.monotonic() > self.began_at + START_LIMIT_S:
            self.failures.append(f"no end within {START_LIMIT_S:g} s")
            self.began_at = time.monotonic()
            for pid in self.running:
                os.kill(pid, signal.SIGABRT)  # faulthandler writes the stacks

    def output(self) -> str:
        texts = []
        for path in [
            *sorted(self.folder.glob("output-*")),
            *sorted(self.folder.glob("run/logs/*.log")),
        ]:
            texts.append(f"--- {path.name} ---\n{path.read_text(errors='replace')}")
        return "\n".join(texts)


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute meanwhile."""
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            while os.getppid() != 1:
                sum(range(100_000))
            os._exit(0)
        pids.append(pid)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run_starts(
    count: int, jobs: int, folder: Path, arguments: list[str], *, is_pressed: bool
) -> list[Start]:
    """Returns those that failed."""
    failed: list[Start] = []
    active: list[Start] = []
    num_begun = 0
    while num_begun < count or active:
        while num_begun < count and len(active) < jobs:
            num_begun += 1
            start = Start(num_begun, folder / f"start-{num_begun}", arguments, is_pressed)
            start.folder.mkdir()
            start.fork_ranks()
            active.append(start)
        _reap(active)
        for start in [start for start in active if not start.running]:
            active.remove(start)
            if start.failures:
                failed.append(start)
                print(
                    f"start {start.number}: {'; '.join(start.failures)}\n{start.output()}",
                    flush=True,
                )
            else:
                shutil.rmtree(start.folder, ignore_errors=True)
            if start.number % 10 == 0:
                print(f"{start.number} starts, {len(failed)} failed", flush=True)
        time.sleep(POLL_S)
    return failed


def _reap(active: list[Start]) -> None:
    for start in active:
        for pid in list(start.running):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                start.note_exit(ended_pid, status)
        start.end_if_late()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, help="how many starts [200]")
    parser.add_argument("--jobs", type=int, default=2, help="how many of them at a time [2]")
    parser.add_argument(
        "--busy", type=int, default=0, help="how many processes compute meanwhile [0]"
    )
    parser.add_argument(
        "--press", action="store_true", help="make a race of the progress monitor likely"
    )
    parser.add_argument("arguments", nargs="*", help="more arguments of drumline train, after --")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)
    began_at = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="hsdp-starts-"))
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages of all that is loaded
    with busy_processes(options.busy):
        failed = run_starts(
            options.count, options.jobs, folder, options.arguments, is_pressed=options.press
        )
    kinds = Counter("; ".join(start.failures) for start in failed)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}: {options.count} starts of {WORLD_SIZE} ranks, "
        f"{len(failed)} failed; {time.monotonic() - began_at:.0f} s"
    )
    for text, number in kinds.items():
        print(f"  {number} x {text}")
    if failed:
        print(f"  their output: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
