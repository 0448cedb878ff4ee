"""One source of settings (flags, file, environment, task) as a checked `Layer`, and the command
line of every verb.

All problems are collected, so that they are reported at once. That is why the parser is not a
library: argparse and tyro both stop at the first mistake.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from drumline.base.errors import did_you_mean
from drumline.config.fields import (
    FIELDS,
    UNKNOWN_TYPE,
    Mismatch,
    annotation_of,
    describe_type,
    from_text,
    from_value,
    is_optional,
    is_switch,
    nearest,
    show_value,
    unknown_setting,
)

SCHEMA_DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A value for a setting, and where it comes from: `--optim.lr`, `run.toml:3`, `DATASET_DIR`,
    `MyTask.defaults`."""

    path: str
    value: Any
    where: str
    is_text: bool = False
    """Given as a command-line string, by a flag or variable that names the setting. The value of a
    task's own setting that was given by its name alone is True, until its type is known."""

    def coerced(self, annotation: Any) -> Setting:
        """The same, with a value of the right type; raises Mismatch with the whole message."""
        if annotation is UNKNOWN_TYPE:
            return self
        read = from_text if self.is_text else from_value
        try:
            return replace(self, value=read(annotation, self.value))
        except Mismatch as mismatch:
            sign = ":" if self.is_text else " ="
            raise Mismatch(f"{self.name}{sign} {mismatch}") from None

    @property
    def name(self) -> str:
        """How a message about it begins."""
        return self.where if self.is_text else f"{self.where}: {self.path}"


@dataclass(frozen=True)
class Layer:
    """The valid settings of one source, and the problems with the others."""

    settings: Mapping[str, Setting]
    problems: tuple[str, ...] = ()
    broken: frozenset[str] = frozenset()
    """Settings with a problem that is already reported, so no rule checks them."""


def check_layer(
    unchecked: Iterable[Setting],
    *,
    besides: Collection[str] = (),
    problems: Iterable[str] = (),
    broken: Iterable[str] = (),
    check: Callable[[Setting], Setting] | None = None,
) -> Layer:
    """Check names, types and bounds. `besides`: other names that may have been meant. `problems`
    and `broken`: what was found before. `check`: of a setting, in place of what the schema says."""
    settings: dict[str, Setting] = {}
    problems = list(problems)
    broken = set(broken)
    for setting in _options_apart(unchecked):
        try:
            settings[setting.path] = (
                check(setting) if check else setting.coerced(_annotation(setting, besides))
            )
        except Mismatch as mismatch:
            problems.append(str(mismatch))
            broken.update((setting.path, *nearest(setting.path)))
    return Layer(settings, tuple(problems), frozenset(broken))


def evidence(settings: Iterable[Setting]) -> str:
    """The values behind a problem, and where each comes from; those not set are left out."""
    return ", ".join(
        f"{setting.path} = {show_value(setting.value)} ({setting.where})"
        for setting in settings
        if setting.where != SCHEMA_DEFAULT or setting.value is not None
    )


def _options_apart(settings: Iterable[Setting]) -> Iterator[Setting]:
    """A table of options becomes one setting per option, so that layers can differ in some of
    them."""
    for setting in settings:
        field = FIELDS.get(setting.path)
        if field is not None and field.is_table and isinstance(setting.value, Mapping):
            for option, value in setting.value.items():
                yield replace(setting, path=f"{setting.path}.{option}", value=value)
        else:
            yield setting


def _annotation(setting: Setting, besides: Collection[str]) -> Any:
    annotation = annotation_of(setting.path)
    if annotation is None:
        raise Mismatch(f"{setting.name}: {unknown_setting(setting.path, besides=besides)}")
    _, _, *option = setting.path.split(".", 2)
    if option and not option[0].isidentifier():
        raise Mismatch(f"{setting.name}: {option[0]!r} cannot be the name of a keyword argument")
    return annotation


# The command line: `--a.b value`, `--a.b=value`, `--a.b` and `--no-a.b` for true and false

FlagTable = Mapping[str, tuple[Any, str, str]]
"""A verb's own flags: the type of each, the placeholder for its value in the help, and its help
text."""


def switch(text: str) -> tuple[Any, str, str]:
    """A flag that is true where it is given, and takes no value."""
    return (bool, "", text)


NO_FLAGS: FlagTable = MappingProxyType({})
REPEATED = list[str]
"""The type of a flag that may be given several times: its value is the list of texts."""
_NEGATIVE_NUMBER = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)


class FlagValues(dict[str, Any]):
    """The flags of a verb that were given, by name; as an attribute, one that was not given is
    None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name.replace("_", "-"))


@dataclass(frozen=True)
class Flags:
    """A parsed command line."""

    layer: Layer
    """The settings, and every problem of the whole line."""
    values: FlagValues
    """Values of the verb's own flags that were given and are right."""
    positional: tuple[str, ...]
    """The arguments that are neither a flag nor a flag's value, in order."""


