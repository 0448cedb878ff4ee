"""A whole run folder, part by part."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.engine.run_folder import RunFolder, job_at_work
from drumline.errors import UsageError, did_you_mean
from drumline.verify.checkpoints import Progress, check_checkpoints
from drumline.verify.events import check_events
from drumline.verify.findings import Finding, Part
from drumline.verify.history import FILE, History
from drumline.verify.samples import check_samples


@dataclass(frozen=True)
class Verdict:
    """What was found in a run folder."""

    run: Path
    parts: list[Part]
    job_at_work: str | None
    """Who is training in it, if anyone is: then it was looked at as far as it is."""
    last_whole_step: int | None
    """Of the newest checkpoint that is whole."""

    @property
    def problems(self) -> list[Finding]:
        return [problem for part in self.parts for problem in part.problems]

    @property
    def notes(self) -> list[Finding]:
        return [note for part in self.parts for note in part.notes]


def verify_run(run: Path, progress: Progress) -> Verdict:
    """Check everything in a run folder; changes nothing."""
    folder = RunFolder(run)
    holder = job_at_work(folder)
    checkpoints, samples, events, settings = map(Part, ("checkpoints", "samples", "events", "settings"))
    # In this order: the ledger is ahead of the checkpoints, also where a job goes on writing.
    saved = check_checkpoints(folder.checkpoints, checkpoints, progress)
    history = check_samples(folder.ledger, samples, saved)
    hosts = _check_settings(folder, settings)
    is_numbered = check_events(folder.events, events, recorded=_recorded(history), hosts=hosts)
    if history is None and not samples.problems:
        _tell_no_ledger(samples, is_expected=is_numbered and bool(saved))
    last = max((position.step for position in saved), default=None)
    return Verdict(run, [checkpoints, samples, events, settings], holder, last)


def find_run(run: Path) -> Path:
    """The folder, once it is known to be a run's; the error says which ones there are."""
    if _is_run(run):
        return run
    if run.is_dir():
        inside = sorted(path.name for path in run.iterdir() if _is_run(path))
        next_step = (
            f"give one of the runs in it: {', '.join(inside)}" if inside else "give the folder of --run"
        )
        raise UsageError(
            f"{run} is not a run folder: it has no config.toml, events or checkpoints", next_step=next_step
        )
    beside = [path.name for path in run.parent.iterdir() if _is_run(path)] if run.parent.is_dir() else []
    hint = f"; {did_you_mean(run.name, beside)}" if beside else ""
    raise UsageError(f"there is no run folder {run}{hint}", next_step="give the folder that `--run` named")


def _is_run(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.config_file.is_file() or folder.events.is_dir() or folder.checkpoints.is_dir()


def _recorded(history: History | None) -> set[int]:
    """Steps that a checkpoint may have been taken at."""
    if history is None:
        return set()
    return {stretch.last for stretch in history.stretches} | {start.step for start in history.starts}


def _tell_no_ledger(part: Part, *, is_expected: bool) -> None:
    if is_expected:
        part.problem(FILE, "is missing, though the run has taken steps")
    else:
        part.note(FILE, "is not there: no step was saved, or an older version trained")


def _check_settings(folder: RunFolder, part: Part) -> dict[int, str]:
    """Both files can be read; returns the host of each rank of the latest start."""
    settings = _load(folder.config_file, tomllib.loads, part)
    environment = _load(folder.environment_file, json.loads, part)
    part.counts = {"readable": (settings is not None) + (environment is not None)}
    part.summary = (
        "config.toml and environment.json can be read" if not part.problems else "cannot all be read"
    )
    try:
        return {int(entry["rank"]): str(entry["host"]) for entry in (environment or {})["ranks"]}
    except (KeyError, TypeError, ValueError):
        if environment is not None:
            part.problem(folder.environment_file.name, "does not say which ranks ran where")
        return {}


def _load(path: Path, parse: Callable[[str], Any], part: Part) -> dict[str, Any] | None:
    try:
        content = parse(path.read_text())
    except FileNotFoundError:
        part.problem(path.name, "is missing")
    except OSError as error:
        part.problem(path.name, f"cannot be read: {error.strerror}")
    except ValueError as error:
        part.problem(path.name, f"is damaged: {error}")
    else:
        if isinstance(content, dict):
            return content
        part.problem(path.name, "is damaged: it holds no settings")
    return None
