"""Looks once a second whether a rank moves where it marks no phases, from a thread of its own.

A script that knows nothing of the watch, or a loop with torch's own DataLoader, marks none: collectives that begin, and
parameters that change, are the signs that it moves. Marks tell more, and sooner: where there are some, these are left
out.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Hashable
from datetime import timedelta

from drumline.watch.beats.phase import Phase
from drumline.watch.beats.record import BeatWriter

EVERY_S = 1.0
AFTER_PATIENCE_S = 90.0
"""torch's own timeouts name nobody: they are to come so long after the watchdog, which needs some seconds."""


class CollectiveCount:
    """Runs until it is closed. torch is never loaded from here."""

    def __init__(
        self,
        beat: BeatWriter,
        *,
        patience_s: float | None = None,
        sign: Callable[[], Hashable] = lambda: None,
        also: Callable[[], None] = lambda: None,
        every_s: float = EVERY_S,
    ) -> None:
        """`patience_s`: how long the watchdog waits; no group of torch may time out before. `sign`: what else changes
        when this rank moves. `also`: what else this thread does as often."""
        self._beat = beat
        self._patience_s = patience_s
        self._sign, self._also = sign, also
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drumline-collectives", daemon=True)
        self._thread.start()
        # A thread that is in torch when Python goes down may end the process by SIGABRT.
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._over.set()
        self._thread.join(timeout=self._every_s)

    def _run(self) -> None:
        begun, sign, marks = None, None, 0
        while not self._over.wait(self._every_s):
            last, marked = (begun, sign), marks
            begun, sign, marks = collectives_begun(), self._sign_after(sign), self._beat.marks
            if (begun, sign) != last and marks == marked:
                self._beat.move(begun)
                if not marks:
                    self._beat.mark(Phase.USER)
                    marks = self._beat.marks
            if self._patience_s is not None:
                outlast(self._patience_s + AFTER_PATIENCE_S)
            with contextlib.suppress(Exception):
                self._also()

    def _sign_after(self, last: Hashable) -> Hashable:
        try:
            return self._sign()
        except Exception:  # the main thread was changing what is looked at: the next second tells
            return last


def collectives_begun() -> int | None:
    """As the backend counts them; None where there is no group."""
    dist = sys.modules.get("torch.distributed")
    try:
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return None
        return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())
    except (AttributeError, RuntimeError, ValueError):  # torch is being loaded, or the group taken down
        return None


def outlast(timeout_s: float) -> None:
    """Raise the timeout of every group that has a shorter one: it holds for collectives that begin from now on."""
    dist = sys.modules.get("torch.distributed")
    wanted = timedelta(seconds=timeout_s)
    try:
        groups = [] if dist is None else list(dist.distributed_c10d._world.pg_map)
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        for backend in backends:
            if backend.options._timeout < wanted:
                backend._set_default_timeout(wanted)
    except (AttributeError, RuntimeError, ValueError):
        return  # as above, or a backend without a timeout