def read_flags(
    argv: Sequence[str],
    verb_flags: FlagTable = NO_FLAGS,
    *,
    max_positional: int = 0,
    ends_at_name: bool = False,
    no_settings: str | None = None,
) -> Flags:
    """Parse a command line; never raises, problems are kept in `layer`.

    `ends_at_name`: the flags end at the first word that is none, the name of a task or script; the
    rest is positional, unchanged. `no_settings`: for a verb that takes no settings of a run, the
    end of the message about one that is given.
    """
    reader = _FlagReader(list(argv), {name: kind for name, (kind, *_) in verb_flags.items()})
    while reader.tokens and not (ends_at_name and not _is_flag(reader.tokens[0])):
        reader.take_one()

    if ends_at_name:
        has_separator = reader.tokens[:1] == ["--"]
        reader.positional = reader.tokens[1:] if has_separator else reader.tokens
        max_positional = len(reader.positional)

    settings = [setting for path, setting in reader.settings.items() if path not in verb_flags]
    unexpected = reader.positional[max_positional:]
    problems = [
        f"{token!r}: unexpected argument; a flag is given as --name value" for token in unexpected
    ]
    problems += reader.problems
    if no_settings is not None:
        problems += [_not_a_flag(setting, verb_flags, no_settings) for setting in settings]
        settings = []

    layer = check_layer(
        settings, besides=frozenset(verb_flags), problems=problems, broken=reader.broken
    )
    return Flags(layer, reader.verb_values, tuple(reader.positional[:max_positional]))


def _not_a_flag(setting: Setting, verb_flags: FlagTable, no_settings: str) -> str:
    if annotation_of(setting.path) is not None:
        return f"{setting.where}: {no_settings}"
    choices = [f"--{name}" for name in verb_flags]
    return f"{setting.where}: unknown flag; {did_you_mean(f'--{setting.path}', choices)}"


class _FlagReader:
    """Walks over the tokens; what it has found so far is in its attributes."""

    def __init__(self, tokens: list[str], verb_types: Mapping[str, Any]) -> None:
        """`verb_types`: the types of the verb's own flags."""
        self.tokens = tokens
        self.verb_types = verb_types
        self.verb_values = FlagValues()
        self.settings: dict[str, Setting] = {}
        self.positional: list[str] = []
        self.problems: list[str] = []
        self.broken: set[str] = set()

    def take_one(self) -> None:
        token = self.tokens.pop(0)
        if not _is_flag(token):
            self.positional.append(token)
            return

        flag, equals, text = ("--help" if token == "-h" else token).partition("=")
        path = flag.removeprefix("--")
        value = text

        try:
            if path.startswith("no-"):
                path = path.removeprefix("no-")
                self._check_can_be_turned_off(flag, path, has_value=bool(equals))
                value = "false"
            elif not equals:
                value = self._value_after(flag, path)
            self._keep(Setting(path, value, where=flag, is_text=True))
        except Mismatch as mismatch:
            self.problems.append(str(mismatch))
            self.broken.add(path)

    def _value_after(self, flag: str, path: str) -> Any:
        following = self.tokens[0] if self.tokens else None
        annotation = self._type_of(path)
        if is_switch(annotation):
            return self.tokens.pop(0) if is_switch(annotation, following or "") else "true"
        if following is not None and not _is_flag(following):
            return self.tokens.pop(0)
        if annotation is None:
            return "true"  # an unknown flag: that it is unknown is reported, and nothing else
        if annotation is UNKNOWN_TYPE:
            return True
        raise Mismatch(missing_value(flag, annotation))

    def _check_can_be_turned_off(self, flag: str, path: str, *, has_value: bool) -> None:
        annotation = self._type_of(path)
        if has_value:
            raise Mismatch(f"{flag}: takes no value; write --{path}=true or --{path}=false")
        if annotation not in (None, UNKNOWN_TYPE) and not is_switch(annotation):
            raise Mismatch(cannot_be_turned_off(flag, path, annotation))

    def _keep(self, setting: Setting) -> None:
        path = setting.path
        if self.verb_types.get(path) == REPEATED:
            self.verb_values.setdefault(path, []).append(setting.value)
            return
        first = self.settings.setdefault(path, setting)
        if first.value != setting.value:
            raise Mismatch(
                f"{setting.where}: given twice, as {first.value!r} and as {setting.value!r}"
            )
        if path in self.verb_types:
            self.verb_values[path] = setting.coerced(self.verb_types[path]).value

    def _type_of(self, path: str) -> Any | None:
        return self.verb_types[path] if path in self.verb_types else annotation_of(path)


def missing_value(flag: str, annotation: Any) -> str:
    return f"{flag}: the value is missing ({describe_type(annotation)})"


def cannot_be_turned_off(flag: str, path: str, annotation: Any) -> str:
    hint = f"; write --{path} none" if is_optional(annotation) else ""
    return f"{flag}: only a true | false setting can be turned off this way{hint}"


def _is_flag(token: str) -> bool:
    return token.startswith("-") and token.strip("-") != "" and not _NEGATIVE_NUMBER.match(token)
