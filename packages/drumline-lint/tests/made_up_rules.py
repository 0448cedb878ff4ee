"""Rules for tests of what is around the rules: they find calls of certain names, and lines of
scripts."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drumline_lint.findings import Edit, Finding, Rule, Severity
from drumline_lint.linter import Report, all_docs, check
from drumline_lint.reading.parse import read_bytes
from drumline_lint.settings import Settings


def rule(number: str, name: str, severity: Severity, *, fixable: bool = False) -> Rule:
    return Rule(
        id=number,
        name=name,
        severity=severity,
        summary=f"a call of {name}",
        why=f"{name} bites.\n\nAlways.",
        fix="call good() instead",
        bad=f"{name.replace('-', '_')}()\n",
        good="good()\n",
        fixable=fixable,
        only_distributed=False,
    )


def calls_of(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node


def calling(made: Rule, name: str, *, instead: str | None = None) -> SimpleNamespace:
    """A rule that finds calls of a name, and may put another name there."""

    def edits(node: ast.Call) -> list[Edit]:
        function = node.func
        end = (function.end_lineno or 0, function.end_col_offset or 0)
        return (
            []
            if instead is None
            else [Edit(start=(node.lineno, node.col_offset), end=end, text=instead)]
        )

    def look(program: Any, source: Any) -> Iterator[Finding]:
        for node in calls_of(source.tree, name):
            yield made.at(source, node, f"{name}() is called", edits=edits(node))

    return SimpleNamespace(RULE=made, check=look)


BAD = calling(rule("DL101", "bad-call", Severity.ERROR, fixable=True), "bad", instead="good")
POOR = calling(rule("DL102", "poor-call", Severity.WARNING), "poor")
ODD = calling(rule("DL201", "odd-call", Severity.NOTE), "odd")
RULES: dict[str, Any] = {"DL101": BAD, "DL102": POOR, "DL201": ODD}
DOCS = all_docs(RULES)
USUAL = Settings(chosen=frozenset(DOCS))


def report_of(
    files: dict[str, str | bytes], rules: dict[str, Any] = RULES, settings: Settings | None = None
) -> Report:
    """Of files that are nowhere; all is shown, unless there are settings."""
    settings = settings or Settings(chosen=frozenset(all_docs(rules)), severity=Severity.NOTE)
    readings = [
        read_bytes(Path(name), text.encode() if isinstance(text, str) else text)
        for name, text in files.items()
    ]
    return check(readings, rules, settings)


def told(findings: Sequence[Finding]) -> list[str]:
    return [f"{finding.place} {finding.rule}" for finding in findings]
