"""`drumline verify RUN`: checks run folders, and prints a report as text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.base.errors import ExitCode
from drumline.base.text import one_line, plural, show, show_progress
from drumline.checkpoint.mirrored_run import opened_run
from drumline.cli.command_line import OUTPUT_FLAGS, check_run_is_named, read_command, show_json
from drumline.report.verify.checkpoint_check import Progress
from drumline.report.verify.run_check import RunReport, verify_run
from drumline.runs.run_folder import find_run
from drumline.storage.object_store import is_store_url

HELP = """\
usage: drumline verify RUN [RUN ...] [--json]

Checks run folders, or runs in an object store (s3://bucket/prefix), and changes nothing in them:

  checkpoints  every byte of each against the checksums of its manifest, and that it is finite (no NaN or
               infinity); the one saved last is there
               (of a loop with ddp.checkpoint, these are all there is)
  samples      the ledger: each sample exactly once an epoch, over all restarts and numbers of ranks,
               and the positions of the checkpoints
  events       every rank's file: no event missing, no line damaged, each start resumes from a step that was reached
  settings     config.toml and environment.json can be read

Prints a line for each part, then one for each problem, with the file and line, or the epoch, position and sample. A
run that is still training is checked as far as it is written. Needs no GPU and does not load torch.
"""
EXIT_CODES = """\
exit codes: 0 no problems, 1 problems were found, 2 no such run folder
"""


def run(argv: Sequence[str]) -> int:
    """Check all runs; the exit code says whether all are right."""
    flags = read_command(
        "verify", argv, {"": OUTPUT_FLAGS}, HELP, ends_with=EXIT_CODES, max_positional=len(argv)
    )
    check_run_is_named("verify", flags)
    names = [name if is_store_url(name) else find_run(Path(name)) for name in flags.positional]
    progress = show_progress if sys.stderr.isatty() else lambda text: None
    reports = [
        _verify_mirror(name, progress) if isinstance(name, str) else verify_run(name, progress)
        for name in names
    ]
    progress("")
    is_valid = not any(report.problems for report in reports)
    if flags.values.json:
        show_json({"valid": is_valid, "runs": list(map(_as_json, reports))}, indent=1)
    else:
        show("\n\n".join(map(_as_text, reports)))

    return ExitCode.SUCCESS if is_valid else ExitCode.SOMETHING_WRONG


def _verify_mirror(url: str, progress: Progress) -> RunReport:
    """Its checkpoints are read, but not kept: the disk need not have room for them."""
    with opened_run(url) as (run, folder):
        run.fetch_outline(folder)
        return replace(verify_run(folder, progress, run.verify), run=url)


def _as_text(report: RunReport) -> str:
    """A line for each part, then one for each problem."""
    lines = [str(report.run)]
    if report.job_at_work is not None:
        lines.append(f"  {report.job_at_work} is training in it: checked as far as it is written")

    lines += [f"  {section.name:<12} {section.summary}" for section in report.sections]
    lines += [f"  note: {note}" for note in report.notes]
    lines += [f"  problem: {problem}" for problem in report.problems]
    summary = (
        f"{plural(len(report.problems), 'problem')} found"
        if report.problems
        else "no problems found"
    )
    if any(problem.part == "checkpoints" for problem in report.problems):
        step = report.last_valid_step
        newest = f"a run would resume from step {step:,}" if step is not None else None
        summary += f"; {newest or 'no checkpoint is complete and finite'}"

    return "\n".join(map(one_line, [*lines, summary]))


def _as_json(report: RunReport) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "run": str(report.run),
        "valid": not report.problems,
        "job_at_work": report.job_at_work,
        "last_valid_step": report.last_valid_step,
        "parts": {
            section.name: {"summary": section.summary, **section.counts}
            for section in report.sections
        },
        "problems": report.problems,
        "notes": report.notes,
    }
