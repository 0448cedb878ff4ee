"""How ranks agree on the step after which all of them stop: through the store, without a
collective.

A collective would need every rank to call it at the same step, which they do not know yet. So a
thread of each rank (the watcher, see `training/between_steps/preemption.py`) uses the store, and
answers even while its rank is busy:

1. One writes `request`. All read it, and write their rank's current step.
2. Rank 0 proposes the step after the largest. Each rank gets ready to stop there, then writes its
   current step again. A rank that reaches the step before all have written waits.
3. If all were before it, it is decided. Otherwise rank 0 proposes a later step, twice as far ahead.

The decision is one key that can be set once, so two ranks never act on different ones, even if some
give up meanwhile.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from drumline.rank.sealed_store import SealedStore

CANCELLED = "cancelled"

# A rank whose thread writes nothing for this long is lost or unreachable: then no rank can save.
PATIENCE_S = 60.0
LITTLE_PATIENCE_S = 10.0


@dataclass(eq=False)
class StopVote:
    """One rank's part. The watcher calls `tick` repeatedly, the training loop `stops_at`."""

    store: SealedStore
    """The watcher's own connection."""

    rank: int
    world_size: int
    step: Callable[[], int]
    """The number of steps that this rank has done."""

    stop: int | None = None
    """The step that is proposed or decided: the only thing that the loop reads after every
    step."""

    cause: dict[str, Any] | None = None
    """Which rank was asked to stop, and by what, from the request."""

    is_decided: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _has_begun: bool = False
    _round: int = 0
    _patient_until: float = math.inf

    def __post_init__(self) -> None:
        self.store = self.store.under("preemption")

    def begin(self) -> None:
        """Called by the loop before its first step."""
        self._has_begun = True

    def request(self, cause: dict[str, Any], *, in_a_hurry: bool = False) -> None:
        """Ask all ranks to stop. The first to ask is the cause, however many do."""
        if in_a_hurry:
            self._patient_until = time.monotonic() + LITTLE_PATIENCE_S
        self.store.compare_set("request", "", json.dumps(cause))

    def tick(self) -> bool:
        """Do what is due now. True: more is due soon."""
        if self.is_decided:
            return False
        if self.cause is None:
            if (request := self.store.peek("request")) is not None:
                self._join(request)
            return self.cause is not None

        if (proposal := self.store.peek(f"proposal/{self._round}")) is not None:
            self._answer(int(proposal))
        if self.rank == 0:
            self._lead()
        if time.monotonic() > self._patient_until:
            self.store.compare_set("decision", "", CANCELLED)

        if (decision := self.store.peek("decision")) is not None:
            with self._changed:
                self.stop = None if decision.decode() == CANCELLED else int(decision)
                self.is_decided = True
                self._changed.notify_all()

        return not self.is_decided

    def stops_at(self, step: int) -> bool:
        """Whether the loop stops at the end of this step. Waits while that is being decided."""
        with self._changed:
            while self.stop is not None and step >= self.stop and not self.is_decided:
                self._changed.wait()
            return self.stop is not None and step >= self.stop

    def missing_ranks(self) -> list[int]:
        """Ranks that have not written their step."""
        ranks = range(self.world_size)
        return [
            rank for rank in ranks if not self.store.check([f"position/{self._round}/{rank}"])
        ] or [0]

    def abandon(self) -> None:
        """The store is lost: nothing will be decided, and the loop continues."""
        with self._changed:
            if not self.is_decided:
                self.is_decided = True
                self.stop = None
            self._changed.notify_all()

    def _join(self, request: bytes) -> None:
        """Take part: write this rank's current step."""
        self._patient_until = min(self._patient_until, time.monotonic() + PATIENCE_S)
        self.cause = json.loads(request)
        self.store.set(f"position/0/{self.rank}", str(self._position()))

    def _answer(self, proposal: int) -> None:
        """Get ready to stop at the proposed step, and write the current one again."""
        with self._changed:
            # Set this before the position: the loop counts its step, then reads this. So one of the
            # two sees the other.
            self.stop = proposal
            self._changed.notify_all()

        self._round += 1
        self.store.set(f"position/{self._round}/{self.rank}", str(self._position()))

    def _lead(self) -> None:
        """On rank 0: decide, or propose a later step, when all have written theirs."""
        keys = [f"position/{self._round}/{rank}" for rank in range(self.world_size)]
        if (positions := self.store.peek_all(keys)) is None:
            return

        foremost = max(map(int, positions))
        if self.stop is not None and foremost < self.stop:
            self.store.compare_set("decision", "", str(self.stop))
        elif not self.store.check([f"proposal/{self._round}"]):
            self.store.set(f"proposal/{self._round}", str(foremost + (1 << self._round)))

    def _position(self) -> int:
        """The last step after which this rank may have continued."""
        return self.step() if self._has_begun else self.step() - 1
