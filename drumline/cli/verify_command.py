"""`drumline verify RUN`: is a run folder whole? Says so in a few lines, or in JSON, and in the exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.audit.section import Remark
from drumline.audit.verify import RunReport, find_run, verify_run
from drumline.errors import ExitCode, UsageError
from drumline.terminal import one_line, show, show_progress

HELP = """\
usage: drumline verify RUN [RUN ...] [--json]

Checks run folders, and changes nothing in them:

  checkpoints  every byte of each against the checksums of its manifest, and that it is finite (no NaN or
               infinity); the one saved last is there
  samples      the ledger: each sample exactly once an epoch, over all restarts and numbers of ranks,
               and where the checkpoints stand
  events       every rank's file: no event missing, no line damaged, each start goes on from a step that was reached
  settings     config.toml and environment.json can be read

A line for each part, then a line for each thing that is wrong, with the file and line, or the epoch, position and
sample. A run that is still training is checked as far as it is. It needs no GPU and does not load torch.

  --json   for scripts: parts with their counts, problems and notes
  --help   this text

exit codes: 0 whole, 1 something is wrong, 2 no such run folder
"""
OWN_FLAGS = ("--json", "--help", "-h")


def run(argv: Sequence[str]) -> int:
    """The verb."""
    if "--help" in argv or "-h" in argv:
        show(HELP, end="")
        return ExitCode.SUCCESS
    words = [word for word in argv if word not in OWN_FLAGS]
    if unknown := [word for word in words if word.startswith("-")]:
        raise UsageError(f"drumline verify has no flag {unknown[0]}", next_step="see drumline verify --help")
    if not words:
        raise UsageError(
            "no RUN was given", next_step="give a run folder, as in: drumline verify runs/digits"
        )
    folders = [find_run(Path(word)) for word in words]
    progress = show_progress if sys.stderr.isatty() else _show_nothing
    verdicts = [verify_run(folder, progress) for folder in folders]
    progress("")
    if "--json" in argv:
        show(json.dumps(_as_json(verdicts), indent=1))
    else:
        show("\n\n".join(map(_as_text, verdicts)))
    return ExitCode.SOMETHING_WRONG if any(verdict.problems for verdict in verdicts) else ExitCode.SUCCESS


def _as_text(verdict: RunReport) -> str:
    lines = [str(verdict.run)]
    if verdict.job_at_work is not None:
        lines.append(f"  {verdict.job_at_work} is training in it: checked as far as it is")
    lines += [f"  {part.name:<12} {part.summary}" for part in verdict.parts]
    lines += [f"  note: {note}" for note in verdict.notes]
    lines += [f"  wrong: {problem}" for problem in verdict.problems]
    return "\n".join([*map(one_line, lines), _closing(verdict)])


def _closing(verdict: RunReport) -> str:
    count = len(verdict.problems)
    if not count:
        return "nothing is wrong" if verdict.job_at_work else "the run is whole"
    if any(problem.part == "checkpoints" for problem in verdict.problems):
        step = verdict.last_whole_step
        onward = (
            "; no checkpoint is whole and finite"
            if step is None
            else f"; the newest checkpoint to resume from is of step {step:,}"
        )
    else:
        onward = ""
    return f"{count} thing{'s are' if count > 1 else ' is'} wrong{onward}"


def _as_json(verdicts: list[RunReport]) -> dict[str, Any]:
    return {
        "whole": not any(verdict.problems for verdict in verdicts),
        "runs": list(map(_run_as_json, verdicts)),
    }


def _run_as_json(verdict: RunReport) -> dict[str, Any]:
    def listed(findings: list[Remark]) -> list[dict[str, str]]:
        return [asdict(finding) for finding in findings]

    return {
        "run": str(verdict.run),
        "whole": not verdict.problems,
        "job_at_work": verdict.job_at_work,
        "last_whole_step": verdict.last_whole_step,
        "parts": {part.name: {"summary": part.summary, **part.counts} for part in verdict.parts},
        "problems": listed(verdict.problems),
        "notes": listed(verdict.notes),
    }


def _show_nothing(text: str) -> None:
    pass
