"""What keeps a file from being read, or a rule from being asked: told like a finding, never passed over."""

from __future__ import annotations

from pathlib import Path

from drumline_lint.finding import Finding, Place, Severity
from drumline_lint.rule import Rule

UNREADABLE = Rule(
    id="DL000",
    name="unreadable",
    severity=Severity.ERROR,
    summary="a file that could not be read, so no rule has looked at it",
    why="What cannot be read cannot be vouched for: the file is not there, is no text, or is not the Python that it "
    "says it is. The other files are read all the same, and the exit code is 2.",
    fix="mend the file, or leave it out with --exclude",
    bad="def train(:\n    pass\n",
    good="def train():\n    pass\n",
)
RULE_FAILED = Rule(
    id="DL999",
    name="rule-failed",
    severity=Severity.ERROR,
    summary="a rule that failed on this file: a mistake of drumline, not of the file",
    why="The rule could not be asked, so this file may have the mistake that it looks for. All other rules were asked, "
    "and the exit code is 2.",
    fix="please report it, with the file if you may share it; --ignore with the rule's number goes on without it",
    bad="",
    good="",
)
OWN_RULES = {rule.id: rule for rule in (UNREADABLE, RULE_FAILED)}


def problem(
    rule: Rule,
    path: Path | str,
    message: str,
    *,
    line: int = 1,
    column: int = 1,
    cell: int | None = None,
    fix: str = "",
) -> Finding:
    """Of a file, or of one line in it."""
    place = Place(path=str(path), cell=cell, line=line, column=column, end_line=line, end_column=column)
    return Finding(
        rule=rule.id,
        name=rule.name,
        severity=rule.severity,
        place=place,
        message=message,
        fix=fix or rule.fix,
    )
