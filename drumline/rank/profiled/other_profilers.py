"""Profilers that the user's own code runs. Two of torch cannot record at once: torch then ends the
process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.autograd import profiler

from drumline.rank.profiled.stack_sampler import NO_LINE, line_of_user
from drumline.runs.profile_files import SampledLine

CALLS: dict[str, Callable[..., Any]] = {
    name: getattr(profiler, name)
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
}
"""With which torch's profilers begin and end."""


class OtherProfilers:
    """From `observe` on the user's profilers are seen, and from `silence` on they record nothing."""

    _result: ClassVar[Any] = None
    """An empty one: what those that record nothing have recorded. Of the process: one of them may
    end after another capture has begun."""

    def __init__(self) -> None:
        self.line: SampledLine | None = None
        """That began the last one; None: there is none."""
        self._is_open = False
        """Whether one of them records."""
        self._is_silent = False

    def observe(self) -> None:
        """They begin and end through this object."""
        if profiler._is_profiler_enabled:
            self.line = NO_LINE
            self._is_open = True
        self._replace()

    def silence(self) -> None:
        """One that is recording ends."""
        self._disable()
        with self.ours(), profiler.profile() as nothing:
            pass
        OtherProfilers._result = nothing.kineto_results
        self._is_silent = True

    def resume(self) -> None:
        """They record again."""
        self._is_silent = False

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Meanwhile profilers are Drumline's."""
        for name, call in CALLS.items():
            setattr(profiler, name, call)
        try:
            yield
        finally:
            self._replace()

    def _replace(self) -> None:
        for name, call in zip(CALLS, (self._prepare, self._enable, self._disable), strict=True):
            setattr(profiler, name, call)

    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        self.line = line_of_user(sys._getframe(1))
        if not self._is_silent:
            CALLS["_prepare_profiler"](*args, **kwargs)

    def _enable(self, *args: Any) -> None:
        if not self._is_silent:
            self._is_open = True
            CALLS["_enable_profiler"](*args)

    def _disable(self) -> Any:
        if self._is_open:
            self._is_open = False
            return CALLS["_disable_profiler"]()
        return self._result
