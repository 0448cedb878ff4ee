"""Values and their types: what a file, a flag or a task gives becomes the type that the schema declares, or is refused.

A refusal is a `Mismatch`, whose text completes a message that begins with the name of the setting.
"""

from __future__ import annotations

import collections.abc
import difflib
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from drumline.config.schema import Bounds

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


class Mismatch(Exception):  # noqa: N818 - it never leaves this room; what leaves is a ConfigError
    """A value that does not fit its setting."""


def from_text(annotation: Any, text: str) -> Any:
    """The value that a command-line string stands for."""
    return from_value(annotation, _read(annotation, text))


def from_value(annotation: Any, value: Any) -> Any:
    """A value from a TOML file or from Python code, as the annotated type."""
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Annotated:
        return _within(arguments[1], from_value(arguments[0], value))
    if is_optional(annotation):
        return None if _is_none(value) else from_value(_inner(annotation), value)
    if kind in UNIONS:
        return _scalar(value)
    if kind is Literal:
        return _choice(arguments, value)
    if kind is tuple:
        return _items(arguments, value)
    return _plain(kind, value)


def show(value: Any) -> str:
    """A value as it is shown in a message or in help."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    return repr(value)


def describe(annotation: Any) -> str:
    """What a setting takes, in words."""
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Annotated:
        return f"{describe(arguments[0])} {_limits(arguments[1])}"
    if is_optional(annotation):
        return f"{describe(_inner(annotation))}, or none"
    if kind is Literal:
        return " | ".join(arguments)
    if kind is tuple:
        count = "" if arguments[1] is Ellipsis else f"{len(arguments)} "
        return f"{count}{describe(arguments[0])}, with commas".replace("number", "numbers", 1)
    words = {int: "whole number", float: "number", bool: "true | false", str: "text"}
    return words.get(kind, "text, number or true | false")


def is_optional(annotation: Any) -> bool:
    return get_origin(annotation) in UNIONS and NoneType in get_args(annotation)


def _inner(annotation: Any) -> Any:
    """The X of `X | None`."""
    return next(argument for argument in get_args(annotation) if argument is not NoneType)


def _is_none(value: Any) -> bool:
    # TOML has no null, so "none" is accepted there too: else a file could not undo a task's default.
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _read(annotation: Any, text: str) -> Any:
    """What a TOML file would hold in place of this text; what cannot be parsed stays text: `from_value` refuses it."""
    kind, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if kind is Annotated:
        return _read(arguments[0], text)
    if is_optional(annotation):
        return text if _is_none(text) else _read(_inner(annotation), text)
    if kind in UNIONS:
        return _read_scalar(text)
    if kind is tuple:
        return [_read(arguments[0], part.strip()) for part in text.split(",")]
    if kind is bool:
        return SWITCHES.get(text.lower(), text)
    return _read_number(kind, text) if kind in (int, float) else text


def _read_number(kind: type[int] | type[float], text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        return text


def _read_scalar(text: str) -> Any:
    """An option of the user's own has no declared type: whole number, number, true or false, else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    whole = _read_number(int, text)
    return _read_number(float, text) if whole is text else whole


def _plain(kind: Any, value: Any) -> Any:
    """A number, true or false, or text."""
    if kind is collections.abc.Mapping:
        raise Mismatch(f"{show(value)} is not a table; set its options one by one, each by its own name")
    accepted, described = _PLAIN_KINDS[kind]
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        # Text that could be parsed comes from a file or from Python: on a command line it would have been parsed.
        is_quoted = isinstance(value, str) and not isinstance(_read(kind, value), str)
        raise Mismatch(f"{show(value)} is not {described}{'; write it without quotes' if is_quoted else ''}")
    if kind is float:
        return _finite(value)
    if value == "":
        raise Mismatch(f"{show(value)} is empty")
    return _unicode(value) if kind is str else value


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Mismatch(f"{show(value)} is not a finite number")
    return number


def _unicode(value: str) -> str:
    # Bytes on the command line that are not UTF-8 arrive as lone surrogates, which no TOML file can hold.
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Mismatch(f"{show(value)} is not valid UTF-8 text") from None
    return value


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, float):
        return _finite(value)
    raise Mismatch(f"{show(value)} is not text, a number, true or false")


def _choice(choices: tuple[str, ...], value: Any) -> Any:
    if value in choices:
        return value
    nearest = difflib.get_close_matches(str(value).lower(), choices, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise Mismatch(f"{show(value)} is not one of {', '.join(choices)}{hint}")


def _items(arguments: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise Mismatch(f"{show(value)} is not a list")
    count = None if arguments[1] is Ellipsis else len(arguments)
    if not value or count not in (None, len(value)):
        raise Mismatch(f"{show(value)} must have {count or 'at least 1'} item{'s' if count else ''}")
    try:
        return tuple(from_value(arguments[0], item) for item in value)
    except Mismatch as mismatch:
        raise Mismatch(f"{show(value)}, where {mismatch}") from None


def _within(bounds: Bounds, value: float) -> float:
    is_low = bounds.low is not None and value < bounds.low
    is_high = bounds.high is not None and value > bounds.high
    if is_low or is_high or (bounds.above is not None and value <= bounds.above):
        raise Mismatch(f"{show(value)} must be {_limits(bounds)}")
    return value


def _limits(bounds: Bounds) -> str:
    if bounds.low is not None and bounds.high is not None:
        return f"between {bounds.low:g} and {bounds.high:g}"
    limits = {"above": bounds.above, "at least": bounds.low, "at most": bounds.high}
    return " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
