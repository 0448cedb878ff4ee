"""What a rank notes of the script that it runs, for the sidecars to compare: plain values that go through JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoaderNote:
    """A DataLoader, when it was first iterated over."""

    batches: int | None = None
    """Its length; None where it has none, or where it may differ: no gradients, or uneven inputs (Join)."""
    samples: int | None = None
    """Of the dataset, where every rank has all of it and its sampler takes a part."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """The parameters of a DDP module at a step."""

    tensors: Mapping[str, tuple[str, int]]
    """By name: type and shape, and the hash."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of their optimizer: `SGD's lr`."""


@dataclass(frozen=True, kw_only=True)
class ModuleNote:
    """A DDP module. It is known to all by its group and its number among the modules of that group."""

    name: str
    ranks: tuple[int, ...]
    held: Mapping[int, Held] = field(default_factory=dict)
    """By step, the latest ones; 0: at its construction."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """Of one rank."""

    owner: Mapping[str, Any]
    """Its `host` and its numbers: see arguments.is_own."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By group; empty until the process group is there."""
    loaders: Mapping[str, LoaderNote] = field(default_factory=dict)
    """By the place where they are iterated over: `train.py:42`."""
    modules: Mapping[str, ModuleNote] = field(default_factory=dict)


def note_from_json(record: Mapping[str, Any]) -> Note:
    """Raises TypeError, KeyError, ValueError or AttributeError for what is no such record."""
    return Note(
        owner=dict(record["owner"]),
        facts={group: dict(values) for group, values in record["facts"].items()},
        loaders={place: LoaderNote(**one) for place, one in record["loaders"].items()},
        modules={key: _module(one) for key, one in record["modules"].items()},
    )


def _module(record: Mapping[str, Any]) -> ModuleNote:
    held = {
        int(step): Held(
            tensors={name: (str(kind), int(value)) for name, (kind, value) in one["tensors"].items()},
            settings=dict(one["settings"]),
        )
        for step, one in record["held"].items()
    }
    return ModuleNote(name=str(record["name"]), ranks=tuple(map(int, record["ranks"])), held=held)
