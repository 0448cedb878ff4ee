"""How much of a run's time was spent on training, and what the rest was lost to, from the events of
rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(kw_only=True)
class AttemptTimes:
    """One start of the job: Unix seconds, and seconds of its parts."""

    begin: float
    """From the command, where that is known."""
    last: float
    """Of its last event."""
    first_step_at: float | None = None
    """When the first step was done; None: it never was."""
    evaluation_s: float = 0.0
    save_s: float = 0.0
    resumed_at: int = 0
    """The step that it resumed from."""
    last_step: int = 0
    is_restart: bool = False
    """Whether the launcher started it again after a fault; else a person or a scheduler did,
    perhaps days later."""

    @property
    def started(self) -> float:
        """When its start was over."""
        return self.last if self.first_step_at is None else self.first_step_at

    @property
    def steps_s(self) -> float:
        """The seconds in steps."""
        if self.first_step_at is None:
            return 0.0
        return max(0.0, self.last - self.first_step_at - self.evaluation_s - self.save_s)


@dataclass(frozen=True)
class Goodput:
    """Where the time went; the time between two commands is not counted."""

    seconds: Mapping[str, float]
    """Of each part, in the order in which they are shown."""

    @property
    def total_s(self) -> float:
        """All seconds that count."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """The part of the time, from 0 to 1, that was spent on steps and evaluations that
        counted."""
        useful_s = self.seconds["training"] + self.seconds["evaluation"]
        return useful_s / self.total_s if self.total_s > 0 else 0.0


def goodput_of(attempts: Sequence[AttemptTimes]) -> Goodput:
    """Where the time of these attempts went."""
    start_s = 0.0
    restart_s = 0.0
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        if before is None or not attempt.is_restart:
            start_s += max(0.0, attempt.started - attempt.begin)
        else:
            restart_s += max(0.0, attempt.started - before.last)
    repeated_s = _repeated_s(attempts)

    return Goodput(
        {
            "training": max(0.0, sum(attempt.steps_s for attempt in attempts) - repeated_s),
            "evaluation": sum(attempt.evaluation_s for attempt in attempts),
            "start": start_s,
            "saves": sum(attempt.save_s for attempt in attempts),
            # From the last event before a fault to the first step after the restart.
            "restarts": restart_s,
            # Because they were not saved.
            "steps repeated": repeated_s,
        }
    )


def _repeated_s(attempts: Sequence[AttemptTimes]) -> float:
    """The seconds of steps that a later attempt took again; one that took no step repeats none."""
    seconds = 0.0
    with_steps = [attempt for attempt in attempts if attempt.first_step_at is not None]
    for before, attempt in pairwise(with_steps):
        lost_steps = before.last_step - max(attempt.resumed_at, before.resumed_at)
        if lost_steps > 0:
            num_steps = before.last_step - before.resumed_at
            seconds += before.steps_s * lost_steps / num_steps
    return seconds


class RunClock:
    """The time of a run in seconds from its first command, without the time between two
    commands."""

    def __init__(self, attempts: Sequence[AttemptTimes]) -> None:
        self._begin = attempts[0].begin if attempts else 0.0
        self._pauses = [
            (before.last, after.begin)
            for before, after in pairwise(attempts)
            if not after.is_restart and after.begin > before.last
        ]
        self.seconds = self.at(max((attempt.last for attempt in attempts), default=0.0))

    def at(self, moment: float) -> float:
        """The seconds of the run at a Unix time."""
        paused = sum(min(moment, end) - begin for begin, end in self._pauses if moment > begin)
        return max(0.0, moment - self._begin - paused)
