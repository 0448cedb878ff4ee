"""Reads JSON that another process wrote as dataclasses and TypedDicts: every value must have its
declared type."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints, is_typeddict

from drumline.base.untrusted import parse_json

T = TypeVar("T")
# An int is a float too.
_PLAIN = {int: int, str: str, bool: bool, float: int | float}
_fields = cache(get_type_hints)


def read_json(kind: type[T], path: Path) -> T | None:
    """What another process wrote to this file; None: it is not there, or is something else."""
    try:
        return from_json(kind, parse_json(path.read_bytes()))
    except (OSError, ValueError):
        return None


def from_json(kind: type[T], value: Any) -> T:
    """A dataclass, from `asdict` of one, a TypedDict, or a NamedTuple, which is a list in JSON.
    Raises ValueError for anything else."""
    try:
        return cast(T, _read(kind, value))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _read(kind: Any, value: Any) -> Any:
    if kind in _PLAIN:
        return _checked(_PLAIN[kind], value)
    if is_typeddict(kind):
        return {**value, **{name: _read(hint, value[name]) for name, hint in _fields(kind).items()}}
    if hasattr(kind, "__dataclass_fields__"):
        hints = _fields(kind)
        return kind(**{name: _read(hints[name], item) for name, item in value.items()})
    if (origin := get_origin(kind)) is not None:
        return _read_parts(kind, origin, get_args(kind), value)
    if kind is Any:
        return value
    if hasattr(kind, "_fields"):
        hints = _fields(kind)
        return kind(
            *(_read(hints[name], part) for name, part in zip(kind._fields, value, strict=True))
        )
    return kind(value) if issubclass(kind, Enum) else _checked(kind, value)


def _read_parts(kind: Any, origin: Any, arguments: tuple[Any, ...], value: Any) -> Any:
    if NoneType in arguments:
        assert len(arguments) == 2, f"{kind} has more than one type besides None"
        return None if value is None else _read(arguments[0], value)
    if origin is Mapping:
        key_kind, item_kind = arguments
        # JSON has no other keys than texts.
        read_key = int if key_kind is int else partial(_read, key_kind)
        return {read_key(key): _read(item_kind, item) for key, item in value.items()}
    if origin is list or arguments[1:] == (...,):
        return origin(_read(arguments[0], item) for item in _checked(list | tuple, value))
    assert origin is tuple, kind
    return tuple(_read(part_kind, part) for part_kind, part in zip(arguments, value, strict=True))


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is not of type {kind}")
    return value
