"""For people: place, rule and message, the line of code with a caret, and what to write instead."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping

from drumline_lint.finding import Finding, Place, Severity
from drumline_lint.rule import Rule
from drumline_lint.run import Report
from drumline_lint.telling.closing import closing_line, statistics
from drumline_lint.terminal import one_line

COLOURS = {Severity.ERROR: "31", Severity.WARNING: "33", Severity.NOTE: "36"}
WIDEST_LINE = 140
BEFORE_CARET = 60


def as_text(report: Report, *, colour: bool = False) -> str:
    """All findings and problems, and a closing line."""
    blocks = ["\n".join(_block(report, finding, colour)) for finding in report.everything]
    return "\n".join([*blocks, _painted(closing_line(report), "1", colour)]) + "\n"


def as_statistics(report: Report, rules: Mapping[str, Rule], *, colour: bool = False) -> str:
    """A line for each rule, the most frequent first, and the closing line."""
    counts = statistics(report)
    width = max((len(f"{number:,}") for number in counts.values()), default=0)
    names = max((len(rules[rule].name) for rule in counts), default=0)
    lines = [
        f"{number:>{width},}  {_painted(f'{rules[rule].severity:<7}', COLOURS[rules[rule].severity], colour)}  "
        f"{rule}  {rules[rule].name:<{names}}  {rules[rule].summary}"
        for rule, number in counts.items()
    ]
    return "\n".join([*lines, _painted(closing_line(report), "1", colour)]) + "\n"


def _block(report: Report, finding: Finding, colour: bool) -> Iterator[str]:
    severity = _painted(finding.severity, COLOURS[finding.severity], colour)
    place = _painted(_harmless(str(finding.place)), "1", colour)
    yield f"{place}: {severity} {finding.rule} {finding.name}: {_harmless(finding.message)}"
    line = report.line(finding.place)
    if line is not None and line.strip():
        yield from _shown(line, finding.place, COLOURS[finding.severity], colour)
    yield f"    fix: {_harmless(finding.fix)}"


def _shown(line: str, place: Place, paint: str, colour: bool) -> Iterator[str]:
    """The line of code, cut where it is very long, and what is meant marked below it."""
    start = place.column - 1
    end = place.end_column - 1 if place.end_line == place.line else len(line)
    first = 0 if len(line) <= WIDEST_LINE else max(0, start - BEFORE_CARET)
    visible = line[first : first + WIDEST_LINE]
    indent = 0 if first else len(visible) - len(visible.lstrip())
    before = _harmless(line[first + indent : start])
    marked = _harmless(line[start : min(max(end, start + 1), first + len(visible))]).rstrip()
    carets = "^" + "~" * (_width(marked) - 1)
    yield f"    | {_harmless(visible[indent:]).rstrip()}"
    yield f"    | {' ' * _width(before)}{_painted(carets, paint, colour)}"


def _harmless(text: str) -> str:
    """On one line, and without what would move a terminal's cursor."""
    return one_line(re.sub(r"\s", " ", text))


def _width(text: str) -> int:
    """On a terminal, where some characters take two places and some none."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "FW" else 1
        for character in text
    )


def _painted(text: str, paint: str, colour: bool) -> str:
    return f"\x1b[{paint}m{text}\x1b[0m" if colour else text
