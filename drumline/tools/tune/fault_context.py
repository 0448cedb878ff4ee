"""What the lines around a fault show of its deeper cause.

The data is in `messages/contexts.toml`. A clue is what one line shows: a path, a frame of a
traceback, the number of a GPU. A context names the clues that turn a finding of a kind into a more
exact one: of the line itself (`here`), of the same process close to it (`near`), of the whole log
(`anywhere`); of each list one is enough. `work` is a pattern of the last long work of the log, and
`several` asks for two faults of the kind at least. The first context that holds counts.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from drumline.tools.doctor.finding import Finding
from drumline.tools.tune.known_messages import any_of

NEAR = 80  # lines of one process, or of one file
MAX_POSITIONS = 200  # of a clue in one process


@dataclass(frozen=True)
class Clue:
    name: str
    texts: tuple[str, ...]
    pattern: re.Pattern[str] | None


@dataclass(frozen=True, kw_only=True)
class Context:
    kinds: tuple[str, ...]
    what: str
    fix: str
    here: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()
    work: re.Pattern[str] | None = None
    several: bool = False

    def refine(self, finding: Finding) -> Finding:
        what = f"{finding.what}; here most likely: {self.what}"
        fix = f"{self.fix}; else: {finding.fix}"
        return replace(finding, what=what, fix=fix)


@dataclass(frozen=True)
class LinePlace:
    """Where a line is: its process or file, and the number of the line among its lines."""

    origin: str
    number: int


@dataclass
class FaultContext:
    """The clues of a log, and where they are."""

    names: set[str] = field(default_factory=set)
    _positions: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def read(self, text: str, place: LinePlace) -> None:
        lower_text = text.lower()
        if context_data().any_text.search(lower_text) is None:
            return
        for clue in context_data().clues:
            if not any(part in lower_text for part in clue.texts):
                continue
            if clue.pattern is None or clue.pattern.search(text):
                self._add(clue.name, place)

    def _add(self, name: str, place: LinePlace) -> None:
        self.names.add(name)
        positions = self._positions.setdefault((name, place.origin), [])
        if len(positions) >= MAX_POSITIONS:
            positions.pop()  # the first ones and the last one
        positions.append(place.number)

    def _is_within(self, name: str, place: LinePlace, distance: int) -> bool:
        positions = self._positions.get((name, place.origin), [])
        following = bisect_left(positions, place.number - distance)
        return following < len(positions) and positions[following] <= place.number + distance

    def refined(
        self, finding: Finding, places: Collection[LinePlace], *, work: str, is_repeated: bool
    ) -> Finding:
        """`places`: of the lines of the finding; `is_repeated`: there are several of its kind."""
        for context in context_data().contexts_of(finding.check):
            work_matches = context.work is None or context.work.search(work) is not None
            count_matches = is_repeated or not context.several
            if work_matches and count_matches and self._holds(context, places):
                return context.refine(finding)
        return finding

    def _holds(self, context: Context, places: Collection[LinePlace]) -> bool:
        return (
            self._has_one(context.here, places, 0)
            and self._has_one(context.near, places, NEAR)
            and (not context.anywhere or not self.names.isdisjoint(context.anywhere))
        )

    def _has_one(
        self, names: Collection[str], places: Collection[LinePlace], distance: int
    ) -> bool:
        return not names or any(
            self._is_within(name, place, distance) for name in names for place in places
        )


@dataclass(frozen=True)
class ContextData:
    clues: tuple[Clue, ...]
    contexts: tuple[Context, ...]
    any_text: re.Pattern[str]

    def contexts_of(self, kind: str) -> Iterator[Context]:
        return (context for context in self.contexts if kind in context.kinds)


@cache
def context_data() -> ContextData:
    path = Path(__file__).with_name("messages") / "contexts.toml"
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    clues = tuple(
        Clue(entry["name"], tuple(entry["texts"]), _pattern(entry.get("pattern")))
        for entry in document["clue"]
    )
    contexts = tuple(_context(entry) for entry in document["context"])
    any_text = re.compile(any_of(text for clue in clues for text in clue.texts))
    return ContextData(clues, contexts, any_text)


def _context(entry: Mapping[str, Any]) -> Context:
    lists = {name: tuple(entry.get(name, ())) for name in ("kinds", "here", "near", "anywhere")}
    return Context(**{**entry, **lists, "work": _pattern(entry.get("work"))})


def _pattern(text: str | None) -> re.Pattern[str] | None:
    return None if text is None else re.compile(text, re.IGNORECASE)
