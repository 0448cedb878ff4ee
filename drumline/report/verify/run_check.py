"""Checks a run folder: checkpoints, samples, events and settings, one section for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.base.untrusted import DOCUMENT_BYTES, TEXT_BYTES, parse_json, parse_toml, read_regular
from drumline.report.verify.checkpoint_check import (
    Progress,
    Verify,
    check_checkpoints,
    check_newest_save,
)
from drumline.report.verify.event_check import check_events
from drumline.report.verify.samples import FILE, check_samples
from drumline.report.verify.section import Remark, Section
from drumline.runs import catalog
from drumline.runs.run_folder import RunFolder, job_at_work

SAVED_BY_OWN_LOOP = (
    "saved by ddp.checkpoint: a loop of your own records no samples, events or settings"
)


@dataclass(frozen=True)
class RunReport:
    run: Path | str
    sections: list[Section]
    job_at_work: str | None
    """The job that is training in it, if any: then it was checked as far as it was written."""
    last_valid_step: int | None
    """The step of the newest checkpoint that is complete and finite."""

    @property
    def problems(self) -> list[Remark]:
        return [problem for section in self.sections for problem in section.problems]

    @property
    def notes(self) -> list[Remark]:
        return [note for section in self.sections for note in section.notes]


def verify_run(run: Path, progress: Progress, mirror: Verify | None = None) -> RunReport:
    """Check everything in a run folder; changes nothing. `mirror`: reads the checkpoints from an
    object store, where a job may be training."""
    folder = RunFolder(run)
    holder = job_at_work(folder)
    is_at_work = holder is not None or mirror is not None
    checkpoints, samples, events, settings = map(
        Section, ("checkpoints", "samples", "events", "settings")
    )
    # In this order, because a running job continues to write: the ledger before a checkpoint,
    # events after both.
    saved = check_checkpoints(folder.checkpoints, checkpoints, progress, mirror or catalog.verify)
    last = max((position.step for position in saved if position.is_finite), default=None)
    if saved and all(position.in_own_loop for position in saved):
        checkpoints.note(folder.checkpoints.name, SAVED_BY_OWN_LOOP)
        return RunReport(run, [checkpoints], holder, last)
    history = check_samples(folder.ledger, samples, saved)
    hosts = _check_settings(folder, settings)
    saved_steps = set() if history is None else history.saved_steps
    reported = check_events(folder.events, events, saved_steps=saved_steps, hosts=hosts)
    check_newest_save(folder.checkpoints, checkpoints, reported, is_at_work=is_at_work)
    has_saved = bool(saved) or bool(reported.of_kinds("checkpoint"))
    if history is None and not samples.problems:
        if has_saved and events.counts["events"]:
            samples.problem(FILE, "is missing, though the run has taken steps")
        else:
            samples.note(FILE, "is missing: `drumline train` saved no step here")
    _report_missing(folder, settings, has_saved=has_saved, is_at_work=is_at_work)
    return RunReport(run, [checkpoints, samples, events, settings], holder, last)


def _check_settings(folder: RunFolder, section: Section) -> dict[int, str]:
    """Returns the host of each rank of the latest start. Files that are missing are not reported
    here."""
    settings = _read_file(folder.config_file, parse_toml, section)
    environment = _read_file(folder.environment_file, parse_json, section)
    readable = (settings is not None) + (environment is not None)
    section.counts = {"readable": readable}
    section.summary = (
        "config.toml and environment.json can be read" if readable == 2 else "cannot all be read"
    )
    try:
        return {int(entry["rank"]): str(entry["host"]) for entry in (environment or {})["ranks"]}
    except (KeyError, TypeError, ValueError, OverflowError):
        if environment is not None:
            section.problem(folder.environment_file.name, "does not list the ranks and their hosts")
        return {}


def _report_missing(
    folder: RunFolder, section: Section, *, has_saved: bool, is_at_work: bool
) -> None:
    """Both are written by the end of a job's first step."""
    paths = (folder.config_file, folder.environment_file)
    missing = [path.name for path in paths if not os.path.lexists(path)]
    for name in missing:
        if is_at_work:
            section.note(name, "is not written yet: a job is starting")
        elif has_saved:
            section.problem(name, "is missing")
        else:
            section.note(name, "is missing: the job ended, or was killed, before its first step")
    if missing and not section.problems:
        section.summary = "not written yet" if is_at_work else "not written"


def _read_file(path: Path, parse: Callable[[str], Any], section: Section) -> dict[str, Any] | None:
    try:
        most = TEXT_BYTES if path.suffix == ".toml" else DOCUMENT_BYTES
        content = parse(read_regular(path, most=most).decode())
    except FileNotFoundError:
        return None
    except OSError as error:
        section.problem(path.name, f"cannot be read: {error.strerror}")
    except ValueError as error:
        section.problem(path.name, f"is damaged: {error}")
    else:
        if isinstance(content, dict):
            return content
        section.problem(path.name, "is damaged: it is not a table of settings")
    return None
