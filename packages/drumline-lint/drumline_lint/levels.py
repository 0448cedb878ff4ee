"""How severe a finding may be: by how much of its evidence is seen, and by how often its rule was
right in public repositories (`benchmarks/judged`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from drumline_lint.findings import Finding, Rule, Severity
from drumline_lint.flow.distributed import (
    framework,
    programs_with_ranks,
    speaks_of_ranks,
    starts_ranks,
)
from drumline_lint.flow.left_out import is_line_left_out
from drumline_lint.flow.shown_runs import is_shown, programs_not_shown, shown_runs
from drumline_lint.flow.unused import lines_of_one_process, unused_lines
from drumline_lint.program.imports import connected
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source


class Evidence(IntEnum):
    """What is seen of the processes that run a file."""

    PERHAPS_ONE_PROCESS = 0
    """Whether there are several is what a user chooses."""
    SEVERAL_PROGRAMS = 1
    """Programs of several processes run it, and others may, too."""
    COMPLETE = 2
    """One program runs it, which surely has several processes; or it starts them itself, in all
    programs that run it."""


@dataclass(frozen=True)
class Ceiling:
    """The highest severity of a rule's findings, by evidence."""

    perhaps_one_process: Severity
    several_programs: Severity
    complete: Severity

    def at(self, evidence: Evidence) -> Severity:
        return (self.perhaps_one_process, self.several_programs, self.complete)[evidence]


# The level of a rule in rules.md says what its findings have earned. An error: what was judged
# wrong or arguable is no longer reported as one, and all else was right; or what is reported always
# fails. Most have few judgements.
_OF_ERRORS = Ceiling(Severity.WARNING, Severity.WARNING, Severity.ERROR)
# Of all others, too few were right where not all evidence was seen.
_OF_OTHERS = Ceiling(Severity.NOTE, Severity.NOTE, Severity.WARNING)

_WITH_LESS_EVIDENCE = {
    # right with any number of processes: 54 of 62
    "DL005": Ceiling(Severity.WARNING, Severity.WARNING, Severity.WARNING),
    # right also where other files start the ranks: of DL042 29 of 37, of DL061 19 of 32, and 8 of
    # the last 8
    "DL042": Ceiling(Severity.NOTE, Severity.WARNING, Severity.WARNING),
    "DL061": Ceiling(Severity.NOTE, Severity.WARNING, Severity.WARNING),
}

_SET_ASIDE = set(
    "archive archived backup backups deprecated legacy obsolete old rubbish "
    "3rdparty external externals submodules third_party thirdparty vendor vendored".split()
)
"""Folders of code that nobody runs any more, or that is of other projects."""
_LIBRARIES = set(
    "accelerate apex deepspeed detectron2 diffusers fairseq megatron-lm mmcv mmdetection "
    "mmsegmentation peft pytorch-image-models transformers trl".split()
)


_MOST_NAMES = 2


def limited(finding: Finding, rule: Rule, evidence: Evidence) -> Finding:
    """The finding with the severity that its rule has earned on such evidence."""
    is_error = rule.severity is finding.severity is Severity.ERROR
    usual = _OF_ERRORS if is_error else _OF_OTHERS
    highest = _WITH_LESS_EVIDENCE.get(rule.id, usual).at(evidence)
    return (
        replace(finding, severity=highest) if highest.weight < finding.severity.weight else finding
    )


def is_set_aside(path: Path) -> bool:
    """`project/archive/train.py`"""
    return not _SET_ASIDE.isdisjoint(part.lower() for part in path.parts[-6:-1])


def copied_libraries(paths: Sequence[Path]) -> list[Path]:
    """Folders with a library's whole repository, below the folder of all these files:
    `project/transformers`, which has a setup.py."""
    setups = [path for path in paths if path.name == "setup.py"]
    roots = {path.parent for path in setups if path.parent.name.lower() in _LIBRARIES}
    return [root for root in roots if not all(path.is_relative_to(root) for path in paths)]


def evidence_of(program: Program, source: Source) -> Evidence:
    """What is seen of the processes that run a file.

    What is wrong in a program that does not name ranks is so with any number of them; and a
    framework starts its processes itself.
    """
    if not any(map(speaks_of_ranks, connected(program, source))):
        return Evidence.COMPLETE

    is_starting = starts_ranks(program, source)
    if framework(program, source) and (is_starting or not speaks_of_ranks(source)):
        return Evidence.COMPLETE

    num_programs, num_with_ranks = programs_with_ranks(program, source)
    if num_with_ranks == 0:
        return Evidence.PERHAPS_ONE_PROCESS

    is_of_all = num_with_ranks == num_programs
    is_complete = is_of_all and (num_programs == 1 or is_starting)
    return Evidence.COMPLETE if is_complete else Evidence.SEVERAL_PROGRAMS


def why_not_run(program: Program, source: Source, finding: Finding) -> str | None:
    """Why nobody runs it as the repository is shipped, if so; empty where there is nothing to
    explain.

    It is in a test, nothing in the program names the function that it is in, or, where programs
    with ranks import the file, nothing in them; no program runs it that the repository shows how to
    start; or an option keeps it from being run.
    """
    place = finding.place
    not_run = [*unused_lines(program, source), *lines_of_one_process(program, source)]
    is_here = place.path == str(source.path)
    is_unused = is_here and any(place.line in lines for lines in not_run)
    if source.is_test or is_unused:
        return ""

    if not is_shown(program, source):
        names = [file.path.name for file in programs_not_shown(program, source)]
        return f"no launch shown here starts {' or '.join(sorted(set(names))[:_MOST_NAMES])}"

    if is_here and place.cell is None and is_line_left_out(program, source, place.line):
        has_runs = bool(shown_runs(program, source))
        return f"{'no launch shown here' if has_runs else 'no default'} leads to this line"

    return None
