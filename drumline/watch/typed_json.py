"""Reads JSON that another process wrote as dataclasses and TypedDicts: every value must have its declared type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints, is_typeddict

T = TypeVar("T")


def from_json(kind: type[T], value: Any) -> T:
    """A dataclass, from `asdict` of one, or a TypedDict. Raises TypeError, KeyError, ValueError or AttributeError for
    anything else."""
    read: Callable[[Any], T] = _reader(cast(Any, kind))
    return read(value)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        fields = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
        return lambda value: {**value, **{name: read(value[name]) for name, read in fields.items()}}
    if hasattr(kind, "__dataclass_fields__"):
        fields = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
        return lambda value: kind(**{name: fields[name](one) for name, one in value.items()})
    if NoneType in arguments:
        read = _reader(arguments[0])
        return lambda value: None if value is None else read(value)
    if origin is Mapping:
        of_key, of_value = int if arguments[0] is int else _reader(arguments[0]), _reader(arguments[1])
        return lambda value: {of_key(key): of_value(one) for key, one in value.items()}
    if origin is list or arguments[1:] == (...,):
        of_item = _reader(arguments[0])
        return lambda value: origin(map(of_item, _checked(list | tuple, value)))
    if origin is tuple:
        readers = [_reader(one) for one in arguments]
        return lambda value: tuple(read(one) for read, one in zip(readers, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    return lambda value: value if kind is Any else _checked(int | float if kind is float else kind, value)


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r} is not of type {kind}")
    return value
