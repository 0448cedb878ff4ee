"""Modes that slow down each operation, or each call of Python: anomaly detection, debuggers, coverage,
cProfile. What one of them costs is spread over a whole step, so no line of a profile shows it: they
are off in the profiled steps, and in half of those before, which shows what they take.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

ANOMALY = "anomaly detection (torch.autograd.set_detect_anomaly)"
FOLLOWS = "follows each call of Python"


class SlowModes:
    """From `observe` on modes of the user's are seen; from `silence` until `resume` they are off."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        """Those that were on, in order."""
        self._set_anomaly: Callable[..., None] = torch.set_anomaly_enabled
        self._is_silent = False
        self._turn_on: list[Callable[[], object]] = []
        """What was on at `silence`."""

    def observe(self) -> None:
        """Also a mode that is only on inside of a step is seen."""
        if torch.is_anomaly_enabled():
            self.names[ANOMALY] = None
        # torch's context managers look the function up here at each call.
        setattr(torch, "set_anomaly_enabled", self._change_anomaly)  # noqa: B010

    def are_on(self) -> bool:
        """Whether one has been on."""
        if sys.gettrace():
            self.names[f"sys.settrace, which {FOLLOWS}"] = None
        if sys.getprofile():
            self.names[f"sys.setprofile, as of cProfile, which {FOLLOWS}"] = None
        return bool(self.names)

    def silence(self) -> None:
        self._is_silent = True
        if torch.is_anomaly_enabled():
            checks = torch.is_anomaly_check_nan_enabled()
            self._turn_on.append(partial(self._set_anomaly, True, checks))
            self._set_anomaly(False)
        if tracer := sys.gettrace():
            self._turn_on.append(partial(sys.settrace, tracer))
            sys.settrace(None)
        if follower := sys.getprofile():
            self._turn_on.append(_end_following(follower))

    def resume(self) -> None:
        """All is as before `observe`."""
        self._is_silent = False
        setattr(torch, "set_anomaly_enabled", self._set_anomaly)  # noqa: B010
        for turn_on in self._turn_on:
            turn_on()
        self._turn_on.clear()

    def _change_anomaly(self, is_on: bool, check_nan: bool = True) -> None:
        if is_on:
            self.names[ANOMALY] = None
        if not self._is_silent:
            self._set_anomaly(is_on, check_nan)


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
