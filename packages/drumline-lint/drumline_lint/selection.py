"""Which rules a word means: a number (DL012), the beginning of numbers (DL1), or a name (unguarded-save)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from drumline_lint.errors import UsageError, did_you_mean
from drumline_lint.rule import Rule

Rules = Mapping[str, Rule]


@dataclass(frozen=True)
class Selection:
    """Rules by number; those that were called by their own number or name are `exact`."""

    exact: frozenset[str] = field(default_factory=frozenset)
    by_prefix: frozenset[str] = field(default_factory=frozenset)

    @property
    def all(self) -> frozenset[str]:
        """However they were called."""
        return self.exact | self.by_prefix


def find_rule(word: str, rules: Rules, *, where: str) -> Rule:
    """The one rule of this number or name."""
    for rule in rules.values():
        if word.upper() == rule.id or word.lower() == rule.name:
            return rule
    raise _unknown(word, rules, where)


def select(words: Iterable[str], rules: Rules, *, where: str) -> Selection:
    """What the words mean together; `where` they stand begins the message about one that means nothing."""
    exact: set[str] = set()
    by_prefix: set[str] = set()
    for word in words:
        begun = {number for number in rules if number.startswith(word.upper())}
        if word.upper() in rules or not begun:
            exact.add(find_rule(word, rules, where=where).id)
        else:
            by_prefix |= begun
    return Selection(frozenset(exact), frozenset(by_prefix))


def split_words(texts: Iterable[str]) -> list[str]:
    """`DL001,DL002` and `DL001 DL002` are two words."""
    return [word for text in texts for word in text.replace(",", " ").split()]


def _unknown(word: str, rules: Rules, where: str) -> UsageError:
    known = {*rules, *(rule.name for rule in rules.values())}
    written = word.lower() if "-" in word else word.upper()
    meant = did_you_mean(written, known)
    hint = f"; {meant}" if meant.startswith("did you mean") else ""
    return UsageError(f"{where}: there is no rule {word!r}{hint}", next_step="--list shows all rules")
