"""The messages that a log of a failed job may have: what each means, what to do about it, and
whether it is a cause or a consequence.

They are data, in `messages/*.toml`. The keys of a message:

- `kind`: a fixed name for programs;
- `texts`: texts in lower case of which a line has one; `pattern`: what else it must match, in any
  case; `details`: patterns of values that it may have. Their groups may be used in `what` and
  `fix`; `defaults` has their values where they are missing;
- `role`: see `Role`; `level`: of the finding; `explains`: of a condition, the kinds of findings
  that follow from it;
- `in_info`: it is looked for in NCCL's INFO lines too (conditions always are);
- `only_over`: of a condition, only where ranks are connected over this transport;
- `shows_work`: the finding names the last long work that the log shows.

A line has the meaning of the first message that it matches, in the order of FILES.

What the lines around a fault show of its deeper cause is in `messages/contexts.toml`. A clue is what
one line shows: a path, a frame of a traceback, the number of a GPU. A context names the clues that
turn a finding of a kind into a more exact one: of the line itself (`here`), of the same process close
to it (`near`), of the whole log (`anywhere`); of each list one is enough. `work` is a pattern of the
last long work of the log, and `several` asks for two faults of the kind at least. The first context
that holds counts.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from drumline.tools.doctor.finding import Finding, Level

Role = Literal[
    "cause", "failure", "symptom", "disconnect", "condition", "outcome", "echo", "harmless"
]
"""A cause names what is wrong; a failure names what failed, and the reason is outside of the line; a
symptom follows from a fault of another rank; a disconnect shows only that another process ended, and
leads to its log; a condition is no error, and may explain one; an
outcome is how a job that hung or was slow ended; an echo
repeats or sums up other lines, and counts only without them."""

FILES = (
    "program",
    "frameworks",
    "start",
    "host",
    "gpu",
    "plugins",
    "infiniband",
    "library",
    "sockets",
    "python",
    "consequences",
)
MAX_VALUE = 160
END = ""  # of a text, in a tree of letters
LetterTree = dict[str, "LetterTree"]


@dataclass(frozen=True, kw_only=True)
class KnownMessage:
    kind: str
    texts: tuple[str, ...]
    what: str
    fix: str
    pattern: re.Pattern[str] | None = None
    details: tuple[re.Pattern[str], ...] = ()
    role: Role = "cause"
    level: Level = "problem"
    defaults: Mapping[str, str] = field(default_factory=dict)
    explains: tuple[str, ...] = ()
    in_info: bool = False
    only_over: str = ""
    shows_work: bool = False

    @property
    def is_condition(self) -> bool:
        return self.role == "condition"

    @property
    def is_harmless(self) -> bool:
        return self.role == "harmless"

    def values_in(self, line: str) -> dict[str, str] | None:
        """The groups of its patterns; None: a line with one of its texts is another message."""
        match = None if self.pattern is None else self.pattern.search(line)
        if self.pattern is not None and match is None:
            return None
        values: dict[str, str | None] = {}
        if match is not None:
            values.update(match.groupdict())
        for detail in self.details:
            values.update(dict.fromkeys(detail.groupindex))
            if (match := detail.search(line)) is not None:
                values.update(match.groupdict())
        return {
            name: self.defaults.get(name, "") if value is None else value.strip()[:MAX_VALUE]
            for name, value in values.items()
        }


@dataclass(frozen=True, kw_only=True)
class ReadMessage:
    """A known message, with the values of one line."""

    message: KnownMessage
    what: str
    fix: str


class MessageCatalogue:
    def __init__(self, messages: Iterable[KnownMessage]) -> None:
        self.messages = tuple(messages)
        self._texts = [
            (text, number) for number, message in enumerate(self.messages) for text in message.texts
        ]
        # Most lines of a log have no text of any message: one search shows it.
        self._any_text = re.compile(any_of(text for text, _ in self._texts))

    def read(self, line: str, *, is_info: bool = False, setting: str = "") -> ReadMessage | None:
        """`setting`: of the process, which some texts show."""
        lower_line = line.lower()
        if self._any_text.search(lower_line) is None:
            return None
        candidates = {number for text, number in self._texts if text in lower_line}
        for number in sorted(candidates):
            message = self.messages[number]
            if is_info and not (message.in_info or message.is_condition):
                continue
            values = message.values_in(line)
            if values is not None:
                values["setting"] = setting
                what = _filled(message.what, values)
                return ReadMessage(message=message, what=what, fix=_filled(message.fix, values))
        return None


def any_of(texts: Iterable[str]) -> str:
    """A pattern that tries all texts at once: those that begin alike share their beginning."""
    root: LetterTree = {}
    for text in texts:
        node = root
        for letter in text:
            node = node.setdefault(letter, {})
        node[END] = {}
    return _pattern_of(root)


def _pattern_of(node: LetterTree) -> str:
    if END in node:
        return ""
    branches = [f"{re.escape(letter)}{_pattern_of(rest)}" for letter, rest in node.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _filled(text: str, values: Mapping[str, str]) -> str:
    """A value may be empty: no two spaces are left beside it."""
    text = re.sub(r" {2,}", " ", text.format(**values))
    return text.replace("( ", "(").replace(" )", ")").replace(" :", ":").rstrip()


def _read_messages() -> Iterator[KnownMessage]:
    folder = Path(__file__).with_name("messages")
    for name in FILES:
        document = tomllib.loads((folder / f"{name}.toml").read_text(encoding="utf-8"))
        for entry in document["message"]:
            yield _message(entry)


def _message(entry: Mapping[str, Any]) -> KnownMessage:
    pattern = entry.get("pattern")
    compiled = None if pattern is None else re.compile(pattern, re.IGNORECASE)
    details = entry.get("details", ())
    return KnownMessage(
        **{
            **entry,
            "texts": tuple(entry["texts"]),
            "pattern": compiled,
            "details": tuple(re.compile(detail, re.IGNORECASE) for detail in details),
            "explains": tuple(entry.get("explains", ())),
        }
    )


@cache
def known_messages() -> MessageCatalogue:
    return MessageCatalogue(_read_messages())


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
