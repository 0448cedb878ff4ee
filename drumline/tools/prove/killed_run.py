"""Starts one leg of a run, follows its trace, kills it with -9 at the chosen moment, and ends all
its processes."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Self

from drumline.base.errors import DrumlineError, ExitCode
from drumline.base.processes import (
    Termination,
    ending_with_parent,
    processes_with_variable,
    send_signal,
)
from drumline.base.rank_environment import own_variables
from drumline.base.text import named_ranks, one_line
from drumline.runs.catalog import folder_name
from drumline.runs.events import Tail
from drumline.runs.run_folder import RunFolder
from drumline.tools.prove.proof_plan import Kill

POLL_S = 0.0005
MOST_WAIT_S = 1.0
END_S = 60.0
GRACE_S = 10.0
LAST_LINES = 12
JOB_VARIABLE = "DRUMLINE_PROOF"
"""By its value all processes of a job are found."""


class RunFailedError(DrumlineError):
    """A run failed by itself."""


@dataclass(frozen=True)
class Leg:
    """A run, or a part of one."""

    name: str
    arguments: tuple[str, ...]
    """What follows `drumline train`."""
    folder: Path
    log: Path
    world_size: int
    hosts: Sequence[tuple[str, int]] = ()
    """Where it runs, over ssh, and on how many ranks of each; they share its folder. Empty: here."""

    @property
    def command(self) -> list[str]:
        """The command line that runs the leg."""
        words = ["train", "--procs", str(self.world_size)]
        if self.hosts:
            hosts = ",".join(f"{name}:{count}" for name, count in self.hosts)
            words = ["launch", "--no-standby", "--hosts", hosts]

        folder = ["--run", str(self.folder)]
        restarts = ["--max-restarts", "0"]

        return [sys.executable, "-m", "drumline", *words, *restarts, *self.arguments, *folder]


def run_to_the_end(leg: Leg) -> None:
    """Run a leg; a RunFailedError if it fails."""
    with JobProcesses(leg.command, log=leg.log) as job:
        if code := job.wait():
            raise failed(leg, code)


def run_and_kill(leg: Leg, kill: Kill) -> bool:
    """Run a leg and kill it; False: the moment had passed, or the run had ended."""
    progress = LegProgress(leg)
    with JobProcesses(leg.command, log=leg.log) as job:
        in_time = _await(kill, progress, job)
        if job.exit_code:
            raise failed(leg, job.exit_code)

        job.kill(progress.pids_of(kill.ranks) if job.exit_code is None else [])
        code = job.wait(END_S)
        if code is None:
            raise RunFailedError(
                f"{leg.name} did not end within {END_S:.0f} s after rank {kill.ranks[0]} was killed",
                next_step=f"read {leg.log} and {RunFolder(leg.folder).logs}",
            )

        return in_time and code != 0


def failed(leg: Leg, code: int) -> RunFailedError:
    """The error for a leg that failed without a kill: its last lines, and its exit code.

    leg 2 failed by itself with exit code 1:
      | drumline: error: rank 1 on gpu-01 crashed at step 4: ValueError: label 7 is out of range
      try: fix the job first; its full output is in proof/leg-2.log
    """
    output = leg.log.read_text(errors="replace", encoding="utf-8")
    last_lines = output.rstrip().splitlines()[-LAST_LINES:]
    quoted = [f"  | {one_line(line)}" for line in dedent("\n".join(last_lines)).splitlines()]
    has_advice = code in (ExitCode.USAGE, ExitCode.PREFLIGHT_FAILED)
    advice = "do what it says" if has_advice else "fix the job first"
    error = RunFailedError(
        "\n".join([f"{leg.name} failed by itself with exit code {code}:", *quoted]),
        next_step=f"{advice}; its full output is in {leg.log}",
    )
    error.exit_code = ExitCode(code) if code in list(ExitCode) else ExitCode.TRAINING_FAILED

    return error


def describe(kill: Kill, last_step: int) -> str:
    """`killed with -9 during the save of step 6 (rank 1)`; `last_step`: the last one that was
    done."""
    where = {
        "step": f"after step {last_step}",
        "save": f"during the save of step {kill.step}",
        "evaluation": f"during the evaluation after step {kill.step}",
    }[kill.moment]
    return f"killed with -9 {where} ({named_ranks(kill.ranks)})"


def _await(kill: Kill, progress: LegProgress, job: JobProcesses) -> bool:
    """Wait for the moment; False: the job ended before, or the moment has already passed."""
    while job.exit_code is None:
        if progress.has_begun(kill) and len(progress.pids_of(kill.ranks)) == len(kill.ranks):
            length_s = kill.usual_s
            if length_s is None:
                # The time between the last two lines is about one step.
                length_s = min(progress.seen_at[1] - progress.seen_at[0], MOST_WAIT_S)

            time.sleep(kill.wait * length_s)
            is_evaluated = kill.moment == "evaluation" and progress.latest["evaluated"] >= kill.step
            return progress.has_begun(kill) and not is_evaluated

        time.sleep(POLL_S)

    return False


class LegProgress:
    """How far a leg is, from what its ranks write. Create it before the leg is started.

    A line of a trace has a kind and a step: `{"kind": "step", "step": 4, ...}`.
    """

    def __init__(self, leg: Leg) -> None:
        self._folder = RunFolder(leg.folder)
        self._tail = Tail(self._folder.trace_file(0))
        self.latest = {"start": 0, "step": 0, "evaluation": 0, "evaluated": 0}
        """By kind of line: the step of the last one."""
        self.seen_at = [time.monotonic()] * 2
        """When the last two lines were seen."""

    def has_begun(self, kill: Kill) -> bool:
        """Whether the moment of a kill has begun."""
        for line in self._tail.new():
            self.latest[line["kind"]] = line["step"]
            self.seen_at = [self.seen_at[-1], time.monotonic()]

        checkpoints = self._folder.checkpoints
        if kill.moment == "save":
            partial = checkpoints / f".{folder_name(kill.step)}.partial"
            return self.latest["step"] >= kill.step and partial.exists()

        # There must be a complete checkpoint, which a busy machine may write late: otherwise the
        # next leg cannot resume.
        return self.latest[kill.moment] >= kill.step and any(checkpoints.glob("step-*"))

    def pids_of(self, ranks: Sequence[int]) -> list[int]:
        """The processes of those ranks that have started."""
        pids = []
        for rank in ranks:
            lines = Tail(self._folder.trace_file(rank)).new()
            if lines:
                pids.append(lines[0]["pid"])

        return pids


class JobProcesses:
    """A running command and what it has started; if it is killed or still runs, none of that
    outlives the context."""

    def __init__(self, command: Sequence[str], *, log: Path) -> None:
        token = secrets.token_hex(8)
        self._variable = f"{JOB_VARIABLE}={token}"
        self._is_killed = False

        with log.open("wb") as file:
            # A new session: Ctrl-C reaches only this process, which then ends the job.
            self._root = subprocess.Popen(
                ending_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**own_variables(), JOB_VARIABLE: token},
            )

    def __enter__(self) -> Self:
        return self

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._root.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None when it still runs after that time."""
        with suppress(subprocess.TimeoutExpired):
            return self._root.wait(timeout_s)

        return None

    def kill(self, pids: Sequence[int]) -> None:
        """End some of its processes with SIGKILL. Their children run until the end of the
        context."""
        self._is_killed = True
        send_signal(pids, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        """While it runs, torchrun's agent ends its ranks; a job that ended by itself is left to
        finish."""
        if self._root.poll() is None:
            Termination(self._remaining, GRACE_S).wait()
        elif self._is_killed:
            Termination(self._remaining, 0.0).wait()

    def _remaining(self) -> list[int]:
        """The processes of the job that still run."""
        self._root.poll()  # reaps it
        return processes_with_variable(self._variable)
