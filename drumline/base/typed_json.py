"""Reads JSON that another process wrote as dataclasses and TypedDicts: every value must have its
declared type."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from drumline.base.untrusted import parse_json

T = TypeVar("T")


def read_json(kind: type[T], path: Path) -> T | None:
    """What another process wrote to this file; None: it is not there, or is something else."""
    try:
        return from_json(kind, parse_json(path.read_bytes()))
    except (OSError, ValueError):
        return None


def from_json(kind: type[T], value: Any) -> T:
    """A dataclass, from `asdict` of one, a TypedDict, or a NamedTuple, which is a list in JSON.
    Raises ValueError for anything else; names that it does not declare are left out."""
    import msgspec  # not before: most processes do without

    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
