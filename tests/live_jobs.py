"""Nodes of one rank each that train with `--dist.on_lost_node continue`, and can be held, killed
and started again.

Each is a process that runs `drumline train`, forked from the server of tests/ranks.py.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from drumline.parallel.replica_groups import DeltaSum
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.report.verify.run_check import verify_run
from drumline.runs.events import read_events
from drumline.training.tasks.hook import Hook, Run
from tests.jobs import Classify, Points
from tests.ranks import free_port, server_context
from tests.stream_jobs import Plain

LIMIT_S = 120.0


class Hold(Hook):
    """Waits after a step, or between the halves of a round, while there is a file that says so."""

    every_steps = 1

    def start(self, run: Run) -> None:
        self.folder = run.folder
        self.node = os.environ["RANK"]
        (run.folder / f"pid-{self.node}").write_text(str(os.getpid()))
        (run.folder / f"began-{self.node}").write_text(str(run.step))
        print(f"node {self.node} trains as rank {dist.get_rank()}", flush=True)
        advance = DeltaSum.advance

        def held(this: DeltaSum) -> None:
            wait_here(self.folder / f"hold-{self.node}-exchange")
            advance(this)

        if (run.folder / f"hold-{self.node}-exchange").exists():
            DeltaSum.advance = held  # type: ignore[method-assign]

    def after_step(self, run: Run) -> None:
        wait_here(self.folder / f"hold-{self.node}-{run.step}", self._note_joiner)

    def _note_joiner(self) -> None:
        if any(isinstance(item, LiveNodes) and item.has_joiner for item in gc.get_objects()):
            (self.folder / "has-joiner").touch()


class Held(Classify):
    defaults: ClassVar = {
        "train.batch_size": 12, "train.eval_every_epochs": 0, "checkpoint.every_epochs": 0, "log.every_steps": 5,
        "dist.device": "cpu", "dist.sync": "diloco:5", "dist.on_lost_node": "continue", "watch.sidecar": "off",
        "data.samples": 61, "optim.lr": 0.05, "optim.schedule": "constant", "train.steps": 40,
    }  # fmt: skip

    def train_data(self) -> Dataset[Any]:
        count = self.config.data.samples + int(os.environ.get("MORE_SAMPLES", "0"))
        return Plain(count, jitter=0.0) if os.environ.get("STREAM") else Points(count)

    def hooks(self) -> Sequence[Hook]:
        return [Hold()]


class HeldNormalised(Held):
    """With BatchNorm and dropout: a forward pass changes buffers, and the state of random
    numbers."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
        ).double()


def wait_here(file: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    if file.exists():
        file.with_name(f"{file.name}-reached").touch()
        while file.exists():
            meanwhile()
            time.sleep(0.05)


class Nodes:
    def __init__(
        self, folder: Path, count: int, *arguments: str, per_node: int = 1, task: type[Held] = Held
    ) -> None:
        self.task = task
        self.run = folder / "run"
        self.count = count
        self.arguments = arguments
        self.per_node = per_node
        self.folder = folder
        self._port = free_port()
        self.run.mkdir(parents=True)
        self.processes: dict[int, list[Any]] = {}
        self.variables: dict[str, str] = {}
        self._starts = 0

    def start(self, *numbers: int) -> None:
        for number in numbers:
            self._starts += 1
            was_there = number in self.processes
            self.processes[number] = []
            for local_rank in range(self.per_node):
                environment = {
                    "RANK": str(number * self.per_node + local_rank), "WORLD_SIZE": str(self.count * self.per_node),
                    "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.per_node),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), "GLOO_SOCKET_IFNAME": "lo",
                    "DRUMLINE_RESTARTED": "1" if was_there else "", "DRUMLINE_NODE_START": f"start-{self._starts}",
                    **self.variables,
                }  # fmt: skip
                words = [
                    "train",
                    f"{__file__}:{self.task.__name__}",
                    "--run",
                    str(self.run),
                    *self.arguments,
                ]
                output = self.folder / f"output-{self._starts}-{number}-{local_rank}"
                process = server_context.Process(
                    target=_train, args=(environment, words, str(output))
                )
                process.start()
                self.processes[number].append(process)

    def hold(self, number: int, where: int | str) -> Callable[[], None]:
        """Before the start. Returns what lets it go."""
        file = self.run / f"hold-{number}-{where}"
        file.touch()
        return file.unlink

    def held(self, number: int, where: int | str) -> None:
        """Wait until it is there."""
        self.until(
            lambda: (self.run / f"hold-{number}-{where}-reached").exists(),
            f"node {number} held at {where}",
        )

    def kill(self, *numbers: int) -> None:
        for one in [process for number in numbers for process in self.processes[number]]:
            one.kill()
            one.join()

    def pid(self, number: int) -> int:
        return int((self.run / f"pid-{number}").read_text())

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"never: {what}\n{self.output()}"
            time.sleep(0.02)

    def until_joiner_is_known(self) -> None:
        """To a node that is held: it lets it in after its next round."""
        self.until((self.run / "has-joiner").exists, "a node that waits to join")

    def until_printed(self, text: str) -> None:
        self.until(lambda: text in self.output(), text)

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [
                event
                for event in read_events(self.run / f"events/rank-{rank:05d}.jsonl")
                if event["kind"] == kind
            ]
        return []

    def output(self) -> str:
        texts = [path.read_text() for path in sorted(self.folder.glob("output-*"))]
        return "\n".join(
            [*texts, *(path.read_text() for path in sorted(self.run.glob("logs/*.log")))]
        )

    def finish(self, *numbers: int) -> None:
        """All of them end well, and what they leave is right."""
        for number in numbers:
            for process in self.processes[number]:
                process.join(LIMIT_S)
                assert process.exitcode == 0, (
                    f"node {number} ended with {process.exitcode}\n{self.output()}"
                )
        report = verify_run(self.run, lambda *_: None)
        assert report.problems == [], report.problems

    def close(self) -> None:
        for one in [process for some in self.processes.values() for process in some]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
            one.join()


@contextlib.contextmanager
def nodes(
    folder: Path, count: int, *arguments: str, per_node: int = 1, task: type[Held] = Held
) -> Iterator[Nodes]:
    made = Nodes(folder, count, *arguments, per_node=per_node, task=task)
    try:
        yield made
    finally:
        made.close()


def _train(environment: dict[str, str], words: list[str], output: str) -> None:
    import torch

    from drumline.cli import main

    torch.set_num_threads(1)
    os.environ.update(environment)
    target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os._exit(main(words))
