"""False alarms: a healthy run on two hosts with pauses of every kind. Every report is counted.

The data stall may be noted, as a stall; nothing else may be said, and nothing may be done.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from drumline.runs.events import read_events
from tests.multinode.faults import reading
from tests.multinode.faults.calm_task import PAUSES, VARIABLE
from tests.multinode.faults.catalogue import HOSTS, RANKS_PER_HOST
from tests.multinode.faults.healthy import run_healthy
from tests.multinode.faults.reading import Said
from tests.multinode.hosts import Testbed

ROOT = Path(__file__).parents[3]
TASK = f"{Path(__file__).with_name('calm_task.py')}:Calm"
STEPS_PER_EPOCH = 128
SLACK_S = 3.0
"""A stall's sentence may come a little after the stall is over."""


@dataclass(frozen=True)
class Calmness:
    """What became of a healthy run."""

    codes: list[int]
    steps: int
    seconds: float
    paused: list[str]
    """Which pauses there were, one for each rank that took it."""
    false_alarms: list[Said]
    noted: list[Said]
    """The data stall, rightly."""
    text: str

    @property
    def is_fine(self) -> bool:
        everything = set(self.paused) == set(PAUSES)
        return not any(self.codes) and not self.false_alarms and everything


def run_calm(folder: Path, *, steps: int, timeout_s: float = 3600.0) -> Calmness:
    """Collective in effect: two launchers, each on its host, to their end."""
    started = time.monotonic()
    with Testbed(folder / "bed", HOSTS) as bed:
        jobs = []
        for node, host in enumerate(bed):
            where = (
                "--nodes",
                str(len(HOSTS)),
                "--node-rank",
                str(node),
                "--master",
                bed.hosts[0].address,
            )
            jobs.append(
                host.start(
                    *(
                        sys.executable,
                        "-m",
                        "drumline",
                        "launch",
                        *where,
                        "--procs",
                        str(RANKS_PER_HOST),
                    ),
                    *(TASK, "--run", str(folder / "run"), *_settings(steps)),
                    cwd=folder,
                    env={
                        "PYTHONPATH": str(ROOT),
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "OMP_NUM_THREADS": "1",
                        VARIABLE: str(folder),
                    },
                )
            )
        codes = [job.wait(timeout_s) for job in jobs]
        text = "\n".join(job.text() for job in jobs)
    return _judge(folder, codes, time.monotonic() - started, text)


def _settings(steps: int) -> tuple[str, ...]:
    epochs = max(1, steps // STEPS_PER_EPOCH)
    return (
        *("--train.steps", str(steps), "--train.batch_size", "16"),
        *("--train.eval_every_epochs", str(max(1, epochs // 3))),
        *("--checkpoint.every_epochs", "0", "--checkpoint.every_steps", str(max(1, steps // 20))),
        *("--dist.device", "cpu", "--dist.threads", "1", "--log.every_steps", "50"),
    )


def _judge(folder: Path, codes: list[int], seconds: float, text: str) -> Calmness:
    notes = folder / "pauses.jsonl"
    pauses = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
    stalls = [
        (pause["began"], pause["ended"] + SLACK_S) for pause in pauses if pause["what"] == "data"
    ]
    sentences = reading.said_in(folder)
    noted = [
        sentence
        for sentence in sentences
        if sentence.word == "stall" and any(low < sentence.time < high for low, high in stalls)
    ]
    events = folder / "run" / "events" / "rank-00000.jsonl"
    steps = (
        max((event["step"] for event in read_events(events)), default=0) if events.exists() else 0
    )
    return Calmness(
        codes=codes,
        steps=int(steps),
        seconds=seconds,
        paused=[pause["what"] for pause in pauses],
        false_alarms=[sentence for sentence in sentences if sentence not in noted],
        noted=noted,
        text=text,
    )


def main(folder: Path, *, steps: int) -> int:
    """Both kinds: the healthy jobs side by side, then the long run."""
    outcomes = run_healthy(folder)
    for outcome in outcomes:
        print(
            f"{outcome.name}: exit code {outcome.code}, {len(outcome.said)} stalls, "
            f"{len(outcome.unexpected)} false alarms"
        )
        if not outcome.is_fine:
            print(
                f"{reading.to_text(outcome.unexpected)}\n{outcome.text[-4000:]}\nsee {folder / outcome.name}"
            )
    long_run = folder / "long_run"
    long_run.mkdir()
    is_calm = _main_calm(long_run, steps=steps)
    if not is_calm or not all(outcome.is_fine for outcome in outcomes):
        return 1
    shutil.rmtree(folder)
    return 0


def _main_calm(folder: Path, *, steps: int) -> bool:
    calm = run_calm(folder, steps=steps)
    print(
        f"{calm.steps} steps in {calm.seconds / 60:.0f} min with {len(calm.paused)} pauses; exit codes {calm.codes}"
    )
    print(
        f"false alarms: {len(calm.false_alarms)}; the data stall was noted {len(calm.noted)} times"
    )
    print(reading.to_text([*calm.false_alarms, *calm.noted]))
    if not calm.is_fine:
        print(f"{calm.text[-4000:]}\nsee {folder}; pauses: {calm.paused}")
    return calm.is_fine
