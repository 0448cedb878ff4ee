"""For scripts: everything that was found, in names that stay. `version` counts up when one of them changes."""

from __future__ import annotations

import json
from typing import Any

from drumline_lint.edits import column_of, split_lines
from drumline_lint.finding import Edit, Finding
from drumline_lint.run import Report, is_notebook
from drumline_lint.telling.closing import by_severity, statistics

VERSION = 1


def as_json(report: Report) -> str:
    """One object."""
    document = {
        "version": VERSION,
        "files": report.files_read,
        "findings": [_finding(report, finding) for finding in report.findings],
        "problems": [_finding(report, said) for said in report.problems],
        "summary": {
            "shown": _counts(report.findings),
            "not_shown": _counts(report.hidden),
            "by_rule": statistics(report),
            "fixed": report.fixed,
            "fixable": report.fixable,
        },
    }
    return json.dumps(document, indent=1) + "\n"


def edit_regions(report: Report, finding: Finding) -> list[dict[str, Any]]:
    """Its edits in lines and columns as editors count them; a notebook's would not fit its file."""
    reading = report.readings.get(finding.place.path)
    if reading is None or reading.content is None or is_notebook(report.readings, finding):
        return []
    lines = split_lines(reading.content.text)
    return [_region(edit, lines) for edit in finding.edits]


def _region(edit: Edit, lines: list[str]) -> dict[str, Any]:
    (line, offset), (end_line, end_offset) = edit.start, edit.end
    return {
        "line": line,
        "column": column_of(lines[line - 1], offset),
        "end_line": end_line,
        "end_column": column_of(lines[end_line - 1], end_offset),
        "text": edit.text,
    }


def _finding(report: Report, finding: Finding) -> dict[str, Any]:
    place = finding.place
    return {
        "rule": finding.rule,
        "name": finding.name,
        "severity": finding.severity.value,
        "path": place.path,
        "cell": place.cell,
        "line": place.line,
        "column": place.column,
        "end_line": place.end_line,
        "end_column": place.end_column,
        "message": finding.message,
        "fix": finding.fix,
        "edits": edit_regions(report, finding),
    }


def _counts(findings: list[Finding]) -> dict[str, int]:
    return {severity.value: number for severity, number in by_severity(findings).items()}
