"""DL015: one process of every node writes the same file."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.flow.guards import Guards, call_paths, is_main_only
from drumline_lint.flow.hosts import NODES
from drumline_lint.program.program import Program
from drumline_lint.reading.source import Source
from drumline_lint.training.saves import is_own_of_node, saves

RULE = rule("DL015", in_tests=False)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """Saves by the first process of each node, with a path that is the same on all nodes."""
    for save in saves(program, source):
        reached = [way.guards for way in call_paths(program, save.call) if way.begins != "parent"]
        if any(map(_is_once_a_node, reached)) and not is_own_of_node(program, save.path):
            to = "the same file" if save.path is None else source.code(save.path)
            message = (
                f"{source.code(save.call.func)} runs once on every node, and all nodes write {to}"
            )
            severity = None if NODES.search(source.text) else Severity.NOTE
            yield RULE.at(source, save.call, message, severity=severity)


def _is_once_a_node(tests: Guards) -> bool:
    """Whether the local rank is what lets one through, and nothing says of which node."""
    is_local = any(test.kind == "local" and test.is_main and test.is_needed for test in tests)
    return (
        is_local
        and not is_main_only(tests)
        and all(test.kind in ("local", "group") for test in tests)
    )
