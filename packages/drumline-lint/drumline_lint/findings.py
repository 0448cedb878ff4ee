"""Findings, rules, and problems because of which a file or a rule was not checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol


class Severity(StrEnum):
    """How sure a finding is: of an error, its rule was right wherever it was judged, or what it reports
    always fails, and all evidence is seen; a warning is a question; a note may be intended, or its
    evidence is not seen."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def weight(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    """Lines and columns count from 1, as in editors; in a notebook, lines count within the cell."""

    path: str
    cell: int | None = None
    """The number of the notebook's cell, from 1, among all its cells."""
    line: int
    column: int
    end_line: int
    end_column: int

    def __str__(self) -> str:
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Replaces a part of the text. Positions are (line, column) as in `ast`: lines from 1, columns
    from 0."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One mistake in one place."""

    rule: str
    name: str
    severity: Severity
    place: Place
    message: str
    """What is wrong here, with the names that the code uses, and why it matters."""
    fix: str
    """What to write instead."""
    edits: tuple[Edit, ...] = ()
    """The fix, if it is mechanical. All edits belong together."""


class HasPlaces(Protocol):
    """A file with findings: Python, a notebook, a shell script."""

    def place(self, node: Any) -> Place:
        """The place of a part of it."""


RULES_ADDRESS = "https://github.com/OWNER/drumline/blob/main/packages/drumline-lint/drumline_lint/rules/rules.md"
"""OWNER is the account that hosts Drumline."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One mistake. Its snippets are shown to the user, and are themselves tests."""

    id: str
    name: str
    severity: Severity
    summary: str
    """One line: the mistake, without a full stop."""
    why: str
    """Why it matters, in a few sentences."""
    fix: str
    """What to do instead, in one sentence; a finding may replace it with one that has the names of
    the code."""
    bad: str
    good: str
    language: str = "python"
    """The language of the snippets: python, shell or yaml."""
    only_distributed: bool = True
    """Whether it applies only to code that runs in several processes."""
    in_tests: bool = True
    """Whether it applies to tests, which run for seconds, on one host, with their own files."""
    fixable: bool = False
    """Whether `--fix` can fix it."""

    @property
    def address(self) -> str:
        """Where it is documented."""
        return f"{RULES_ADDRESS}#{self.id.lower()}-{self.name}"

    def at(
        self,
        where: HasPlaces,
        node: Any,
        message: str,
        *,
        fix: str = "",
        edits: Sequence[Edit] = (),
        severity: Severity | None = None,
    ) -> Finding:
        return Finding(
            rule=self.id,
            name=self.name,
            severity=severity or self.severity,
            place=where.place(node),
            message=message,
            fix=fix or self.fix,
            edits=tuple(edits),
        )


_LANGUAGES = {"sh": "shell", "yaml": "yaml"}
_SECTION = re.compile(
    r"### (?P<id>DL[0-9]+) (?P<name>[a-z-]+)\n\n"
    r"(?P<severity>Error|Warning|Note): (?P<summary>.+?)\.\n\n(?P<why>.+?)\n\n"
    r"Fix: (?P<fix>.+?)\.(?P<fixable>\s`--fix`\scan\sdo\sit\.)?\n"
    r"(?:\nBad:\n\n```(?P<language>py|sh|yaml)\n(?P<bad>.+?)```\n\nGood:\n\n```(?:py|sh|yaml)\n(?P<good>.+?)```\n)?(?=\n#|\Z)",
    re.DOTALL,
)


def rule(
    number: str,
    *,
    only_distributed: bool = True,
    in_tests: bool = True,
) -> Rule:
    """The rule with this number, with its texts from rules/rules.md."""
    section = _sections()[number]
    texts = {name: " ".join(section[name].split()) for name in ("summary", "fix")}
    return Rule(
        id=number,
        name=section["name"],
        severity=Severity(section["severity"].lower()),
        why="\n\n".join(" ".join(part.split()) for part in section["why"].split("\n\n")),
        bad=section["bad"] or "",
        good=section["good"] or "",
        language=_LANGUAGES.get(section["language"], "python"),
        only_distributed=only_distributed,
        in_tests=in_tests,
        fixable=bool(section["fixable"]),
        **texts,
    )


@cache
def _sections() -> dict[str, re.Match[str]]:
    text = (Path(__file__).parent / "rules" / "rules.md").read_text(encoding="utf-8")
    return {section["id"]: section for section in _SECTION.finditer(text)}


UNREADABLE = rule("DL000")
RULE_FAILED = rule("DL999")
OWN_RULES = {own_rule.id: own_rule for own_rule in (UNREADABLE, RULE_FAILED)}


def problem(
    rule: Rule,
    path: Path | str,
    message: str,
    *,
    line: int = 1,
    column: int = 1,
    cell: int | None = None,
    fix: str = "",
    severity: Severity | None = None,
) -> Finding:
    place = Place(
        path=str(path), cell=cell, line=line, column=column, end_line=line, end_column=column
    )
    return Finding(
        rule=rule.id,
        name=rule.name,
        severity=severity or rule.severity,
        place=place,
        message=message,
        fix=fix or rule.fix,
    )


@lru_cache(maxsize=4)
def split_lines(text: str) -> list[str]:
    """The lines as `ast` counts them, without line endings; cached, since findings are made file by
    file."""
    return re.split(r"\r\n|\n|\r", text)


def column_of(line: str, offset: int) -> int:
    """`ast` counts bytes of UTF-8 from 0; editors count characters from 1."""
    return len(line.encode(errors="surrogateescape")[:offset].decode(errors="surrogateescape")) + 1
