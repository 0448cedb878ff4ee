"""What the doctor shows: the matrix, what differs, one line per problem with its fix, and a verdict. Or all of it as JSON.

A table is drawn by rich on a terminal; anywhere else the same lines come without colour and frames.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drumline.doctor.finding import Finding, sorted_findings
from drumline.doctor.matrix import Matrix, matrix
from drumline.doctor.survey import Survey

# A cause that hits hundreds of hosts need not be read hundreds of times.
MOST_OF_A_CHECK = 12
NOTE_LEVELS = ("note",)
COLOURS = {"problem": "bold red", "warning": "yellow", "note": "dim"}


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
    return json.dumps({name: part for name, part in parts.items() if part is not None}, indent=1)


def report(
    findings: Sequence[Finding],
    *,
    survey: Survey | None = None,
    table: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    is_terminal: bool = False,
    width: int = 80,
) -> None:
    """On the screen."""
    from rich.console import Console

    # Not on a terminal nothing is folded: lines are read by people and found by grep.
    console = Console(highlight=False, soft_wrap=not is_terminal, width=width if is_terminal else 10_000)
    if survey is not None and len(survey.hosts) > 1:
        _show_table(console, matrix(survey), is_terminal)
    if table:
        _show_table(console, _differences(table), is_terminal)
    for note in notes:
        console.print(note, markup=False)
    for level, text in finding_lines(findings):
        console.print(text, style=COLOURS.get(level) if is_terminal else None, markup=False)
    console.print(verdict(findings), style="bold" if is_terminal else None, markup=False)


def finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """What must be mended first; of one kind no more than can be read."""
    told: dict[tuple[str, str], int] = {}
    for finding in sorted_findings(findings):
        kind = (finding.level, finding.check)
        told[kind] = told.get(kind, 0) + 1
        if told[kind] <= MOST_OF_A_CHECK:
            yield finding.level, finding.line()
            if finding.fix:
                yield "fix", f"  fix: {finding.fix}"
    for (level, check), count in told.items():
        if count > MOST_OF_A_CHECK:
            yield level, f"{level}: {check}: {count - MOST_OF_A_CHECK} more of this kind; --json has all"


def verdict(findings: Sequence[Finding]) -> str:
    """One line."""
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    said = [f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count]
    if counts["problem"]:
        return f"verdict: must be fixed: {' and '.join(said)}"
    return f"verdict: fit to train{f', with {said[0]}' if said else ''}"


def _differences(table: Sequence[Mapping[str, Any]]) -> Matrix:
    """A row for each fact; hosts with the same value stand together."""
    rows = []
    for row in table:
        hosts: dict[str, list[str]] = {}
        for host, value in row["values"].items():
            hosts.setdefault(str(value), []).append(host)
        for place, (value, names) in enumerate(hosts.items()):
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
            rows.append([str(row["what"]) if place == 0 else "", value, shown])
    return Matrix("what differs between hosts", ["", "value", "on"], rows, [])


def _show_table(console: Any, shown: Matrix, is_terminal: bool) -> None:
    from rich import box
    from rich.table import Table

    console.print(shown.title, style="bold" if is_terminal else None, markup=False)
    if shown.rows:
        table = Table(box=box.SIMPLE_HEAD if is_terminal else None, show_header=True, pad_edge=False)
        for heading in shown.headings:
            table.add_column(heading, no_wrap=not is_terminal, overflow="fold")
        for row in shown.rows:
            # One line for each row where lines are what is looked at.
            table.add_row(*(cell if is_terminal else cell.replace("\n", " ") for cell in row))
        console.print(table, markup=False)
    for note in shown.notes:
        console.print(note, markup=False)
