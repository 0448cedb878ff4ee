"""How far each shape of a step is from its graph: first it is taken some times, then watched once, then captured."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

# DDP times its first ten backward passes with events, which cannot be captured.
STEPS_BEFORE = 11
# Of one shape: libraries choose their kernels, the compiler compiles.
STEPS_OF_A_SHAPE = 3

Stage = Literal["take", "watch", "capture"]


class ShapesSeen:
    """Counts the steps of each shape, as long as it has no graph."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_seen: dict[Hashable, int] = {}
        self._watched: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._num_seen

    def __len__(self) -> int:
        return len(self._num_seen)

    def next_stage(self, key: Hashable) -> Stage:
        """What is to be done with a step of this shape. No shape is captured that was not watched before."""
        if key in self._watched:
            return "capture"
        self._num_steps += 1
        self._num_seen[key] = self._num_seen.get(key, 0) + 1
        if self._num_seen[key] < STEPS_OF_A_SHAPE or self._num_steps < STEPS_BEFORE:
            return "take"
        self._watched.add(key)
        return "watch"
