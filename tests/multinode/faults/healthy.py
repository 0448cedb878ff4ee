"""False alarms, continued: jobs that only wait, or whose progress is hard to see. None may be
ended.

They run side by side on this machine, with the defaults of a user who sets nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.multinode.faults import reading
from tests.multinode.faults.reading import Said

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SCRIPT = str(HERE / "healthy_jobs.py")


@dataclass(frozen=True)
class Healthy:
    """A job, and what may be reported of it: a stall, or nothing."""

    name: str
    words: tuple[str, ...]
    seconds: float
    causes: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "drumline",
            "launch",
            "--procs",
            "2",
            "--max-restarts",
            "0",
            *self.words,
        ]


JOBS = (
    Healthy("own_loader", (SCRIPT, "own_loader"), 330.0),
    Healthy("helper", (SCRIPT, "helper"), 6.0, ("dataset",)),
    Healthy("sleeps", ("--watch", SCRIPT, "sleeps"), 90.0, ("user_code",)),
    Healthy(
        "breakpoint",
        (f"{SCRIPT}:Breakpoint", "--run", "run", "--train.steps", "90", "--train.batch_size", "16"),
        80.0,
        ("debugged", "user_code", "slow"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What became of one."""

    name: str
    code: int
    said: list[Said]
    unexpected: list[Said]
    text: str

    @property
    def is_fine(self) -> bool:
        return self.code == 0 and not self.unexpected


def run_healthy(folder: Path, *, timeout_s: float = 1200.0) -> list[Outcome]:
    started = [(job, *_start(job, folder / job.name)) for job in JOBS]
    return [_judge(job, process.wait(timeout_s), log) for job, process, log in started]


def _start(job: Healthy, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    folder.mkdir()
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HEALTHY_S": f"{job.seconds:g}"}
    seconds = () if ":" in job.words[0] else (f"{job.seconds:g}",)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*job.command, *seconds],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    return process, folder / "log"


def _judge(job: Healthy, code: int, log: Path) -> Outcome:
    sentences = reading.said_in(log.parent)
    # That it continues has no cause.
    unexpected = [
        sentence
        for sentence in sentences
        if sentence.word != "stall" or sentence.cause not in ("", *job.causes)
    ]
    return Outcome(job.name, code, sentences, unexpected, log.read_text(errors="replace"))
