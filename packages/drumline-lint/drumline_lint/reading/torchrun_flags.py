"""torchrun's own flags, told apart from the training script's, which follow them.

It takes `-` and `_` alike in names, and the beginning of a name for the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline_lint.reading.shell_parts import Kind, Word

VALUED = (
    "duplicate-stderr-filters",
    "duplicate-stdout-filters",
    "event-log-handler",
    "local-addr",
    "local-ranks-filter",
    "log-dir",
    "logs-specs",
    "master-addr",
    "master-port",
    "max-restarts",
    "monitor-interval",
    "nnodes",
    "node-rank",
    "nproc-per-node",
    "numa-binding",
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
    "redirects",
    "role",
    "shutdown-timeout",
    "signals-to-handle",
    "start-method",
    "tee",
)
BARE = ("help", "module", "no-python", "run-path", "standalone", "use-env", "virtual-local-rank")
SHORT = {"-h": "help", "-m": "module", "-r": "redirects", "-t": "tee"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One of the launcher's own flags."""

    name: str
    word: Word
    value: Word | None
    """What it is given; the part behind an equals sign, or the next word."""


def read_flags(words: Sequence[Word]) -> tuple[dict[str, Flag], bool]:
    """torchrun's flags, and whether there can be no others."""
    flags: dict[str, Flag] = {}
    position = 0
    while position < len(words):
        word = words[position]
        head = word.head
        if not head:
            return flags, _is_last_of_flags(word, words[position + 1 :])
        if not head.startswith("-") or word.plain == "--":
            return flags, True
        name, equals, _ = head.partition("=")
        known = _known(name)
        if not known:
            return flags, False
        value: Word | None = None
        if equals:
            value = _behind_equals(word, len(name) + 1)
        elif known in VALUED:
            position += 1
            value = words[position] if position < len(words) else None
        flags[known] = Flag(known, word, value)
        position += 1
    return flags, True


def _is_last_of_flags(word: Word, rest: Sequence[Word]) -> bool:
    """Whether a word that is not known can only be the script: it is one word, and none of our flags follows."""
    first = word.pieces[0] if word.pieces else None  # a quote that was never closed may hold nothing
    if first is None or not first.is_quoted or first.kind is not Kind.VARIABLE:
        return False
    return not any(_known(later.head.partition("=")[0]) for later in rest if later.head.startswith("--"))


def _known(written: str) -> str:
    """The flag that is meant; nothing where it is none or could be two."""
    if written in SHORT:
        return SHORT[written]
    name = written.removeprefix("--").replace("_", "-")
    if not written.startswith("--") or not name:
        return ""
    if name in VALUED or name in BARE:
        return name
    meant = [known for known in (*VALUED, *BARE) if known.startswith(name)]
    return meant[0] if len(meant) == 1 else ""


def _behind_equals(word: Word, length: int) -> Word:
    first = word.pieces[0]._replace(text=word.pieces[0].text[length:])
    pieces = (first, *word.pieces[1:]) if first.text or len(word.pieces) == 1 else word.pieces[1:]
    return Word(word.start + length, word.end, pieces)
