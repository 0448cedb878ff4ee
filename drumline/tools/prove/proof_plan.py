"""What a proof runs: its options, the settings of its runs, and when each leg is killed.

`--world 4,2,3`: a reference run on 4 ranks without a kill, and a run in three legs: on 4 ranks
until a kill, on 2 until another, on 3 to the end. Kills are drawn from one seed, so that a failure
can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drumline.base.text import plural
from drumline.config import Layers
from drumline.config.fields import FIELDS, flag_text

Moment = Literal["step", "save", "evaluation"]
MAX_ATTEMPTS = 3
MODES = ("ddp", "zero1", "fsdp", "hsdp")


@dataclass(frozen=True)
class ProofOptions:
    """The flags of prove-resume; None: random."""

    worlds: tuple[int, ...]
    """Ranks of each leg; the reference run has as many as the first."""
    steps: int
    seed: int
    kill_steps: tuple[int, ...] | None = None
    moment: Moment | None = None
    rank: str | None = None
    """A number, or `all`."""
    modes: tuple[str, ...] = ()
    """`dist.mode` of each leg; empty: that of the settings."""

    @property
    def num_kills(self) -> int:
        """Each leg but the last is killed once."""
        return len(self.worlds) - 1

    @property
    def is_elastic(self) -> bool:
        """Whether the legs have different numbers of ranks and must have the same bits."""
        return len(set(self.worlds)) > 1 and not self.modes


def wrong_options(options: ProofOptions) -> Iterator[str]:
    """A message for each option that is out of range.

    --kill-at: 3 steps for 2 kills (--world 4,2,3)
    --kill-rank: '4' is neither 'all' nor a rank of every leg that is killed (0 to 1)
    """
    modes = options.modes
    if modes and (len(modes) < 2 or len(modes) != len(options.worlds)):
        legs = plural(len(options.worlds), "leg")
        yield f"--modes: {len(modes)} for {legs}; give one for each, and at least 2"

    for mode in modes:
        if mode not in MODES:
            yield f"--modes: {mode!r} is not one of {', '.join(MODES)}"

    if options.kill_steps:
        yield from _wrong_kill_steps(options, options.kill_steps)

    rank = options.rank
    if rank in (None, "all"):
        return

    smallest = min(options.worlds[:-1])
    if not rank.isdecimal() or int(rank) >= smallest:
        yield f"--kill-rank: {rank!r} is neither 'all' nor a rank of every leg that is killed (0 to {smallest - 1})"


def _wrong_kill_steps(options: ProofOptions, kill_steps: Sequence[int]) -> Iterator[str]:
    """A message if there is not one step for each kill, one after the other, before the end."""
    kills = options.num_kills
    steps = options.steps
    if len(kill_steps) != kills:
        legs = ",".join(map(str, options.worlds))
        yield f"--kill-at: {plural(len(kill_steps), 'step')} for {plural(kills, 'kill')} (--world {legs})"

    elif list(kill_steps) != sorted(set(kill_steps)) or kill_steps[-1] >= steps:
        listed = ",".join(map(str, kill_steps))
        yield f"--kill-at: {listed} must {'rise and stay' if kills > 1 else 'be'} below --steps {steps}"


def too_few_steps(options: ProofOptions, *, first_save: int) -> str | None:
    """A message if there are too few steps: a kill before the first complete save would leave
    nothing to resume from."""
    least = first_save + 1 + options.num_kills
    if options.steps >= least:
        return None

    return (
        f"--steps: {options.steps} is too few: the first checkpoint is that of step {first_save}, and each kill needs "
        f"a step of its own after it and before the end; give at least {least}"
    )


# Settings

# Settings that the proof sets itself, and what to use instead.
OWN = {
    "train.steps": "use --steps instead",
    "train.epochs": "use --steps instead",
    "log.trace": "it is always on here",
    "log.display": "the output of the runs goes to files here",
}
SAVES = "checkpoint.every_steps"
WARM_UP = "optim.warmup_steps"
BALANCE = "data.balance"
SAVE_EVERY = 2


def wrong_settings(layers: Layers, options: ProofOptions) -> Iterator[str]:
    """A message for each flag that the proof sets itself, or that contradicts it.

    --train.steps: use --steps instead
    --dist.mode: --modes sets it for each leg
    """
    flags = layers.flags.settings
    for path, reason in OWN.items():
        if path in flags:
            yield f"--{path}: {reason}"

    if options.modes and "dist.mode" in flags:
        yield "--dist.mode: --modes sets it for each leg"

    exact = flags.get("train.exact")
    if options.is_elastic and exact is not None and exact.value != "elastic":
        legs = ", ".join(map(str, options.worlds))
        yield f"--train.exact: {exact.value} needs one number of ranks, and the legs have {legs}"


@dataclass(frozen=True)
class ProofSettings:
    """The job's settings, and the changes for the proof."""

    layers: Layers
    defaults: Mapping[str, Any]
    """The task's defaults."""
    options: ProofOptions

    def problems(self) -> Iterator[str]:
        """A message for each setting with which the proof is impossible."""
        every = self.changes().get(SAVES, self._value(SAVES))
        # The end of an epoch is saved too, but its step is known only when the job runs.
        by_epochs = "checkpoint.every_epochs" in self.layers.flags.settings
        if not by_epochs and (problem := too_few_steps(self.options, first_save=every)):
            yield problem

        shards = self._value("train.shards")
        most = max(self.options.worlds)
        if self.options.is_elastic and most > shards:
            yield f"--world: {most} ranks cannot share {shards} shards (train.shards): some would have none"

    def changes(self) -> dict[str, Any]:
        """Settings that are changed because the proof would otherwise be impossible; flags are
        never changed."""
        changes: dict[str, Any] = {}
        flags = self.layers.flags.settings
        steps = self.options.steps
        saves = self._value(SAVES)

        if saves == 0 or (SAVES not in flags and too_few_steps(self.options, first_save=saves)):
            changes[SAVES] = SAVE_EVERY
        if WARM_UP not in flags and self._value(WARM_UP) > steps:
            changes[WARM_UP] = steps // 2
        if BALANCE not in flags and self._value(BALANCE) == "auto":
            # its sizes follow measured times, which differ between runs
            changes[BALANCE] = "off"

        return changes

    def describe_changes(self) -> str:
        """`checkpoint.every_steps 2 (it was 0)`."""
        return ", ".join(
            f"{path} {value} (it was {self._value(path)})" for path, value in self.changes().items()
        )

    def arguments(self, task: str, *, config_file: str | None) -> list[str]:
        """The arguments of `drumline train`, without the folder and the number of ranks."""
        flags = self.layers.flags.settings
        settings = {path: setting.value for path, setting in flags.items()}
        settings |= self.changes()
        settings |= {
            "train.steps": self.options.steps,
            "log.trace": True,
            "log.display": "none",
        }

        if self.options.is_elastic:
            settings["train.exact"] = "elastic"

        words = [task]
        if config_file:
            words.append(f"--config={config_file}")

        words += [f"--{path}={flag_text(value)}" for path, value in settings.items()]
        return words

    def _value(self, path: str) -> Any:
        """The value of a setting, before the changes of the proof."""
        for layer in self.layers:
            if path in layer.settings:
                return layer.settings[path].value

        return self.defaults.get(path, FIELDS[path].default)


