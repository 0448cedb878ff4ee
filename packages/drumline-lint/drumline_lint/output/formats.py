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

# JSON

VERSION = 1


def as_json(report: Report) -> str:
    """All findings and problems, and their numbers.

    For example, with one of its findings:

        {
         "version": 1,
         "files": 14,
         "findings": [
          {
           "rule": "DL005", "name": "set-epoch-missing", "severity": "warning",
           "path": "train.py", "cell": null,
           "line": 40, "column": 9, "end_line": 40, "end_column": 14,
           "message": "...", "fix": "...", "edits": []
          }
         ],
         "problems": [],
         "summary": {"shown": {"error": 0, "warning": 1, "note": 0}, ...}
        }
    """
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


def _finding(report: Report, finding: Finding) -> dict[str, Any]:
    """A finding with its place in the same table, and its edits as editors count."""
    document = asdict(finding)
    place = document.pop("place")
    return {**document, **place, "edits": edit_regions(report, finding)}


def edit_regions(report: Report, finding: Finding) -> list[dict[str, Any]]:
    """Its edits in lines and columns as editors count them; not for notebooks, whose text is not
    the file's."""
    reading = report.readings.get(finding.place.path)
    if reading is None or reading.content is None or is_notebook(report.readings, finding):
        return []

    lines = split_lines(reading.content.text)
    return [_edit_region(edit, lines) for edit in finding.edits]


def _edit_region(edit: Edit, lines: list[str]) -> dict[str, Any]:
    """An edit as a program applies it.

    For example:

        {"line": 3, "column": 9, "end_line": 3, "end_column": 14, "text": "good"}
    """
    line, offset = edit.start
    end_line, end_offset = edit.end
    return {
        "line": line,
        "column": column_of(lines[line - 1], offset),
        "end_line": end_line,
        "end_column": column_of(lines[end_line - 1], end_offset),
        "text": edit.text,
    }


def _counts(findings: list[Finding]) -> dict[str, int]:
    """Such as: {"error": 2, "warning": 1, "note": 0}."""
    return {severity.value: number for severity, number in by_severity(findings).items()}


# SARIF

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
BASE = "%SRCROOT%"


def as_sarif(report: Report, rules: Mapping[str, Rule], *, version: str, folder: Path) -> str:
    """One run of the tool, with the texts of all rules.

    Paths inside `folder` are relative to it.
    """
    driver = {
        "name": "drumline lint",
        "version": version,
        "rules": [_rule(rule) for rule in rules.values()],
    }

    numbers = {number: index for index, number in enumerate(rules)}
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
    """The texts of a rule, with its wrong and its right code as Markdown."""
    text = f"{rule.why}\n\nFix: {rule.fix}"
    markdown = text
    if rule.bad:
        markdown += f"\n\nBad:\n\n{_fenced(rule, rule.bad)}\n\nGood:\n\n{_fenced(rule, rule.good)}"

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


def _fenced(rule: Rule, code: str) -> str:
    """A block of code in Markdown."""
    return f"```{rule.language}\n{code.strip()}\n```"


def _result(report: Report, finding: Finding, index: int, folder: Path) -> dict[str, Any]:
    """A finding, with its place and its edits.

    `index`: of its rule among all rules.
    """
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


def _location(path: str, folder: Path) -> dict[str, str]:
    """Where a file is; outside of the folder, by its whole path.

    For example:

        {"uri": "src/train.py", "uriBaseId": "%SRCROOT%"}
        {"uri": "file:///shared/train.py"}
    """
    whole = folder / path
    if not whole.is_relative_to(folder) or ".." in whole.parts:
        return {"uri": whole.resolve().as_uri()}

    relative = whole.relative_to(folder).as_posix()
    return {"uri": quote(relative, errors="surrogateescape"), "uriBaseId": BASE}


def _replacement(edit: dict[str, Any]) -> dict[str, Any]:
    """An edit in the words of SARIF."""
    deleted = _lines(edit["line"], edit["column"], edit["end_line"], edit["end_column"])
    return {"deletedRegion": deleted, "insertedContent": {"text": edit["text"]}}


# Annotations of GitHub

COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def as_github(report: Report) -> str:
    """A workflow command for each finding, and the closing line."""
    commands = [_command(report, finding) for finding in report.everything]
    return "\n".join([*commands, summary_line(report)]) + "\n"


def _command(report: Report, finding: Finding) -> str:
    """A finding as GitHub shows it beside the line.

    For example:

        ::warning file=train.py,line=40,col=9,title=DL005 set-epoch-missing::...
    """
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
    """`50%25` of `50%`: a command is one line."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


# Places in files


def _cell(finding: Finding) -> str:
    """The place in a notebook: `cell 3, line 2: `; else empty."""
    place = finding.place
    return "" if place.cell is None else f"cell {place.cell}, line {place.line}: "


def _region(report: Report, finding: Finding) -> dict[str, int]:
    """The place in the file.

    Of a notebook it is only the line, since a column within a cell is not a column of the file.
    """
    place = finding.place
    if place.cell is not None:
        data = report.readings[place.path].data
        return {"startLine": line_in_file(data, place.cell, place.line)}

    return _lines(place.line, place.column, place.end_line, place.end_column)


def _lines(line: int, column: int, end_line: int, end_column: int) -> dict[str, int]:
    """A region of SARIF, which does not end before it begins.

    For example:

        {"startLine": 3, "startColumn": 9, "endLine": 3, "endColumn": 14}
    """
    if end_line == line:
        end_column = max(end_column, column)

    return {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}
