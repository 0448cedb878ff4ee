"""The doctor's report: the matrix, each finding with its fix, and the result; or all
as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drumline.base.terminal import make_console, one_line, show_lines
from drumline.base.text import columns, join_names, plural
from drumline.tools.doctor.finding import Finding, sorted_findings
from drumline.tools.doctor.pairs.matrix import Matrix, matrix
from drumline.tools.doctor.pairs.survey import Survey

# One cause on hundreds of hosts is not printed hundreds of times.
MAX_OF_A_CHECK = 12
COLOURS = {"problem": "bold red", "warning": "yellow", "note": "dim", "result": "bold"}


def as_json(
    findings: Sequence[Finding],
    *,
    survey: Survey | None = None,
    facts: Mapping[str, Any] | None = None,
    collectives: Any = None,
    task: Any = None,
) -> str:
    parts = {
        "result": result_line(findings),
        "findings": [finding.as_json() for finding in sorted_findings(findings)],
        "facts": facts,
        "network": None if survey is None else survey.as_json(),
        "collectives": collectives,
        "task": task,
    }
    return json.dumps({name: part for name, part in parts.items() if part is not None})


def report(
    findings: Sequence[Finding],
    *,
    survey: Survey | None = None,
    notes: Sequence[str] = (),
    is_terminal: bool = False,
    width: int = 80,
) -> None:
    """On the screen: drawn by rich on a terminal; elsewhere the same lines without colour and
    frames."""
    table = matrix(survey) if survey is not None and len(survey.hosts) > 1 else None
    lines = [
        *(("", note) for note in notes),
        *finding_lines(findings),
        ("result", result_line(findings)),
    ]
    if is_terminal:
        _draw(table, lines, width)
    else:
        table_lines = plain_lines(table) if table else ()
        show_lines([*table_lines, *(text for _, text in lines)])


def finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Level and text of each line, problems first; a limited number for each check."""
    counts: Counter[tuple[str, str]] = Counter()
    for finding in once_each(findings):
        kind = (finding.level, finding.check)
        counts[kind] += 1
        if counts[kind] <= MAX_OF_A_CHECK:
            yield finding.level, finding.line()
            if finding.fix:
                yield "fix", f"  fix: {finding.fix}"
    for (level, check), count in counts.items():
        if count > MAX_OF_A_CHECK:
            yield (
                level,
                f"{level}: {check}: {count - MAX_OF_A_CHECK} more of this kind; --json has all",
            )


def once_each(findings: Sequence[Finding]) -> list[Finding]:
    """Merge the same finding on several hosts."""
    places: dict[Finding, list[str]] = {}
    for finding in sorted_findings(findings):
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    return [replace(finding, where=join_names(where)) for finding, where in places.items()]


def result_line(findings: Sequence[Finding]) -> str:
    """`result: ready to train`, or how much must be fixed."""
    counts = Counter(finding.level for finding in once_each(findings))
    counted = join_names(
        plural(counts[level], level) for level in ("problem", "warning") if counts[level]
    )
    if counts["problem"]:
        return f"result: not ready to train: {counted}"
    return f"result: ready to train{f', with {counted}' if counted else ''}"


def plain_lines(table: Matrix) -> Iterator[str]:
    """A row is a line, so that it can be searched."""
    yield table.title
    yield from columns(
        [[cell.replace("\n", " ") for cell in row] for row in (table.headings, *table.rows)]
    )
    yield from table.notes


def _draw(table: Matrix | None, lines: Sequence[tuple[str, str]], width: int) -> None:
    from rich import box
    from rich.table import Table

    console = make_console(width=width)
    if table is not None:
        drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=table.title, title_justify="left")
        for heading in table.headings:
            drawn.add_column(heading, overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
        for note in table.notes:
            console.print(one_line(note))
    for level, text in lines:
        # A fix can be copied: the terminal wraps it, without line breaks in the text.
        console.print(one_line(text), style=COLOURS.get(level), soft_wrap=level == "fix")