# Kills

RunPattern = Mapping[Moment, Mapping[int, float]]
"""How long each save and evaluation of the reference run took, by step."""


@dataclass(frozen=True)
class Kill:
    """When a leg is ended with -9."""

    moment: Moment
    step: int
    """The leg is killed after this step, or in its save or evaluation."""
    ranks: tuple[int, ...]
    wait: float
    """How far into that moment, as a fraction of its usual length."""
    usual_s: float | None
    """That length; None: the length of the previous step."""


def too_early(options: ProofOptions, pattern: RunPattern) -> str | None:
    """What is wrong with the options, given when the reference run saved."""
    first = min(pattern["save"])
    if options.kill_steps is not None and options.kill_steps[0] <= first:
        return f"--kill-at: {options.kill_steps[0]} is too early: the first checkpoint is that of step {first}"

    return too_few_steps(options, first_save=first)


def draw_kills(options: ProofOptions, pattern: RunPattern, *, attempt: int = 0) -> list[Kill]:
    """One kill for each leg except the last, drawn from the seed.

    After an attempt whose kill came too late, the next one kills earlier, and the last attempt as
    early as possible."""
    draw = random.Random(options.seed)  # noqa: S311 - a schedule, not a secret
    moments: list[Moment] = ["step", "save"]
    if pattern["evaluation"]:
        moments.append("evaluation")

    first_save = min(pattern["save"])
    # Each kill has its own range of steps, so that it comes after the previous one.
    length = (options.steps - 1 - first_save) / options.num_kills

    kills = []
    for number, world in enumerate(options.worlds[:-1]):
        before = first_save + int(number * length)
        last = first_save + int((number + 1) * length)
        step = draw.randint(before + 1, last)
        earliest = first_save + 1 + number

        if options.kill_steps is not None:
            step = options.kill_steps[number]

        moment = draw.choice(moments) if options.moment is None else options.moment
        rank = draw.randrange(world)
        wait = draw.random()

        if attempt:
            step = max(earliest, first_save + (step - first_save) // 2)
            wait = 0.0

        if attempt == MAX_ATTEMPTS - 1:
            step = earliest
            moment = "step"

        # In the next save or evaluation from this step on, if that is the moment; if there is none,
        # after the step.
        times = pattern.get(moment, {})
        following = [candidate for candidate in times if candidate >= step]
        if following:
            step = min(following)
            wait /= 3  # near its end it has often finished already
        else:
            moment = "step"

        if options.rank is None and moment == "save" and step == options.steps:
            # the others are done: if one of them is killed, rank 0 still completes the save and the
            # run
            rank = 0

        ranks = tuple(range(world)) if options.rank == "all" else (int(options.rank or rank),)
        kills.append(Kill(moment, step, ranks, wait, times.get(step)))

    return kills
