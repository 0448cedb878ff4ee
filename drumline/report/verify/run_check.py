"""Checks a run folder: checkpoints, samples, events and settings, one section for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.base.untrusted import parse_json, read_regular, read_toml
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
    """The result for a run folder."""

    run: Path | str
    sections: list[Section]
    job_at_work: str | None
    """The job that is training in it, if any: then it was checked as far as it was written."""
    last_valid_step: int | None
    """The step of the newest checkpoint that is complete and finite."""

    @property
    def problems(self) -> list[Remark]:
        """Those of all sections."""
        return [problem for section in self.sections for problem in section.problems]

    @property
    def notes(self) -> list[Remark]:
        """Those of all sections."""
        return [note for section in self.sections for note in section.notes]


def verify_run(run: Path, progress: Progress, mirror: Verify | None = None) -> RunReport:
    """Check everything in a run folder; changes nothing. `mirror`: reads the checkpoints from an
    object store, where a job may be training."""
    folder = RunFolder(run)
    holder = job_at_work(folder)
    is_at_work = holder is not None or mirror is not None
    checkpoints = Section("checkpoints")
    samples = Section("samples")
    events = Section("events")
    settings = Section("settings")

    # In this order, because a running job continues to write: the ledger before a checkpoint,
    # events after both.
    saved = check_checkpoints(folder.checkpoints, checkpoints, progress, mirror or catalog.verify)
    finite_steps = [position.step for position in saved if position.is_finite]
    last_valid_step = max(finite_steps, default=None)
    if saved and all(position.in_own_loop for position in saved):
        checkpoints.note(folder.checkpoints.name, SAVED_BY_OWN_LOOP)
        return RunReport(run, [checkpoints], holder, last_valid_step)

    history = check_samples(folder.ledger, samples, saved)
    may_lack = is_at_work or not checkpoints.counts.get("checkpoints")
    hosts = _check_settings(folder, settings, may_lack=may_lack)
    saved_steps = set() if history is None else history.saved_steps
    reported = check_events(folder.events, events, saved_steps=saved_steps, hosts=hosts)
    check_newest_save(folder.checkpoints, checkpoints, reported, is_at_work=is_at_work)

    if history is None and not samples.problems:
        has_saved = bool(saved) or bool(reported.of_kinds("checkpoint"))
        if has_saved and events.counts["events"]:
            samples.problem(FILE, "is missing, though the run has taken steps")
        else:
            samples.note(FILE, "is missing: `drumline train` saved no step here")

    return RunReport(run, [checkpoints, samples, events, settings], holder, last_valid_step)


def _check_settings(folder: RunFolder, section: Section, *, may_lack: bool) -> dict[int, str]:
    """Returns the host of each rank of the latest start. `may_lack`: whether the files may not be
    written yet, which they are by the end of the first step."""
    settings = _read_table(folder.config_file, section, may_lack=may_lack)
    environment = _read_table(folder.environment_file, section, may_lack=may_lack)
    num_readable = (settings is not None) + (environment is not None)
    section.counts = {"readable": num_readable}
    if num_readable == 2:
        section.summary = "config.toml and environment.json can be read"
    else:
        section.summary = "cannot all be read"

    if environment is None:
        return {}
    try:
        return {int(entry["rank"]): str(entry["host"]) for entry in environment["ranks"]}
    except (KeyError, TypeError, ValueError, OverflowError):
        section.problem(folder.environment_file.name, "does not list the ranks and their hosts")
        return {}


def _read_table(path: Path, section: Section, *, may_lack: bool) -> dict[str, Any] | None:
    """The content of a TOML or JSON file; None: it is missing or damaged."""
    is_toml = path.suffix == ".toml"
    try:
        content: Any = read_toml(path) if is_toml else parse_json(read_regular(path))
    except FileNotFoundError:
        if may_lack:
            what = "is not written: a job is starting, or was ended before its first step"
            section.note(path.name, what)
        else:
            section.problem(path.name, "is missing")
    except OSError as error:
        section.problem(path.name, f"cannot be read: {error.strerror}")
    except ValueError as error:
        section.problem(path.name, f"is damaged: {error}")
    else:
        if isinstance(content, dict):
            return content
        section.problem(path.name, "is damaged: it is not a table of settings")

    return None
