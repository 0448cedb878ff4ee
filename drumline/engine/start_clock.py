"""How long a run took from the command to the end of its first step, and what that was made of.

Each stage of the start marks its end; the first step is waited for, this once, and reported. After that the clock is
gone: no later step pays for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from drumline.launch.rank_environment import command_start, now, process_start
from drumline.metrics.events import Reporter


@dataclass
class StartClock:
    """Divides the time since `began` into parts."""

    began: float = field(default_factory=now)
    since: str = "rank"
    """What began then: the `command`, or only this `rank`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by name, in the order of the run."""

    def mark(self, part: str) -> None:
        """All since the mark before was this."""
        past = sum(self.parts.values())
        self.parts[part] = self.parts.get(part, 0.0) + now() - self.began - past

    def tell(self, reporter: Reporter, *, step: int, device: torch.device) -> None:
        """After the first step, which is waited for."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.mark("first step")
        seconds = sum(self.parts.values())
        reporter.report("first_step", step=step, seconds=seconds, since=self.since, parts=self.parts)


def start_clock(environment: Mapping[str, str], *, is_alone: bool) -> StartClock:
    """The clock of this rank, once all that it needs is loaded. `is_alone`: this process is the command."""
    own = process_start()
    start = own if is_alone else command_start(environment)
    clock = StartClock(own if start is None else start, "rank" if start is None else "command")
    if clock.began < own:
        clock.parts["launcher"] = own - clock.began
    clock.mark("python and torch")
    return clock
