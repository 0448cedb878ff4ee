"""A whole run folder, part by part."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.audit.checkpoint_check import (
    Progress,
    check_checkpoints,
    check_newest_save,
    check_saves_are_reported,
    tell_no_ledger,
)
from drumline.audit.event_check import check_events
from drumline.audit.samples import check_samples
from drumline.audit.section import Remark, Section
from drumline.engine.run_folder import RunFolder, job_at_work
from drumline.errors import UsageError, did_you_mean
from drumline.untrusted import DOCUMENT_BYTES, TEXT_BYTES, parse_json, parse_toml, read_regular


@dataclass(frozen=True)
class RunReport:
    """What was found in a run folder."""

    run: Path
    parts: list[Section]
    job_at_work: str | None
    """Who is training in it, if anyone is: then it was looked at as far as it is."""
    last_whole_step: int | None
    """Of the newest checkpoint that is whole and finite."""

    @property
    def problems(self) -> list[Remark]:
        return [problem for part in self.parts for problem in part.problems]

    @property
    def notes(self) -> list[Remark]:
        return [note for part in self.parts for note in part.notes]


def verify_run(run: Path, progress: Progress) -> RunReport:
    """Check everything in a run folder; changes nothing."""
    folder = RunFolder(run)
    holder = job_at_work(folder)
    is_at_work = holder is not None
    checkpoints, samples, events, settings = map(Section, ("checkpoints", "samples", "events", "settings"))
    # In this order, also where a job goes on writing: the ledger is ahead of the checkpoints, the events are of both.
    saved = check_checkpoints(folder.checkpoints, checkpoints, progress)
    history = check_samples(folder.ledger, samples, saved)
    hosts, missing = check_settings(folder, settings)
    reported = check_events(folder.events, events, history=history, hosts=hosts, is_at_work=is_at_work)
    check_newest_save(folder.checkpoints, checkpoints, reported, is_at_work=is_at_work)
    check_saves_are_reported(saved, events, reported)
    if history is None and not samples.problems:
        is_expected = reported.is_numbered and (bool(saved) or reported.has_saved)
        tell_no_ledger(samples, is_expected=is_expected)
    expected = {folder.config_file.name} if saved or reported.has_saved else set()
    if expected or reported.has_started or history is not None:
        expected.add(folder.environment_file.name)
    tell_missing(missing, settings, expected=expected, is_at_work=is_at_work)
    last = max((position.step for position in saved if position.is_finite), default=None)
    return RunReport(run, [checkpoints, samples, events, settings], holder, last)


def find_run(run: Path) -> Path:
    """The folder, once it is known to be a run's; the error says which ones there are."""
    if _is_run(run):
        return run
    around = next((parent for parent in islice(run.absolute().parents, 2) if _is_run(parent)), None)
    if run.is_file():
        next_step = f"give {around}" if around is not None else "give the folder of --run"
        raise UsageError(f"{run} is a file, not a run folder", next_step=next_step)
    if run.is_dir():
        inside = sorted(path.name for path in run.iterdir() if _is_run(path))
        raise UsageError(
            f"{run} is not a run folder: it has no config.toml, events or checkpoints",
            next_step=_instead(inside, around),
        )
    beside = [path.name for path in run.parent.iterdir() if _is_run(path)] if run.parent.is_dir() else []
    hint = f"; {did_you_mean(run.name, beside, known_as='known runs here')}" if beside else ""
    raise UsageError(f"there is no run folder {run}{hint}", next_step="give the folder that `--run` named")


def _instead(inside: list[str], around: Path | None) -> str:
    if inside:
        return f"give one of the runs in it: {', '.join(inside)}"
    return "give the folder of --run" if around is None else f"give the run folder that it is in: {around}"


def _is_run(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.config_file.is_file() or folder.events.is_dir() or folder.checkpoints.is_dir()


def check_settings(folder: RunFolder, part: Section) -> tuple[dict[int, str], list[str]]:
    """Returns the host of each rank of the latest start, and the files that are not there, of which nothing is told."""
    paths = (folder.config_file, folder.environment_file)
    missing = [path.name for path in paths if not os.path.lexists(path)]
    settings = _read_file(folder.config_file, parse_toml, part)
    environment = _read_file(folder.environment_file, parse_json, part)
    part.counts = {"readable": (settings is not None) + (environment is not None)}
    part.summary = (
        "config.toml and environment.json can be read"
        if part.counts["readable"] == 2
        else "cannot all be read"
    )
    try:
        return {int(entry["rank"]): str(entry["host"]) for entry in (environment or {})["ranks"]}, missing
    except (KeyError, TypeError, ValueError, OverflowError):
        if environment is not None:
            part.problem(folder.environment_file.name, "does not say which ranks ran where")
        return {}, missing


def tell_missing(missing: list[str], part: Section, *, expected: set[str], is_at_work: bool) -> None:
    """environment.json is written before a job reports its start, config.toml after its first step."""
    for name in missing:
        if is_at_work:
            part.note(name, "is not there yet: a job is starting")
        elif name in expected:
            part.problem(name, "is missing")
        else:
            part.note(name, "is not there: the job ended, or was killed, before its first step")
    if missing and not part.problems:
        part.summary = "not written yet" if is_at_work else "not written"


def _read_file(path: Path, parse: Callable[[str], Any], part: Section) -> dict[str, Any] | None:
    try:
        most = TEXT_BYTES if path.suffix == ".toml" else DOCUMENT_BYTES
        content = parse(read_regular(path, most=most).decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        part.problem(path.name, f"cannot be read: {error.strerror}")
    except ValueError as error:
        part.problem(path.name, f"is damaged: {error}")
    else:
        if isinstance(content, dict):
            return content
        part.problem(path.name, "is damaged: it holds no settings")
    return None
