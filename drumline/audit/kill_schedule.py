"""What is run, and when each leg is killed: drawn from one seed, so that a failure can be repeated.

`--world 4,2,3`: a run on 4 ranks that nobody interrupts, and one of three legs: on 4 ranks until a kill, on 2 until
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
    """What the user asked for; None: to be drawn."""

    worlds: tuple[int, ...]
    """Ranks of each leg; the first is that of the uninterrupted run too."""
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
        """Whether the number of ranks changes on the way."""
        return len(set(self.worlds)) > 1


@dataclass(frozen=True)
class RunPattern:
    """What the uninterrupted run did between its steps, and how long that took."""

    save_s: dict[int, float]
    """By step."""
    evaluation_s: dict[int, float]

    @property
    def first_save(self) -> int:
        """A kill before this one has ended would leave nothing to resume from."""
        return min(self.save_s)


@dataclass(frozen=True)
class Kill:
    """When a leg is ended with -9."""

    moment: Moment
    step: int
    """The step after which, or the one whose save or evaluation."""
    ranks: tuple[int, ...]
    wait: float
    """How long into that moment, as a share of its usual length."""
    usual_s: float | None
    """That length; None: as long as the step before."""


def worlds_of(given: Sequence[int]) -> tuple[int, ...]:
    """One number is one kill on so many ranks."""
    return (*given, *given) if len(given) == 1 else tuple(given)


def wrong_options(options: ProofOptions) -> Iterator[str]:
    """A sentence for each wish that cannot be met."""
    kills, steps = options.num_kills, options.steps
    at = options.at or ()
    listed = ",".join(map(str, at))
    if at and len(at) != kills:
        legs = ",".join(map(str, options.worlds))
        yield f"--kill-at: {plural(len(at), 'step')} for {plural(kills, 'kill')} (--world {legs})"
    elif list(at) != sorted(set(at)) or max(at, default=0) >= steps:
        yield f"--kill-at: {listed} must {'rise and stay' if kills > 1 else 'be'} below --steps {steps}"
    smallest = min(options.worlds[:-1])
    if options.rank not in (None, ALL_RANKS) and not _is_rank(options.rank, smallest):
        yield (
            f"--kill-rank: {options.rank!r} is neither 'all' nor a rank of every leg that is killed "
            f"(0 to {smallest - 1})"
        )


def too_early(options: ProofOptions, pattern: RunPattern) -> str | None:
    """What is wrong with the options, now that it is known when the job saves."""
    first = pattern.first_save
    if options.at is not None and options.at[0] <= first:
        return (
            f"--kill-at: {options.at[0]} is too early: the first checkpoint is that of step {first}, and without one "
            "nothing would be resumed"
        )
    return too_few_steps(options, first_save=first)


def too_few_steps(options: ProofOptions, *, first_save: int) -> str | None:
    """What is wrong with --steps, if the job saves its first checkpoint at that step."""
    least = first_save + 1 + options.num_kills
    if options.steps >= least:
        return None
    return (
        f"--steps: {options.steps} is too few: the first checkpoint is that of step {first_save}, and each kill needs "
        f"a step of its own after it and before the end; give at least {least}"
    )


def draw_kills(options: ProofOptions, pattern: RunPattern, *, attempt: int = 0) -> list[Kill]:
    """One kill for each leg but the last. A later attempt follows one whose kill came too late: it kills earlier, and
    the last one as early as can be."""
    draw = random.Random(options.seed)  # noqa: S311 - a schedule, not a secret
    moments: list[Moment] = [one for one in MOMENTS if one != "evaluation" or pattern.evaluation_s]
    kills = []
    for number, world in enumerate(options.worlds[:-1]):
        low = pattern.first_save + 1 + number
        step = _step(options, number, pattern.first_save, draw)
        moment = draw.choice(moments) if options.moment is None else options.moment
        rank, wait = draw.randrange(world), draw.random()
        if attempt:
            step, wait = max(low, pattern.first_save + (step - pattern.first_save) // 2), 0.0
        if attempt == MAX_ATTEMPTS - 1:
            step, moment = low, "step"
        kill = _kill(moment, step, _ranks(options, world, rank), wait, pattern)
        if options.rank is None and kill.moment == "save" and kill.step == options.steps:
            # The other ranks have nothing left to do: without one of them rank 0 would finish the save, and the run.
            kill = replace(kill, ranks=(0,))
        kills.append(kill)
    return kills


def _step(options: ProofOptions, number: int, first_save: int, draw: random.Random) -> int:
    """Each kill has its own stretch of the run, so that it comes after the one before."""
    stretch = (options.steps - 1 - first_save) / options.num_kills
    low, high = (first_save + int(one * stretch) for one in (number, number + 1))
    drawn = draw.randint(low + 1, high)
    return drawn if options.at is None else options.at[number]


def _kill(moment: Moment, step: int, ranks: tuple[int, ...], wait: float, pattern: RunPattern) -> Kill:
    times = {"save": pattern.save_s, "evaluation": pattern.evaluation_s}.get(moment, {})
    chosen = next((one for one in sorted(times) if one >= step), None)
    if chosen is None:
        return Kill("step", step, ranks, wait, None)
    # The first third: what is killed at the very end has often ended by itself.
    return Kill(moment, chosen, ranks, wait / 3, times[chosen])


def _ranks(options: ProofOptions, world: int, drawn: int) -> tuple[int, ...]:
    if options.rank == ALL_RANKS:
        return tuple(range(world))
    return (drawn if options.rank is None else int(options.rank),)


def _is_rank(text: str | None, world: int) -> bool:
    return text is not None and text.isdecimal() and int(text) < world
