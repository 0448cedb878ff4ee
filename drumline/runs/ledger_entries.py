"""The entries of the sample ledger: which positions of an epoch's order a rank has trained on,
run-length encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class LedgerEntry(NamedTuple):
    """`steps` steps of one rank: in the first it had the positions [low, high), then each time
    `stride` further."""

    epoch: int
    low: int
    high: int
    stride: int
    """How many samples the global batch had."""
    steps: int

    def slice(self, first: int, steps: int) -> LedgerEntry:
        """The part of this entry with `steps` steps from its `first`-th (counted from 0) on."""
        moved = first * self.stride
        return self._replace(low=self.low + moved, high=self.high + moved, steps=steps)


def num_steps(entries: Iterable[LedgerEntry]) -> int:
    """How many steps there are in consecutive entries."""
    return sum(entry.steps for entry in entries)


def from_json(value: Any) -> list[LedgerEntry]:
    """The entries in a JSON value; a ValueError if a ledger cannot have written it."""
    if not isinstance(value, list):
        raise ValueError("it is not a list of entries")
    entries = []
    for numbers in value:
        if not isinstance(numbers, Sequence) or len(numbers) != 5:
            raise ValueError(f"{numbers!r} is not a ledger entry")
        if not all(type(number) is int for number in numbers):
            raise ValueError(f"{numbers!r} holds more than whole numbers")
        entry = LedgerEntry(*numbers)
        are_positions = 0 <= entry.low <= entry.high
        if not are_positions or entry.epoch < 0 or entry.stride < 1 or entry.steps < 1:
            raise ValueError(f"{numbers!r} is out of range for a ledger entry")
        entries.append(entry)
    return entries
