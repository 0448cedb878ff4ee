"""DL110: what the batch file asks for is not read by Slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.shell import Script
from drumline_lint.reading.slurm import first_command

RULE = rule("DL110")
_READ = "#SBATCH"
# With a blank, small letters are a command that someone is told to use: `# sbatch --nodes=2 run.sh`.
_MEANT = re.compile(r"^[ \t]*#(?:(?P<blank>[ \t]+)SBATCH|(?i:SBATCH))(?=[ \t]+-|--)[^\n]*", re.MULTILINE)
# What a template makes of such a file is not seen.
_TEMPLATE = re.compile(r"\{%|<%|^[ \t]*#[ \t]*SBATCH[^\n]*\{\{|^[ \t]*\{\{", re.MULTILINE)


@dataclass(frozen=True)
class _Line:
    start: int
    end: int
    text: str
    is_off: bool
    """Whether it may be a comment on purpose: there is a blank behind the #."""


def check_shell(script: Script) -> Iterator[Finding]:
    """Once for each way of going wrong: what is said of the first line holds for the others."""
    if "sbatch" not in script.text.lower() or _TEMPLATE.search(script.text):
        return
    first = first_command(script.text)
    end = first.start() if first else len(script.text)
    lines = list(_lines(script))
    late = [one for one in lines if one.text.startswith(_READ) and one.start > end]
    has_read = any(one.text.startswith(_READ) and one.start < end for one in lines)
    odd = [one for one in lines if not one.text.startswith(_READ) and one.start < end]
    yield from _findings_for(
        script, [one for one in odd if not (has_read and one.is_off)], "does not begin with #SBATCH"
    )
    if first:
        yield from _findings_for(script, late, f"comes after the first command, {first.group().strip()[:40]}")


def _lines(script: Script) -> Iterator[_Line]:
    """Those that are meant for sbatch; not what is in a text that is written to another file."""
    for found in _MEANT.finditer(script.text):
        if found.start() + found.group().index("#") in script.comments:
            yield _Line(found.start(), found.end(), found.group(), bool(found["blank"]))


def _findings_for(script: Script, lines: list[_Line], how: str) -> Iterator[Finding]:
    if lines:
        others = f", nor the {len(lines) - 1} like it below" if len(lines) > 1 else ""
        yield RULE.at(script, lines[0], f"sbatch does not read this line{others}: it {how}")
