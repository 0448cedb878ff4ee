"""What the doctor shows: the matrix, what differs, one line per problem with its fix, and a verdict. Or all as JSON.

A table is drawn by rich on a terminal; anywhere else the same lines come without colour and frames.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drumline.doctor.comparison import MAX_VALUES, Comparison
from drumline.doctor.finding import Finding, Level, sorted_findings
from drumline.doctor.pairs.matrix import Matrix, matrix
from drumline.doctor.pairs.survey import Survey
from drumline.terminal import make_console, one_line, show_lines
from drumline.text import join_names

# A cause that hits hundreds of hosts need not be read hundreds of times.
MOST_OF_A_CHECK = 12
COUNTED: tuple[Level, ...] = ("problem", "warning")
COLOURS = {"problem": "bold red", "warning": "yellow", "note": "dim", "verdict": "bold"}


def as_json(
    findings: Sequence[Finding],
    *,
    survey: Survey | None = None,
    facts: Mapping[str, Any] | None = None,
    table: Any = None,
    collectives: Any = None,
) -> str:
    """Everything."""
    parts = {
        "verdict": verdict(findings),
        "findings": [finding.as_json() for finding in sorted_findings(findings)],
        "facts": facts,
        "differences": table,
        "network": None if survey is None else survey.as_json(),
        "collectives": collectives,
    }
    return json.dumps({name: part for name, part in parts.items() if part is not None})


def report(
    findings: Sequence[Finding],
    *,
    survey: Survey | None = None,
    table: Sequence[Comparison] = (),
    notes: Sequence[str] = (),
    is_terminal: bool = False,
    width: int = 80,
) -> None:
    """On the screen."""
    tables = [matrix(survey)] if survey is not None and len(survey.hosts) > 1 else []
    tables += [_differences(table)] if table else []
    lines = [*(("", note) for note in notes), *finding_lines(findings), ("verdict", verdict(findings))]
    if is_terminal:
        _draw(tables, lines, width)
    else:
        show_lines([*(line for shown in tables for line in plain_lines(shown)), *(text for _, text in lines)])


def finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """What must be mended first; of one kind no more than can be read."""
    told: Counter[tuple[str, str]] = Counter()
    for finding in once_each(findings):
        kind = (finding.level, finding.check)
        told[kind] += 1
        if told[kind] <= MOST_OF_A_CHECK:
            yield finding.level, finding.line()
            if finding.fix:
                yield "fix", f"  fix: {finding.fix}"
    for (level, check), count in told.items():
        if count > MOST_OF_A_CHECK:
            yield level, f"{level}: {check}: {count - MOST_OF_A_CHECK} more of this kind; --json has all"


def once_each(findings: Sequence[Finding]) -> list[Finding]:
    """The same of several hosts is one thing."""
    places: dict[Finding, list[str]] = {}
    for finding in sorted_findings(findings):
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=join_names(where)) for finding, where in places.items()]


def verdict(findings: Sequence[Finding]) -> str:
    """One line."""
    counts = Counter(finding.level for finding in once_each(findings))
    said = [
        f"{counts[level]} {level}{'s' if counts[level] != 1 else ''}" for level in COUNTED if counts[level]
    ]
    if counts["problem"]:
        return f"verdict: must be fixed: {' and '.join(said)}"
    return f"verdict: fit to train{f', with {said[0]}' if said else ''}"


def _differences(table: Sequence[Comparison]) -> Matrix:
    """A line for each value; hosts with the same one stand together."""
    rows = [
        [*map(one_line, (row.name if place == 0 else "", value, join_names(hosts)))]
        for row in table
        for place, (value, hosts) in enumerate(row.groups[:MAX_VALUES])
    ]
    return Matrix("what differs between hosts", ["", "value", "on"], rows, [])


def plain_lines(shown: Matrix) -> Iterator[str]:
    """A row is a line: where there is no terminal, lines are what is read and searched."""
    yield shown.title
    rows = (
        [[cell.replace("\n", " ") for cell in row] for row in (shown.headings, *shown.rows)]
        if shown.rows
        else []
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(shown.headings))] if rows else []
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    yield from shown.notes


def _draw(tables: Sequence[Matrix], lines: Sequence[tuple[str, str]], width: int) -> None:
    from rich import box
    from rich.table import Table

    console = make_console(width=width)
    for shown in tables:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=shown.title, title_justify="left")
        for heading in shown.headings:
            table.add_column(heading, overflow="fold")
        for row in shown.rows:
            table.add_row(*row)
        console.print(table)
        for note in shown.notes:
            console.print(one_line(note))
    for level, text in lines:
        # A fix is there to be copied: the terminal folds it, and no line break gets into it.
        console.print(one_line(text), style=COLOURS.get(level), soft_wrap=level == "fix")
