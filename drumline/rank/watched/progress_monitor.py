"""A thread that checks once a second whether a rank that marks no phases makes progress, by its
collectives and changes of its parameters."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

from drumline.watch.heartbeat import HeartbeatWriter, Phase

EVERY_S = 1.0
AFTER_PATIENCE_S = 90.0
"""torch's own timeouts name no rank: they must be this much longer than the watchdog's."""


class ProgressMonitor:
    """Runs until it is closed. It never loads torch."""

    def __init__(
        self,
        heartbeat: HeartbeatWriter,
        *,
        patience_s: float | None = None,
        sign: Callable[[], Hashable] = lambda: None,
        also: Callable[[], None] = lambda: None,
        every_s: float = EVERY_S,
    ) -> None:
        """`patience_s`: how long the watchdog waits; no process group may time out before. `sign`:
        another value that changes with progress. `also`: another call for this thread, as often."""
        self._heartbeat = heartbeat
        self._patience_s = patience_s
        self._sign = sign
        self._also = also
        self._every_s = every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="drumline-progress", daemon=True)
        self._thread.start()

        # A thread that is in torch when Python exits may end the process by SIGABRT.
        atexit.register(self.close)

    def close(self) -> None:
        """End the thread, before torch or Python do."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(timeout=self._every_s)

    def _run(self) -> None:
        """The thread: look once in a while until it is closed."""
        count = None
        sign = None

        marks = 0
        while not self._closed.wait(self._every_s):
            last = (count, sign)
            last_marks = marks
            count = num_collectives()

            # The main thread may be changing what is read: it is read again in a second.
            with contextlib.suppress(Exception):
                sign = self._sign()

            marks = self._heartbeat.num_marks

            # marks say more, and sooner
            if (count, sign) != last and marks == last_marks:
                self._heartbeat.move(count)
                if not marks:
                    self._heartbeat.mark(Phase.USER)
                    marks = self._heartbeat.num_marks

            # A group may be destroyed meanwhile, or its backend have no timeout.
            with contextlib.suppress(AttributeError, RuntimeError, ValueError):
                if self._patience_s is not None and count is not None:
                    from drumline.rank.torch_internals import raise_group_timeouts

                    raise_group_timeouts(timedelta(seconds=self._patience_s + AFTER_PATIENCE_S))

            with contextlib.suppress(Exception):
                self._also()


def num_collectives() -> int | None:
    """How many the default group has begun, as the backend counts them; None where there is no
    group."""
    dist: Any = sys.modules.get("torch.distributed")

    # While torch is being loaded, it has no such functions.
    if not hasattr(dist, "is_initialized") or not dist.is_available() or not dist.is_initialized():
        return None

    try:
        from drumline.rank.torch_internals import sequence_number_of

        return sequence_number_of(dist.group.WORLD)()
    # The group is being destroyed; or this version of torch cannot be observed.
    except (AttributeError, ImportError, RuntimeError):
        return None
