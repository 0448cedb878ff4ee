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
- `shows_work`: the finding names the last long work that the log shows;
- `at_end`: it counts only among the last lines of the logs, which end there if the job hangs.

A line has the meaning of the first message that it matches, in the order of FILES.

What the lines around a fault show of its deeper cause is in `messages/contexts.toml`. A clue is what
one line shows: a path, a frame of a traceback, the number of a GPU. A context names the clues that
turn a finding of a kind into a more exact one: of the line itself (`here`), of the same process close
to it (`near`), of the whole log (`anywhere`); of each list one is enough. `work` is a pattern of the
last long work of the log. The first context that holds counts.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

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
T = TypeVar("T")


@dataclass(
    frozen=True,
    kw_only=True,
    eq=False,
)
class KnownMessage:
    """A message of `messages/*.toml`; the module says what its fields mean."""

    kind: str
    texts: tuple[str, ...]
    what: str
    fix: str
    pattern: re.Pattern[str] | None = None
    details: tuple[re.Pattern[str], ...] = ()
    role: Role = "cause"
    level: Level = "problem"
    defaults: dict[str, str] = field(default_factory=dict)
    explains: tuple[str, ...] = ()
    in_info: bool = False
    only_over: str = ""
    shows_work: bool = False
    at_end: bool = False

    def values_in(self, line: str) -> dict[str, str] | None:
        """The groups of its patterns, `{'address': '10.0.0.4'}`; None: a line with one of its texts is another
        message."""
        values: dict[str, str | None] = {}
        if self.pattern is not None:
            match = self.pattern.search(line)
            if match is None:
                return None

            values.update(match.groupdict())

        for detail in self.details:
            match = detail.search(line)
            values.update(match.groupdict() if match else dict.fromkeys(detail.groupindex))

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
    """All messages that are known, to look them up in a line."""

    def __init__(self, messages: Iterable[KnownMessage]) -> None:
        self.messages = tuple(messages)
        self._texts = [(text, message) for message in self.messages for text in message.texts]
        self._any_text = any_of(text for text, _ in self._texts)
        """Most lines of a log have no text of any message: one search shows it, 30 times as
        fast."""

    def read(self, line: str, *, is_info: bool = False, setting: str = "") -> ReadMessage | None:
        """The first message that a line has; None: no known one.

        `setting`: of the process, which some texts show."""
        lower_line = line.lower()
        if self._any_text.search(lower_line) is None:
            return None

        candidates = dict.fromkeys(
            candidate for text, candidate in self._texts if text in lower_line
        )

        for candidate in candidates:
            if is_info and not (candidate.in_info or candidate.role == "condition"):
                continue

            values = candidate.values_in(line)
            if values is not None:
                values["setting"] = setting
                return ReadMessage(
                    message=candidate,
                    what=_filled(candidate.what, values),
                    fix=_filled(candidate.fix, values),
                )

        return None


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Tries all texts at once: those that begin alike share their beginning. `nccl` and `ncclx` are
    the pattern `nccl`, `cat` and `cow` are `c(?:at|ow)`."""
    root: LetterTree = {}
    for text in texts:
        node = root
        for letter in text:
            node = node.setdefault(letter, {})

        node[END] = {}

    return re.compile(_pattern_of(root))


def _pattern_of(node: LetterTree) -> str:
    """The pattern of a tree of letters."""
    if END in node:
        return ""

    branches = [f"{re.escape(letter)}{_pattern_of(rest)}" for letter, rest in node.items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _filled(text: str, values: Mapping[str, str]) -> str:
    """`connection to {address} refused` with the values of a line. A value may be empty: no two spaces are
    left beside it."""
    text = re.sub(r" {2,}", " ", text.format(**values))
    return text.replace("( ", "(").replace(" )", ")").replace(" :", ":").rstrip()


@dataclass(frozen=True)
class MessageFile:
    """A file of messages, as TOML has it: a list of tables `[[message]]`."""

    message: tuple[KnownMessage, ...]


@cache
def known_messages() -> MessageCatalogue:
    """All files, read once."""
    files = (_read_file(name, MessageFile) for name in FILES)
    return MessageCatalogue(message for file in files for message in file.message)


def _read_file(name: str, kind: type[T]) -> T:
    """A file of `messages/`."""
    path = Path(__file__).with_name("messages") / f"{name}.toml"
    return msgspec.toml.decode(path.read_bytes(), type=kind, dec_hook=_pattern)


def _pattern(_: type, text: str) -> re.Pattern[str]:
    """What msgspec calls for a field that is a pattern."""
    return re.compile(text, re.IGNORECASE)


NEAR = 80  # lines of one process, or of one file


@dataclass(frozen=True)
class Clue:
    """What one line shows, such as the path of a module in a traceback."""

    name: str
    texts: tuple[str, ...]
    pattern: re.Pattern[str] | None = None


@dataclass(frozen=True, kw_only=True)
class Context:
    """Clues that turn a finding of one of these kinds into a more exact one."""

    kinds: tuple[str, ...]
    what: str
    fix: str
    here: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()
    work: re.Pattern[str] | None = None


@dataclass(frozen=True)
class LinePlace:
    """Where a line is: its process or file, and the number of the line among its lines."""

    origin: str
    number: int


@dataclass(frozen=True)
class ContextFile:
    """`messages/contexts.toml`: lists of tables `[[clue]]` and `[[context]]`."""

    clue: tuple[Clue, ...]
    context: tuple[Context, ...]

    @cached_property
    def any_text(self) -> re.Pattern[str]:
        """Whether a line has a text of any clue: most have none."""
        return any_of(text for clue in self.clue for text in clue.texts)


@cache
def context_data() -> ContextFile:
    """The file, read once."""
    return _read_file("contexts", ContextFile)


class FaultContext:
    """What the lines around the faults of a log show: its clues, and the last long work."""

    def __init__(self) -> None:
        self.work = ""
        """Before the first time-out."""
        self._positions: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        """Of each clue, the numbers of the lines of each process or file that have it."""

    def read(self, text: str, place: LinePlace) -> None:
        """Note the clues of a line."""
        lower_text = text.lower()
        if context_data().any_text.search(lower_text) is None:
            return

        for clue in context_data().clue:
            has_text = any(part in lower_text for part in clue.texts)
            if has_text and (clue.pattern is None or clue.pattern.search(text)):
                self._positions[clue.name][place.origin].append(place.number)

    def refined(self, finding: Finding, places: Collection[LinePlace]) -> Finding:
        """The finding with the most likely cause that the lines around it show:

        out of memory on GPU 0; here most likely: every rank loads the checkpoint to GPU 0

        `places`: of its own lines."""
        for context in context_data().context:
            if finding.check in context.kinds and self._holds(context, places):
                what = f"{finding.what}; here most likely: {context.what}"
                return replace(finding, what=what, fix=f"{context.fix}; else: {finding.fix}")

        return finding

    def _holds(self, context: Context, places: Collection[LinePlace]) -> bool:
        """Whether the clues of the context are where it wants them."""
        return (
            (context.work is None or context.work.search(self.work) is not None)
            and self._has_clue(context.here, places, 0)
            and self._has_clue(context.near, places, NEAR)
            and (not context.anywhere or not self._positions.keys().isdisjoint(context.anywhere))
        )

    def _has_clue(
        self,
        names: Collection[str],
        places: Collection[LinePlace],
        distance: int,
    ) -> bool:
        """Whether one of these is so many lines from one of the places at most; without names it
        is."""
        if not names:
            return True

        return any(self._is_within(name, place, distance) for name in names for place in places)

    def _is_within(self, name: str, place: LinePlace, distance: int) -> bool:
        """Whether a line with this clue is so near to a place, in the same process or file."""
        positions = self._positions.get(name, {}).get(place.origin, [])
        following = bisect_left(positions, place.number - distance)
        return following < len(positions) and positions[following] <= place.number + distance
