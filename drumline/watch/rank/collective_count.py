"""Looks once a second how many collectives a script's default group has begun, from a thread of its own.

A script that knows nothing of the watch marks no phases: that this number moves is the only sign that it does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from drumline.watch.beats.phase import Phase
from drumline.watch.beats.record import BeatWriter

EVERY_S = 1.0


class CollectiveCount:
    """Runs until it is closed. torch is never loaded from here."""

    def __init__(
        self, beat: BeatWriter, *, every_s: float = EVERY_S, also: Callable[[], None] = lambda: None
    ) -> None:
        """`also`: what else this thread does as often."""
        self._beat = beat
        self._also = also
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drumline-collectives", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=self._every_s)

    def _run(self) -> None:
        last: int | None = None
        while not self._over.wait(self._every_s):
            number = collectives_begun()
            if number != last and number is not None:
                last = number
                self._beat.count_collectives(number)
                self._beat.mark(Phase.USER)
            self._also()


def collectives_begun() -> int | None:
    """As the backend counts them; None where there is no group."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, ValueError):  # torch is being loaded, or the group taken down
        return None
