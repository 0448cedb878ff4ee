"""What a rank reports of the script that it runs, for the leader to compare: plain values that go through JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """A DataLoader, when it was first iterated over."""

    batches: int | None = None
    """Its length; None where it has none, or where it may differ: no gradients, or uneven inputs (Join)."""
    samples: int | None = None
    """Of the dataset, where every rank has all of it and its sampler takes a part."""


@dataclass(frozen=True, kw_only=True)
class ModuleHashes:
    """The parameters of a DDP module at a step."""

    tensors: Mapping[str, tuple[str, int]]
    """By name: type and shape, and the hash."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of their optimizer: `SGD's lr`."""


@dataclass(frozen=True, kw_only=True)
class ModuleReport:
    """A DDP module. Its group and its number among the modules of that group identify it on all ranks."""

    name: str
    ranks: tuple[int, ...]
    hashes: Mapping[int, ModuleHashes] = field(default_factory=dict)
    """By step, the latest ones; 0: at its construction."""


@dataclass(frozen=True, kw_only=True)
class ScriptReport:
    """Of one rank."""

    owner: Mapping[str, Any]
    """Its `host`, `rank`, `local_rank` and `node_rank`."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By group: `arguments`, `variables`, `packages` and `script`; empty until the process group is there."""
    loaders: Mapping[str, LoaderReport] = field(default_factory=dict)
    """By the place where they are iterated over: `train.py:42`."""
    modules: Mapping[str, ModuleReport] = field(default_factory=dict)


def script_report_from_json(record: Mapping[str, Any]) -> ScriptReport:
    """From `asdict` of one. Raises TypeError, KeyError, ValueError or AttributeError for anything else."""
    return ScriptReport(
        owner=dict(record["owner"]),
        facts={group: dict(values) for group, values in record["facts"].items()},
        loaders={place: LoaderReport(**one) for place, one in record["loaders"].items()},
        modules={key: _module(one) for key, one in record["modules"].items()},
    )


def _module(record: Mapping[str, Any]) -> ModuleReport:
    hashes = {
        int(step): ModuleHashes(
            tensors={name: (str(kind), int(value)) for name, (kind, value) in one["tensors"].items()},
            settings=dict(one["settings"]),
        )
        for step, one in record["hashes"].items()
    }
    return ModuleReport(name=str(record["name"]), ranks=tuple(map(int, record["ranks"])), hashes=hashes)
