"""`--train.step auto`: the first steps of a run try each way to step in turn, and the fastest is kept.

They are steps of the run like any other. Every rank tries the same way at the same step; what counts is the time of all
ranks together, and of the steps alone: an evaluation or a save between two of them says nothing about a way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from drumline.data.steps import Step
from drumline.distributed.collectives import all_sum
from drumline.engine.steps.kind import AnyStep

# Enough for a way to be as fast as it will be: to compile, and to capture.
WARM_UP_STEPS = 20
TIMED_STEPS = 12


def mark(device: torch.device) -> float | torch.cuda.Event:
    """A point in time: of the device's work where that runs beside the host's, so that nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Waits until the device has come to the second."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000
    assert isinstance(end, float)
    return end - begin


class AutoStep:
    """Takes steps in one way after another, then in the fastest of them."""

    def __init__(
        self,
        ways: Mapping[str, Callable[[], AnyStep]],
        *,
        device: torch.device,
        choose: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        """`choose` is given the name of the way that is kept, `tell` a sentence for the log."""
        self._ways = dict(ways)
        self._left = list(ways)
        self._device = device
        self._choose, self._tell = choose, tell
        self._steps: dict[str, AnyStep] = {}
        self._seconds: dict[str, float] = {}
        self._is_settled = False
        self._begin_next()
        self.grad_norm: Tensor | None = None
        """Of the latest step, before clipping; on the device."""

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        begin = None if self._is_settled else mark(self._device)
        self._step(step)
        self.grad_norm = self._step.grad_norm
        if begin is not None:
            self._follow(step, begin)

    def _begin_next(self) -> None:
        self._name = self._left.pop(0)
        self._step = self._steps[self._name] = self._ways[self._name]()
        self._num_taken = self._num_samples = 0
        self._marks: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def _follow(self, step: Step, begin: float | torch.cuda.Event) -> None:
        """Collective, in the end."""
        self._num_taken += 1
        if self._num_taken <= WARM_UP_STEPS:
            return
        self._marks.append((begin, mark(self._device)))
        self._num_samples += step.plan.global_size
        if len(self._marks) == TIMED_STEPS:
            self._seconds[self._name] = (
                sum(seconds_between(*pair) for pair in self._marks) / self._num_samples
            )
            if self._left:
                self._begin_next()
            else:
                self._settle()

    def _settle(self) -> None:
        mine = torch.tensor(list(self._seconds.values()), device=self._device)
        times = dict(zip(self._seconds, all_sum(mine).tolist(), strict=True))
        choice = min(times, key=times.__getitem__)
        self._is_settled = True
        self._step = self._steps[choice]
        self._steps = {}  # with the memory of their graphs
        fastest = times[choice]
        others = ", ".join(f"{name} {seconds / fastest:.2f}" for name, seconds in times.items())
        self._choose(choice)
        self._tell(f"steps run as {choice}, the fastest here; time of a step against it: {others}")
