"""The settings as a flat table by dotted path (`optim.lr`), the values each takes, and what a
misspelt path means.

Flags, files, rules and help work on this table, so a setting is added in schema.py alone. A value
that does not fit is a `Mismatch`, whose text completes a message that begins with the name of the
setting.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from drumline.config.schema import (
    EXPERIMENT,
    SECTION_SCOPES,
    Bounds,
    Config,
    OrClass,
    SettingScope,
    SwitchOr,
)


@dataclass(frozen=True)
class Field:
    """What is declared of one setting."""

    annotation: Any
    default: Any
    scope: SettingScope = EXPERIMENT
    other_names: tuple[str, ...] = ()

    @property
    def is_table(self) -> bool:
        """Whether it holds named options of the user, each set separately."""
        return get_origin(self.annotation) is collections.abc.Mapping


SECTIONS: Mapping[str, type[Any]] = {
    name: cls
    for name, cls in get_type_hints(Config).items()
    if isinstance(cls, type) and dataclasses.is_dataclass(cls)
}
"""The dataclass of each section, in the order of the schema."""


def _fields_of_schema() -> Iterator[tuple[str, Field]]:
    for section, cls in SECTIONS.items():
        hints = get_type_hints(cls, include_extras=True)
        defaults = cls()
        for field in dataclasses.fields(cls):
            yield (
                f"{section}.{field.name}",
                Field(
                    hints[field.name],
                    getattr(defaults, field.name),
                    field.metadata.get("scope") or SECTION_SCOPES.get(section, EXPERIMENT),
                    field.metadata.get("other_names", ()),
                ),
            )


FIELDS: Mapping[str, Field] = dict(_fields_of_schema())
"""Every setting, in the order of the schema."""

TASK_SECTION = "task"
"""The section of a task's own settings: what it holds is known once the task is loaded
(`task_fields`)."""
UNKNOWN_TYPE: Any = object()
"""The type of such a setting until then."""

OTHER_NAMES = {name: path for path, field in FIELDS.items() for name in field.other_names}
"""The setting that each name of other tools means."""

SWITCHES: Mapping[str, bool] = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
UNIONS = (Union, UnionType)
_PLAIN_KINDS: Mapping[Any, tuple[Any, str]] = {
    int: (int, "a whole number"),
    float: (int | float, "a number"),
    bool: (bool, "true or false"),
    str: (str, "text"),
}


def annotation_of(path: str) -> Any | None:
    """The type of a setting, or of one option inside a table (`model.options.hidden`); None: no
    such setting."""
    if path in FIELDS:
        return FIELDS[path].annotation
    if is_in_task(path):
        return UNKNOWN_TYPE
    for table, field in FIELDS.items():
        if field.is_table and path.startswith(f"{table}."):
            return get_args(field.annotation)[1]
    return None


def name_in_task(path: str) -> str:
    return path.removeprefix(f"{TASK_SECTION}.")


def is_in_task(path: str) -> bool:
    return path.startswith(f"{TASK_SECTION}.")


def scope_of(path: str) -> SettingScope:
    """The scope of a setting. A task's own settings and the options inside a table are part of the
    experiment."""
    field = FIELDS.get(path)
    return EXPERIMENT if field is None else field.scope


def nearest(path: str, *, besides: Collection[str] = ()) -> tuple[str, ...]:
    """The settings (or other names, `besides`) that a misspelt path is closest to; several only
    when they tie."""
    path = path.replace("-", "_").lower()
    section, _, name = path.rpartition(".")
    anywhere = {setting.partition(".")[2]: setting for setting in FIELDS}
    in_section = {
        setting.partition(".")[2]: setting
        for setting in FIELDS
        if setting.startswith(f"{section}.")
    }
    guesses = (
        _closest(path, FIELDS, cutoff=0.85),
        [setting for setting in FIELDS if setting.endswith(f".{name}")],
        [OTHER_NAMES[name]] if name in OTHER_NAMES else [],
        [] if section else _closest(name, besides, cutoff=0.7),
        [in_section[near] for near in _closest(name, in_section, cutoff=0.6)],
        [anywhere[near] for near in _closest(name, anywhere, cutoff=0.75)],
    )
    return tuple(next(filter(None, guesses), []))


def _closest(name: str, choices: Collection[str], *, cutoff: float) -> list[str]:
    return difflib.get_close_matches(name, choices, n=1, cutoff=cutoff)


def unknown_setting(path: str, *, besides: Collection[str] = ()) -> str:
    """The end of a message about a setting that does not exist."""
    if suggestions := nearest(path, besides=besides):
        return f"unknown setting; did you mean {' or '.join(map(repr, suggestions))}?"
    section = path.partition(".")[0]
    if section in SECTIONS:
        names = [field.name for field in dataclasses.fields(SECTIONS[section])]
        return f"unknown setting; {section} has {', '.join(names)}"
    return f"unknown setting; settings are named SECTION.NAME, with a section of {', '.join([*SECTIONS, TASK_SECTION])}"


class Mismatch(Exception):  # noqa: N818 - it never leaves this package; what leaves is a ConfigError
    """A value that does not fit its setting."""


def from_text(annotation: Any, text: str) -> Any:
    """The value that a command-line string stands for."""
    return from_value(annotation, _read(annotation, text))


def _parts(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """What it is, and of what: `tuple[int, ...]` is a tuple, of int and an ellipsis."""
    return get_origin(annotation) or annotation, get_args(annotation)


def from_value(annotation: Any, value: Any) -> Any:
    """A value from a TOML file or from Python code, as the annotated type."""
    kind, arguments = _parts(annotation)
    if kind is Annotated and isinstance(arguments[1], OrClass):
        is_class = isinstance(value, str) and bool(re.search(r"[.:]", value))
        return from_value(str, value) if is_class else _choice(arguments[1].choices, value)
    if form := _switch_form(annotation):
        return _switch_or_text(form, value)
    if kind is Annotated:
        return _within(arguments[1], from_value(arguments[0], value))
    if is_optional(annotation):
        # TOML has no null, so "none" is accepted there too; otherwise a file could not unset a
        # task's default.
        is_none = value is None or (isinstance(value, str) and value.lower() == "none")
        return None if is_none else from_value(without_none(annotation), value)
    if kind in UNIONS:
        return _scalar(value)
    if kind is Literal:
        return _choice(arguments, value)
    if kind is tuple:
        return _items(arguments, value)
    return _plain(kind, value)


def show_value(value: Any) -> str:
    """A value as it is shown in a message or in help."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(show_value, value))}]"
    return repr(value)


