"""For GitHub's code scanning and other viewers: SARIF 2.1.0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from drumline_lint.finding import Finding
from drumline_lint.rule import Rule
from drumline_lint.run import Report
from drumline_lint.telling.json import edit_regions

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
BASE = "%SRCROOT%"


def as_sarif(report: Report, rules: Mapping[str, Rule], *, version: str, folder: Path) -> str:
    """One run of the tool; paths are relative to `folder`, where they lie in it."""
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
        "results": [_result(report, finding, numbers[finding.rule], folder) for finding in report.everything],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    text = f"{rule.why}\n\nFix: {rule.fix}"
    snippets = (
        f"\n\nBad:\n\n{_fenced(rule, rule.bad)}\n\nGood:\n\n{_fenced(rule, rule.good)}" if rule.bad else ""
    )
    return {
        "id": rule.id,
        "name": "".join(part.capitalize() for part in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.why},
        "help": {"text": text, "markdown": f"{text}{snippets}"},
        "defaultConfiguration": {"level": rule.severity.value},
        "properties": {"tags": ["distributed-training"], "problem.severity": _problem_severity(rule)},
    }


def _problem_severity(rule: Rule) -> str:
    """What code scanning calls it."""
    return "recommendation" if rule.severity == "note" else rule.severity.value


def _fenced(rule: Rule, code: str) -> str:
    return f"```{rule.language}\n{code.strip()}\n```"


def _result(report: Report, finding: Finding, index: int, folder: Path) -> dict[str, Any]:
    cell = "" if finding.place.cell is None else f"cell {finding.place.cell}, line {finding.place.line}: "
    artifact = {"artifactLocation": _location(finding.place.path, folder)}
    result = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": finding.severity.value,
        "message": {"text": f"{cell}{finding.message}\nFix: {finding.fix}"},
        "locations": [{"physicalLocation": {**artifact, "region": _region(finding)}}],
    }
    if replacements := [_replacement(edit) for edit in edit_regions(report, finding)]:
        change = {**artifact, "replacements": replacements}
        result["fixes"] = [{"description": {"text": finding.fix}, "artifactChanges": [change]}]
    return result


def _location(path: str, folder: Path) -> dict[str, str]:
    whole = folder / path
    if whole.is_relative_to(folder) and ".." not in whole.parts:
        return {
            "uri": quote(whole.relative_to(folder).as_posix(), errors="surrogateescape"),
            "uriBaseId": BASE,
        }
    return {"uri": whole.resolve().as_uri()}


def _region(finding: Finding) -> dict[str, int]:
    place = finding.place
    if place.cell is not None:  # a line within a cell is no line of the notebook's file
        return {"startLine": 1}
    return _lines(place.line, place.column, place.end_line, place.end_column)


def _replacement(edit: dict[str, Any]) -> dict[str, Any]:
    deleted = _lines(edit["line"], edit["column"], edit["end_line"], edit["end_column"])
    return {"deletedRegion": deleted, "insertedContent": {"text": edit["text"]}}


def _lines(line: int, column: int, end_line: int, end_column: int) -> dict[str, int]:
    if end_line == line:
        end_column = max(end_column, column)
    return {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}
