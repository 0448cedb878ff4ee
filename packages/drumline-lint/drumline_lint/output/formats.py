"""Output for programs: JSON, SARIF 2.1.0, and annotations for GitHub workflows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from drumline_lint.findings import Edit, Finding, Rule, Severity, column_of, split_lines
from drumline_lint.linter import Report, is_notebook
from drumline_lint.output.text import by_severity, statistics, summary_line
from drumline_lint.reading.notebook import line_in_file

VERSION = 1


def as_json(report: Report) -> str:
    document = {
        "version": VERSION,
        "files": report.files_read,
        "findings": [_finding(report, finding) for finding in report.findings],
        "problems": [_finding(report, problem) for problem in report.problems],
        "summary": {
            "shown": _counts(report.findings),
            "not_shown": _counts(report.hidden),
            "by_rule": statistics(report),
            "fixed": report.fixed,
            "fixable": report.fixable,
            "in_baseline": report.num_known,
            "on_unchanged_lines": report.num_unchanged,
        },
    }
    return json.dumps(document, indent=1) + "\n"


def edit_regions(report: Report, finding: Finding) -> list[dict[str, Any]]:
    """Its edits in lines and columns as editors count them; not for notebooks, whose text is not
    the file's."""
    reading = report.readings.get(finding.place.path)
    if reading is None or reading.content is None or is_notebook(report.readings, finding):
        return []
    lines = split_lines(reading.content.text)
    return [_edit_region(edit, lines) for edit in finding.edits]


def _edit_region(edit: Edit, lines: list[str]) -> dict[str, Any]:
    return {
        "line": edit.start[0],
        "column": column_of(lines[edit.start[0] - 1], edit.start[1]),
        "end_line": edit.end[0],
        "end_column": column_of(lines[edit.end[0] - 1], edit.end[1]),
        "text": edit.text,
    }


def _finding(report: Report, finding: Finding) -> dict[str, Any]:
    document = asdict(finding)
    place = document.pop("place")
    return {**document, **place, "edits": edit_regions(report, finding)}


def _counts(findings: list[Finding]) -> dict[str, int]:
    return {severity.value: number for severity, number in by_severity(findings).items()}


SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
BASE = "%SRCROOT%"


def as_sarif(report: Report, rules: Mapping[str, Rule], *, version: str, folder: Path) -> str:
    """One run of the tool; paths inside `folder` are relative to it."""
    numbers = {number: index for index, number in enumerate(rules)}
    driver = {
        "name": "drumline lint",
        "version": version,
        "rules": [_rule(rule) for rule in rules.values()],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {BASE: {"uri": f"{folder.as_uri()}/"}},
        "invocations": [{"executionSuccessful": not report.problems}],
        "results": [
            _result(report, finding, numbers[finding.rule], folder) for finding in report.everything
        ],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    text = f"{rule.why}\n\nFix: {rule.fix}"
    markdown = text
    if rule.bad:
        bad, good = (f"```{rule.language}\n{code.strip()}\n```" for code in (rule.bad, rule.good))
        markdown += f"\n\nBad:\n\n{bad}\n\nGood:\n\n{good}"
    severity = "recommendation" if rule.severity == "note" else rule.severity.value
    return {
        "id": rule.id,
        "name": rule.name.title().replace("-", ""),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.why},
        "helpUri": rule.address,
        "help": {"text": text, "markdown": markdown},
        "defaultConfiguration": {"level": rule.severity.value},
        "properties": {"tags": ["distributed-training"], "problem.severity": severity},
    }


def _result(report: Report, finding: Finding, index: int, folder: Path) -> dict[str, Any]:
    artifact = {"artifactLocation": _location(finding.place.path, folder)}
    result = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity.value,
        "message": {"text": f"{_cell(finding)}{finding.message}\nFix: {finding.fix}"},
        "locations": [{"physicalLocation": {**artifact, "region": _region(report, finding)}}],
    }
    if replacements := [_replacement(edit) for edit in edit_regions(report, finding)]:
        change = {**artifact, "replacements": replacements}
        result["fixes"] = [{"description": {"text": finding.fix}, "artifactChanges": [change]}]
    return result


def _cell(finding: Finding) -> str:
    place = finding.place
    return "" if place.cell is None else f"cell {place.cell}, line {place.line}: "


def _location(path: str, folder: Path) -> dict[str, str]:
    whole = folder / path
    if whole.is_relative_to(folder) and ".." not in whole.parts:
        return {
            "uri": quote(whole.relative_to(folder).as_posix(), errors="surrogateescape"),
            "uriBaseId": BASE,
        }
    return {"uri": whole.resolve().as_uri()}


def _region(report: Report, finding: Finding) -> dict[str, int]:
    place = finding.place
    if place.cell is not None:  # a column within a cell is not a column of the file
        return {"startLine": line_in_file(report.readings[place.path].data, place.cell, place.line)}
    return _lines(place.line, place.column, place.end_line, place.end_column)


def _replacement(edit: dict[str, Any]) -> dict[str, Any]:
    deleted = _lines(edit["line"], edit["column"], edit["end_line"], edit["end_column"])
    return {"deletedRegion": deleted, "insertedContent": {"text": edit["text"]}}


def _lines(line: int, column: int, end_line: int, end_column: int) -> dict[str, int]:
    if end_line == line:
        end_column = max(end_column, column)
    return {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}


COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def as_github(report: Report) -> str:
    commands = [_command(report, finding) for finding in report.everything]
    return "\n".join([*commands, summary_line(report)]) + "\n"


def _command(report: Report, finding: Finding) -> str:
    region = _region(report, finding)
    names = {"startLine": "line", "startColumn": "col", "endLine": "endLine"}
    if region.get("endLine") == region["startLine"]:
        names["endColumn"] = "endColumn"
    properties = {
        "file": finding.place.path,
        **{name: str(region[key]) for key, name in names.items() if key in region},
        "title": f"{finding.rule} {finding.name}",
    }
    written = ",".join(
        f"{name}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in properties.items()
    )
    message = _escaped(f"{_cell(finding)}{finding.message}\nfix: {finding.fix}")
    return f"::{COMMANDS[finding.severity]} {written}::{message}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