def flag_text(value: Any) -> str:
    """A value as a flag takes it."""
    if isinstance(value, list | tuple):
        return ",".join(map(flag_text, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def describe_type(annotation: Any) -> str:
    """What a setting takes, in words."""
    kind, arguments = _parts(annotation)
    if kind is Annotated and isinstance(arguments[1], OrClass):
        return " | ".join(arguments[1].choices)
    if form := _switch_form(annotation):
        return form.form
    if kind is Annotated:
        return f"{describe_type(arguments[0])} {_limits(arguments[1])}"
    if is_optional(annotation):
        return f"{describe_type(without_none(annotation))}, or none"
    if kind is Literal:
        return " | ".join(arguments)
    if kind is tuple:
        if get_origin(arguments[0]) is Literal:
            return f"some of {', '.join(get_args(arguments[0]))}"
        count = "" if arguments[1] is Ellipsis else f"{len(arguments)} "
        return f"{count}{describe_type(arguments[0])}, with commas".replace("number", "numbers", 1)

    plain_kinds = {int: "whole number", float: "number", bool: "true | false", str: "text"}
    return plain_kinds.get(kind, "text, number or true | false")


def is_switch(annotation: Any, text: str | None = None) -> bool:
    """Whether a flag of this type needs no value: without one it is true. `text`: whether this may
    be its value."""
    form = _switch_form(annotation)
    if annotation is not bool and form is None:
        return False
    if text is None or text.lower() in SWITCHES:
        return True
    return form is not None and _text_of(form, text) is not None


def switch_word(annotation: Any, value: Any) -> str | None:
    """The word that this type has for true or false; None: it has none."""
    form = _switch_form(annotation)
    words = {} if form is None else {on: word for word, on in form.switches.items()}
    return words.get(value) if isinstance(value, bool) else None


def is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in UNIONS and NoneType in get_args(annotation)


def _switch_form(annotation: Any) -> SwitchOr | None:
    metadata = getattr(annotation, "__metadata__", ())
    return next((form for form in metadata if isinstance(form, SwitchOr)), None)


def without_none(annotation: Any) -> Any:
    """The X of `X | None`; any other type as it is."""
    if not is_optional(annotation):
        return annotation
    return next(argument for argument in get_args(annotation) if argument is not NoneType)


def _read(annotation: Any, text: str) -> Any:
    """The value that a TOML file would have for this text; text that cannot be parsed is refused by
    `from_value`."""
    kind, arguments = _parts(annotation)
    if is_optional(annotation) and text.lower() == "none":
        return text
    if _switch_form(annotation):
        return text
    if kind is Annotated:
        return _read(arguments[0], text)
    if is_optional(annotation):
        return _read(without_none(annotation), text)
    if kind is tuple:
        return [_read(arguments[0], part.strip()) for part in text.split(",")]

    # A user's option has no declared type: true or false, a whole number, a number, otherwise text.
    has_no_type = kind in UNIONS
    if kind is bool or (has_no_type and text.lower() in ("true", "false")):
        return SWITCHES.get(text.lower(), text)

    for number in (int, float):
        if kind is number or has_no_type:
            with contextlib.suppress(ValueError):
                return number(text)

    return text


def _plain(kind: Any, value: Any) -> Any:
    """A number, true or false, or text."""
    if kind is collections.abc.Mapping:
        raise Mismatch(
            f"{show_value(value)} is not a table; set its options one by one, each by its own name"
        )

    accepted, described = _PLAIN_KINDS[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        # Text that could be parsed comes from a file or from Python: on a command line it would
        # have been parsed.
        is_quoted = isinstance(value, str) and not isinstance(_read(kind, value), str)
        hint = "; write it without quotes" if is_quoted else ""
        raise Mismatch(f"{show_value(value)} is not {described}{hint}")
    if value == "":
        raise Mismatch("'' is empty")
    return kind(_scalar(value))


def _scalar(value: Any) -> Any:
    if not isinstance(value, str | int | float):
        raise Mismatch(f"{show_value(value)} is not text, a number, true or false")
    if isinstance(value, str):
        # Bytes on the command line that are not UTF-8 arrive as lone surrogates, which no TOML file
        # can hold.
        if value.encode(errors="ignore").decode() != value:
            raise Mismatch(f"{show_value(value)} is not valid UTF-8 text")
    elif not abs(value) <= sys.float_info.max:
        raise Mismatch(f"{show_value(value)} is not a finite number")
    return value


def _choice(choices: tuple[str, ...], value: Any) -> Any:
    if value in choices:
        return value
    near = _closest(str(value).lower(), choices, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise Mismatch(f"{show_value(value)} is not one of {', '.join(choices)}{hint}")


def _items(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Mismatch(f"{show_value(value)} is not a list")
    count = None if arguments[1] is Ellipsis else len(arguments)
    if not value or count not in (None, len(value)):
        needed = f"{count} items" if count else "at least 1 item"
        raise Mismatch(f"{show_value(value)} must have {needed}")
    try:
        return tuple(from_value(arguments[0], item) for item in value)
    except Mismatch as mismatch:
        raise Mismatch(f"{show_value(value)}, where {mismatch}") from None


def _switch_or_text(form: SwitchOr, value: Any) -> bool | str:
    chosen = _text_of(form, str(value).lower())
    if chosen is None:
        raise Mismatch(f"{show_value(value)} is not {form.form}")
    return chosen


def _text_of(form: SwitchOr, text: str) -> bool | str | None:
    """None: it is neither true nor false, and has another form."""
    switches = {**SWITCHES, **form.switches}
    if text in switches:
        return switches[text]
    return text if re.fullmatch(form.pattern, text) else None


def _within(bounds: Bounds, value: float) -> float:
    is_low = bounds.low is not None and value < bounds.low
    is_high = bounds.high is not None and value > bounds.high
    if is_low or is_high or (bounds.above is not None and value <= bounds.above):
        raise Mismatch(f"{show_value(value)} must be {_limits(bounds)}")
    return value


def _limits(bounds: Bounds) -> str:
    if bounds.above is not None:
        return f"above {_limit(bounds.above)}"
    if bounds.high is None:
        return f"at least {_limit(bounds.low)}"
    return f"between {_limit(bounds.low)} and {_limit(bounds.high)}"


def _limit(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


# The settings of a task

PLAIN_TYPES = (int, float, bool, str)


def task_fields(task: type[Any], base: type[Any]) -> dict[str, Field]:
    """The settings of a task by path, those that it inherits first. Names of `base`, which is
    Drumline's, names with an underscore and other types are no settings."""
    fields = {}
    taken = {*dir(base), *_annotations(base), "config"}
    for cls in reversed(task.__mro__):
        if not issubclass(cls, base) or cls.__module__.startswith("drumline."):
            continue
        for name, declared in _annotations(cls).items():
            annotation = _evaluated(declared, cls)
            is_own = not name.startswith("_") and name not in taken
            if is_own and hasattr(task, name) and _is_setting_type(annotation):
                fields[f"{TASK_SECTION}.{name}"] = Field(annotation, getattr(task, name))
    return fields


def _annotations(cls: type[Any]) -> dict[str, Any]:
    # a name that only type checkers import must not end the run
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)


def _evaluated(annotation: Any, cls: type[Any]) -> Any:
    """The type that an annotation names. Not by get_type_hints, which fails for all if one is
    unknown at run time."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[cls.__module__]), dict(vars(cls)))  # noqa: S307 - the user's own code
    except Exception:
        return None


def _is_setting_type(annotation: Any) -> bool:
    kind, arguments = _parts(annotation)
    if kind is Annotated:
        return isinstance(arguments[1], Bounds) and _is_setting_type(arguments[0])
    if kind in UNIONS:
        inner = [argument for argument in arguments if argument is not NoneType]
        is_scalar = len(inner) == len(arguments) and all(
            argument in PLAIN_TYPES for argument in inner
        )
        return is_scalar or (len(inner) == 1 and _is_setting_type(inner[0]))
    if kind is Literal:
        return all(isinstance(argument, str) for argument in arguments)
    if kind is tuple:
        alike = {argument for argument in arguments if argument is not Ellipsis}
        return len(arguments) > 1 and len(alike) == 1 and alike.pop() in PLAIN_TYPES
    return kind in PLAIN_TYPES
