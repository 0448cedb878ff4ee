"""Questions that lead back to themselves: names that are made of one another, functions that call in a ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Found = TypeVar("Found")
NOT_CUT = 1_000_000
NO_LIMIT = 1_000_000_000


@dataclass(eq=False)
class Asked:
    """What is known of one kind of question, and which of them are being asked."""

    deepest: int = NO_LIMIT
    """How many questions may be asked within one another."""
    farthest: int = NO_LIMIT
    """After how many a question that leads on and on is given up."""
    far: int = NO_LIMIT
    """After how many the answers on the way were too hard to find to be forgotten."""
    known: dict[object, Any] = field(default_factory=dict)
    _for_now: dict[object, Any] = field(default_factory=dict)
    _depths: dict[object, int] = field(default_factory=dict)
    _cut: int = NOT_CUT
    _num_looked: int = 0

    def once(self, key: object, find: Callable[[], Found], meanwhile: Found) -> Found:
        """What was found before; whoever asks while it is being looked for gets something to go on with.

        What was found with such an answer in it is good enough for the question that was asked first, and forgotten
        after it, unless it was hard to find; the answer to the question itself is whole. A question that leads too
        far is given up.
        """
        found: Found
        if key in self.known:
            found = self.known[key]
            return found
        if key in self._for_now:
            self._cut = 0
            found = self._for_now[key]
            return found
        depths = self._depths
        if not depths:
            self._begin()
        if key in depths or len(depths) > self.deepest or self._num_looked > self.farthest:
            self._cut = min(self._cut, depths.get(key, 0))
            return meanwhile
        depth = depths[key] = len(depths)
        self._num_looked += 1
        try:
            found = find()
        finally:
            del depths[key]
        self._keep(key, found, depth)
        return found

    def _keep(self, key: object, found: object, depth: int) -> None:
        if self._cut >= depth:
            self.known[key] = found
            self._cut = NOT_CUT
        else:
            self._for_now[key] = found
        if depth == 0:
            if self._num_looked > self.far:
                self.known.update(self._for_now)
            self._for_now.clear()

    def _begin(self) -> None:
        """A new question; the last one may have ended in an error."""
        self._for_now.clear()
        self._cut = NOT_CUT
        self._num_looked = 0
