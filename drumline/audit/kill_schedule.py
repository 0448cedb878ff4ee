"""When each leg is killed: drawn from one seed, so that a failure can be repeated.

`--world 4,2,3`: a reference run on 4 ranks without a kill, and a run in three legs: on 4 ranks until a kill, on 2 until
another, on 3 to the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from drumline.text import plural

Moment = Literal["step", "save", "evaluation"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
ALL_RANKS = "all"
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class ProofOptions:
    """The flags of prove-resume; None: random."""

    worlds: tuple[int, ...]
    """Ranks of each leg; the reference run has as many as the first."""
    steps: int
    seed: int
    at: tuple[int, ...] | None = None
    moment: Moment | None = None
    rank: str | None = None
    """A number, or `all`."""

    @property
    def num_kills(self) -> int:
        return len(self.worlds) - 1

    @property
    def is_elastic(self) -> bool:
        """Whether the legs have different numbers of ranks."""
        return len(set(self.worlds)) > 1


@dataclass(frozen=True)
class RunPattern:
    """How long each save and evaluation of the reference run took, by step."""

    save_s: dict[int, float]
    evaluation_s: dict[int, float]

    @property
    def first_save(self) -> int:
        """A kill before this save is complete would leave nothing to resume from."""
        return min(self.save_s)


@dataclass(frozen=True)
class Kill:
    """When a leg is ended with -9."""

    moment: Moment
    step: int
    """The leg is killed after this step, or in its save or evaluation."""
    ranks: tuple[int, ...]
    wait: float
    """How long into that moment, as a fraction of its usual length."""
    usual_s: float | None
    """That length; None: as long as the step before."""


def worlds_of(given: Sequence[int]) -> tuple[int, ...]:
    """One number means one kill, with as many ranks before and after it."""
    return (*given, *given) if len(given) == 1 else tuple(given)


def wrong_options(options: ProofOptions) -> Iterator[str]:
    """A sentence for each option that is out of range."""
    kills, steps, at = options.num_kills, options.steps, options.at or ()
    if at and len(at) != kills:
        legs = ",".join(map(str, options.worlds))
        yield f"--kill-at: {plural(len(at), 'step')} for {plural(kills, 'kill')} (--world {legs})"
    elif list(at) != sorted(set(at)) or max(at, default=0) >= steps:
        listed = ",".join(map(str, at))
        yield f"--kill-at: {listed} must {'rise and stay' if kills > 1 else 'be'} below --steps {steps}"
    rank, smallest = options.rank, min(options.worlds[:-1])
    if rank not in (None, ALL_RANKS) and not (rank.isdecimal() and int(rank) < smallest):
        yield f"--kill-rank: {rank!r} is neither 'all' nor a rank of every leg that is killed (0 to {smallest - 1})"


def too_early(options: ProofOptions, pattern: RunPattern) -> str | None:
    """What is wrong with the options, given when the reference run saved."""
    first = pattern.first_save
    if options.at is not None and options.at[0] <= first:
        return f"--kill-at: {options.at[0]} is too early: the first checkpoint is that of step {first}"
    return too_few_steps(options, first_save=first)


def too_few_steps(options: ProofOptions, *, first_save: int) -> str | None:
    least = first_save + 1 + options.num_kills
    if options.steps >= least:
        return None
    return (
        f"--steps: {options.steps} is too few: the first checkpoint is that of step {first_save}, and each kill needs "
        f"a step of its own after it and before the end; give at least {least}"
    )


def draw_kills(options: ProofOptions, pattern: RunPattern, *, attempt: int = 0) -> list[Kill]:
    """One kill for each leg but the last. A later attempt follows one whose kill came too late: it kills earlier, and
    the last attempt as early as possible."""
    draw = random.Random(options.seed)  # noqa: S311 - a schedule, not a secret
    moments: list[Moment] = [one for one in MOMENTS if one != "evaluation" or pattern.evaluation_s]
    kills = []
    for number, world in enumerate(options.worlds[:-1]):
        low = pattern.first_save + 1 + number
        # Each kill has a range of steps of its own, so that it comes after the one before.
        length = (options.steps - 1 - pattern.first_save) / options.num_kills
        first, last = (pattern.first_save + int(one * length) for one in (number, number + 1))
        step = draw.randint(first + 1, last)
        step = step if options.at is None else options.at[number]
        moment = draw.choice(moments) if options.moment is None else options.moment
        rank, wait = draw.randrange(world), draw.random()
        if attempt:
            step, wait = max(low, pattern.first_save + (step - pattern.first_save) // 2), 0.0
        if attempt == MAX_ATTEMPTS - 1:
            step, moment = low, "step"
        if options.rank == ALL_RANKS:
            ranks = tuple(range(world))
        else:
            ranks = (rank if options.rank is None else int(options.rank),)
        kill = _kill(moment, step, ranks, wait, pattern)
        if options.rank is None and kill.moment == "save" and kill.step == options.steps:
            # The other ranks have nothing left to do: if one of them is killed, rank 0 completes the save and the run.
            kill = replace(kill, ranks=(0,))
        kills.append(kill)
    return kills


def _kill(moment: Moment, step: int, ranks: tuple[int, ...], wait: float, pattern: RunPattern) -> Kill:
    times = {"save": pattern.save_s, "evaluation": pattern.evaluation_s}.get(moment, {})
    chosen = next((one for one in sorted(times) if one >= step), None)
    if chosen is None:
        return Kill("step", step, ranks, wait, None)
    # In the first third: near its end it has often ended by itself.
    return Kill(moment, chosen, ranks, wait / 3, times[chosen])
