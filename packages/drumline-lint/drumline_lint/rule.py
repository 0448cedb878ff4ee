"""What a rule is: its number, its words, and what it looks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drumline_lint.finding import Edit, Finding, Place, Severity


class HasPlaces(Protocol):
    """What a finding can be in: Python, a notebook, a shell script."""

    def place(self, node: Any) -> Place:
        """Of a part of it."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One mistake. Its snippets are shown to the user, and are themselves tests."""

    id: str
    name: str
    severity: Severity
    summary: str
    """One line: the mistake, without a full stop."""
    why: str
    """Why it bites, in a few sentences."""
    fix: str
    """What to do instead, in one sentence; a finding may say it with the names of the code."""
    bad: str
    good: str
    language: str = "python"
    """Of the snippets: python or shell."""
    only_distributed: bool = True
    """Whether it is looked for only in code that runs in several processes."""
    fixable: bool = False
    """Whether `--fix` can mend it."""

    def at(
        self, where: HasPlaces, node: Any, message: str, *, fix: str = "", edits: Sequence[Edit] = ()
    ) -> Finding:
        """This mistake, found in a place."""
        return Finding(
            rule=self.id,
            name=self.name,
            severity=self.severity,
            place=where.place(node),
            message=message,
            fix=fix or self.fix,
            edits=tuple(edits),
        )
