"""A whole run folder, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from drumline.engine.run_folder import RunFolder, job_at_work
from drumline.errors import UsageError, did_you_mean
from drumline.verify.checkpoints import Progress, check_checkpoints
from drumline.verify.events import check_events
from drumline.verify.findings import Finding, Part
from drumline.verify.samples import check_samples
from drumline.verify.saves import check_newest_save, check_saves_are_reported, tell_no_ledger
from drumline.verify.settings import check_settings, tell_missing


@dataclass(frozen=True)
class Verdict:
    """What was found in a run folder."""

    run: Path
    parts: list[Part]
    job_at_work: str | None
    """Who is training in it, if anyone is: then it was looked at as far as it is."""
    last_whole_step: int | None
    """Of the newest checkpoint that is whole and finite."""

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
    is_at_work = holder is not None
    checkpoints, samples, events, settings = map(Part, ("checkpoints", "samples", "events", "settings"))
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
    return Verdict(run, [checkpoints, samples, events, settings], holder, last)


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
