"""One leg of a run: it is started, watched through its trace, and ended with -9 at the moment that was drawn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from drumline.audit.job_processes import JobProcesses
from drumline.audit.kill_schedule import Kill
from drumline.engine.run_folder import RunFolder
from drumline.errors import DrumlineError, ExitCode
from drumline.terminal import one_line

POLL_S = 0.0005
MOST_WAIT_S = 1.0
END_S = 60.0
LAST_LINES = 12


class RunFailedError(DrumlineError):
    """A run that was to be compared failed by itself."""


@dataclass(frozen=True)
class Leg:
    """A run, or a part of one, to be started."""

    name: str
    arguments: tuple[str, ...]
    """Of `drumline train`."""
    folder: Path
    log: Path
    world_size: int

    @property
    def command(self) -> list[str]:
        ranks = ["--run", str(self.folder), "--procs", str(self.world_size), "--max-restarts", "0"]
        return [sys.executable, "-m", "drumline", "train", *self.arguments, *ranks]


def run_to_the_end(leg: Leg) -> None:
    """Run a leg that nobody interrupts."""
    with JobProcesses(leg.command, log=leg.log) as family:
        if code := family.wait():
            raise failed(leg, code)


def run_and_kill(leg: Leg, kill: Kill) -> bool:
    """Run a leg and kill it; False: the moment had passed, or the run had ended."""
    watch = LegProgress(leg)
    with JobProcesses(leg.command, log=leg.log) as family:
        in_time = _await(kill, watch, family)
        if family.exit_code:
            raise failed(leg, family.exit_code)
        family.kill(watch.pids_of(kill.ranks) if family.exit_code is None else [])
        code = family.wait(END_S)
        if code is None:
            raise RunFailedError(
                f"{leg.name} did not end within {END_S:.0f} s after rank {kill.ranks[0]} was killed",
                next_step=f"see {leg.log} and {RunFolder(leg.folder).logs}",
            )
        return in_time and code != 0


def failed(leg: Leg, code: int) -> RunFailedError:
    """What to say of a leg that ended with an error of its own."""
    lines = leg.log.read_text(errors="replace", encoding="utf-8").rstrip().splitlines()[-LAST_LINES:]
    knew = code in (ExitCode.USAGE, ExitCode.PREFLIGHT_FAILED)
    advice = "do what it says" if knew else "make the job run without kills first"
    error = RunFailedError(
        "\n".join(
            [
                f"{leg.name} failed by itself with exit code {code}:",
                *(f"  | {one_line(line)}" for line in dedent("\n".join(lines)).splitlines()),
            ]
        ),
        next_step=f"{advice}; all it printed is in {leg.log}",
    )
    error.exit_code = ExitCode(code) if code in list(ExitCode) else ExitCode.TRAINING_FAILED
    return error


class Tail:
    """The lines of a file that grows, each handed out once, when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """What has come since the last time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class LegProgress:
    """Where a leg stands, by what its ranks write. It is made before the leg is started."""

    def __init__(self, leg: Leg) -> None:
        self._folder = RunFolder(leg.folder)
        self._tail = Tail(self._folder.trace_file(0))
        self._left = {path: _age(path) for path in self._folder.checkpoints.glob(".step-*.partial")}
        self._latest = {"start": 0, "step": 0, "evaluation": 0, "evaluated": 0}
        self._seen_at = [time.monotonic()] * 2

    def has_come(self, kill: Kill) -> bool:
        """Whether the moment of a kill has begun."""
        for line in self._tail.new():
            self._latest[line["kind"]] = line["step"]
            self._seen_at = [self._seen_at[-1], time.monotonic()]
        if kill.moment == "save":
            return self._latest["step"] >= kill.step and self._is_saving(kill.step)
        return self._latest[kill.moment] >= kill.step

    def pids_of(self, ranks: Sequence[int]) -> list[int]:
        """Of those that have begun."""
        starts = (Tail(self._folder.trace_file(rank)).new()[:1] for rank in ranks)
        return [start["pid"] for found in starts for start in found]

    def still_lasts(self, kill: Kill) -> bool:
        """Whether that moment has not ended."""
        return self.has_come(kill) and (kill.moment != "evaluation" or self._latest["evaluated"] < kill.step)

    def last_interval_s(self) -> float:
        """Between the last two lines: about one step."""
        return min(self._seen_at[1] - self._seen_at[0], MOST_WAIT_S)

    def _is_saving(self, step: int) -> bool:
        """A leg that was killed in the same save has left its own half of it: that one does not count."""
        partial = self._folder.checkpoints / f".step-{step:08d}.partial"
        return (age := _age(partial)) is not None and age != self._left.get(partial)


def _age(path: Path) -> int | None:
    """When something in a folder last changed; None: it is not there."""
    try:
        return path.stat().st_ctime_ns
    except FileNotFoundError:
        return None


def _await(kill: Kill, watch: LegProgress, family: JobProcesses) -> bool:
    """Wait for the moment; False: it never came, or was over before the process could be killed."""
    while family.exit_code is None:
        if watch.has_come(kill) and len(watch.pids_of(kill.ranks)) == len(kill.ranks):
            usual_s = watch.last_interval_s() if kill.usual_s is None else kill.usual_s
            time.sleep(kill.wait * usual_s)
            return watch.still_lasts(kill)
        time.sleep(POLL_S)
    return False


def describe(kill: Kill, leg: Leg, last_step: int) -> str:
    """`killed with -9 during the save of step 6 (rank 1)`; `last_step`: the last one that rank 0 had taken."""
    saved = RunFolder(leg.folder).checkpoints / f"step-{kill.step:08d}"
    where = {
        "step": f"after step {last_step}",
        "save": f"{'at the end of' if saved.exists() else 'during'} the save of step {kill.step}",
        "evaluation": f"during the evaluation after step {kill.step}",
    }[kill.moment]
    who = ", ".join(map(str, kill.ranks))
    return f"killed with -9 {where} (rank{'s' if len(kill.ranks) > 1 else ''} {who})"
