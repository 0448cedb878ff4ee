"""What the user's own code runs that slows down each operation, or each call of Python: profilers of
torch, anomaly detection, debuggers, coverage, cProfile. What one of them costs is spread over a whole
step, so no line of a profile shows it: they are off in the profiled steps, and in half of those
before, which shows what they take.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import profiler

from drumline.rank.profiled.stack_sampler import NO_LINE, line_of_user
from drumline.runs.profile_files import SampledLine

ANOMALY = "anomaly detection (torch.autograd.set_detect_anomaly)"
TRACER = "a tracer (sys.settrace)"
FOLLOWER = "a profiler of Python (sys.setprofile, as of cProfile)"
ANOMALY_CALLS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in ("set_anomaly_enabled", "is_anomaly_enabled", "is_anomaly_check_nan_enabled")
}


class AnomalyMode(NamedTuple):
    """The arguments of torch's function that sets it."""

    is_on: bool
    checks_nan: bool


class SlowModes:
    """From `observe` on modes of the user's are seen; from `silence` until `resume` they are off."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """Those that were on, in order."""

        self._anomaly: AnomalyMode
        """As the user's code has set it."""

        self._is_silent = False
        self._turn_on: list[Callable[[], object]] = []
        """The tracers that were on at `silence`."""

    def observe(self) -> None:
        """Also a mode that is only on inside of a step is seen."""
        self._anomaly = AnomalyMode(
            torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        )
        if self._anomaly.is_on:
            self.names[ANOMALY] = None

        # torch's context managers look these up here at each call, and restore what they have read.
        replacements = (
            self._set_anomaly,
            lambda: self._anomaly.is_on,
            lambda: self._anomaly.checks_nan,
        )

        for name, replacement in zip(ANOMALY_CALLS, replacements, strict=True):
            setattr(torch, name, replacement)

    def are_on(self) -> bool:
        """Whether one has been on."""
        if sys.gettrace():
            self.names[TRACER] = None
        if sys.getprofile():
            self.names[FOLLOWER] = None
        return bool(self.names)

    def silence(self) -> None:
        """Remember those that are on, and turn them off."""
        self.are_on()
        self._is_silent = True
        ANOMALY_CALLS["set_anomaly_enabled"](False)

        if tracer := sys.gettrace():
            self._turn_on.append(partial(sys.settrace, tracer))
            sys.settrace(None)

        if follower := sys.getprofile():
            self._turn_on.append(_end_following(follower))

    def resume(self) -> None:
        """The modes are as the user's code has left them, and torch is as before `observe`."""
        for name, call in ANOMALY_CALLS.items():
            setattr(torch, name, call)

        if self._is_silent:
            torch.set_anomaly_enabled(*self._anomaly)
            self._is_silent = False

        for turn_on in self._turn_on:
            turn_on()

        self._turn_on.clear()

    def _set_anomaly(self, is_on: bool, check_nan: bool = True) -> None:
        """In place of torch's function: what the user's code sets takes effect at `resume`."""
        self._anomaly = AnomalyMode(is_on, check_nan)
        if is_on:
            self.names[ANOMALY] = None

        if not self._is_silent:
            ANOMALY_CALLS["set_anomaly_enabled"](is_on, check_nan)


def _end_following(follower: Any) -> Callable[[], object]:
    """What begins it again: cProfile's object is no function that Python could call."""
    if hasattr(follower, "disable"):
        follower.disable()
        return follower.enable  # type: ignore[no-any-return]

    sys.setprofile(None)
    return partial(sys.setprofile, follower)


def python_tracers() -> tuple[str, ...]:
    """What cannot be turned off for some steps, and follows the Python calls of this thread, or all objects."""
    monitoring: Any = getattr(sys, "monitoring", None)  # of Python 3.12
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []

    if tracemalloc.is_tracing():
        tools.append("tracemalloc")

    return tuple(filter(None, tools))


# Profilers of torch

PROFILER_CALLS: dict[str, Callable[..., Any]] = {
    name: getattr(profiler, name)
    for name in ("_prepare_profiler", "_enable_profiler", "_disable_profiler")
}
"""With which torch's profilers begin and end."""


class OtherProfilers:
    """From `observe` on the user's profilers are seen, and from `silence` on they record nothing: two of
    torch cannot record at once, torch then ends the process."""

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
        for name, call in PROFILER_CALLS.items():
            setattr(profiler, name, call)
        try:
            yield
        finally:
            self._replace()

    def _replace(self) -> None:
        """From here on torch's profilers call this object."""
        replacements = (self._prepare, self._enable, self._disable)
        for name, call in zip(PROFILER_CALLS, replacements, strict=True):
            setattr(profiler, name, call)

    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        """One of the user's is about to begin."""
        self.line = line_of_user(sys._getframe(1))
        if not self._is_silent:
            PROFILER_CALLS["_prepare_profiler"](*args, **kwargs)

    def _enable(self, *args: Any) -> None:
        """It begins."""
        if not self._is_silent:
            self._is_open = True
            PROFILER_CALLS["_enable_profiler"](*args)

    def _disable(self) -> Any:
        """It ends; what it has recorded."""
        if not self._is_open:
            return self._result

        self._is_open = False
        return PROFILER_CALLS["_disable_profiler"]()
