"""The command line, read into settings: `--a.b value`, `--a.b=value`, `--a.b` and `--no-a.b` for true and false.

Why not a library: argparse and tyro both stop at the first mistake, and a user should hear of all mistakes at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from drumline.config.fields import annotation_of
from drumline.config.layer import Layer, Setting, check_layer
from drumline.config.values import SWITCH_WORDS, Mismatch, describe, is_optional

NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)
# Each value is a text, taken as it is; the flag's value is a list of them.
REPEATED = list[str]
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Flags:
    """A command line taken apart."""

    layer: Layer
    """The settings, and every problem of the whole line."""
    own: Mapping[str, Any]
    """Values of the command's own flags, as far as they were given and are right."""
    words: tuple[str, ...]
    """What is not a flag nor a flag's value, in order."""


def read_flags(argv: Sequence[str], *, own: Mapping[str, Any] = NOTHING, max_words: int = 0) -> Flags:
    """Take a command line apart; never raises, problems are kept in `layer`.

    `own` names the flags that belong to the command itself and are no settings, with the type of each
    (`{"run": str, "procs": Count, "fresh": bool}`; one of REPEATED may be given again and again); `max_words` says how
    many words may stand beside the flags.
    """
    reader = _Reader(list(argv), own, max_words)
    while reader.tokens:
        reader.take_one()
    layer = check_layer(
        (setting for path, setting in reader.given.items() if path not in own), besides=frozenset(own)
    )
    own_values = reader.own_values()
    layer = Layer(layer.settings, (*reader.problems, *layer.problems), layer.broken | reader.broken)
    return Flags(layer, own_values, tuple(reader.words))


class _Reader:
    """Walks over the tokens; what it has found so far is in its attributes."""

    def __init__(self, tokens: list[str], own: Mapping[str, Any], max_words: int) -> None:
        self.tokens = tokens
        self.own = own
        self.max_words = max_words
        self.given: dict[str, Setting] = {}
        self.repeated: dict[str, list[str]] = {}
        self.words: list[str] = []
        self.problems: list[str] = []
        self.broken: set[str] = set()

    def take_one(self) -> None:
        token = self.tokens.pop(0)
        if not _is_flag(token):
            self._take_word(token)
            return
        flag, equals, text = ("--help" if token == "-h" else token).partition("=")
        path = flag.removeprefix("--")
        try:
            if path.startswith("no-"):
                path = path.removeprefix("no-")
                self._check_can_be_turned_off(flag, path, has_value=bool(equals))
                text = "false"
            elif not equals:
                text = self._value_after(flag, path)
            self._keep(Setting(path, text, where=flag, is_text=True))
        except Mismatch as mismatch:
            self.problems.append(str(mismatch))
            self.broken.add(path)

    def own_values(self) -> dict[str, Any]:
        values: dict[str, Any] = dict(self.repeated)
        for name in (name for name in self.own if name in self.given):
            try:
                values[name] = self.given[name].coerced(self.own[name]).value
            except Mismatch as mismatch:
                self.problems.append(str(mismatch))
        return values

    def _take_word(self, word: str) -> None:
        if len(self.words) < self.max_words:
            self.words.append(word)
        else:
            self.problems.append(f"{word!r}: stray word; a setting is given as --section.name value")

    def _value_after(self, flag: str, path: str) -> str:
        following = self.tokens[0] if self.tokens else None
        if self._type_of(path) is bool:
            return self.tokens.pop(0) if (following or "").lower() in SWITCH_WORDS else "true"
        if following is not None and not _is_flag(following):
            return self.tokens.pop(0)
        annotation = self._type_of(path)
        if annotation is None:
            return "true"  # an unknown flag: that it is unknown is all there is to say
        raise Mismatch(f"{flag}: the value is missing ({describe(annotation)})")

    def _check_can_be_turned_off(self, flag: str, path: str, *, has_value: bool) -> None:
        annotation = self._type_of(path)
        if has_value:
            raise Mismatch(f"{flag}: takes no value; write --{path}=true or --{path}=false")
        if annotation not in (None, bool):
            hint = f"; write --{path} none" if is_optional(annotation) else ""
            raise Mismatch(f"{flag}: only a true | false setting can be turned off this way{hint}")

    def _keep(self, setting: Setting) -> None:
        if self.own.get(setting.path) == REPEATED:
            self.repeated.setdefault(setting.path, []).append(setting.value)
            return
        before = self.given.setdefault(setting.path, setting)
        if before.value != setting.value:
            raise Mismatch(f"{setting.where}: given twice, as {before.value!r} and as {setting.value!r}")

    def _type_of(self, path: str) -> Any | None:
        return self.own[path] if path in self.own else annotation_of(path)


def _is_flag(token: str) -> bool:
    return token.startswith("-") and token.strip("-") != "" and not NEGATIVE_NUMBER.match(token)
