"""The proof: a run that nobody interrupts, the same run in legs with a kill after each but the last, the comparison."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.engine.run_folder import RunFolder
from drumline.errors import ConfigError
from drumline.metrics.events import read_events
from drumline.prove.cause import Cause, lost_in_the_kill, not_repeatable
from drumline.prove.compare import Difference, first_difference
from drumline.prove.files import compare_checkpoints
from drumline.prove.killing import Leg, RunFailedError, describe, run_and_kill, run_to_the_end
from drumline.prove.schedule import MAX_ATTEMPTS, Kill, Pattern, Wishes, draw_kills, too_early
from drumline.prove.traces import Traced, read_trace

Say = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A difference, in which leg (from 1), and why."""

    difference: Difference
    leg: int
    cause: Cause


@dataclass(frozen=True)
class Outcome:
    """What came out; `found` is None when the bits are the same."""

    steps: int
    samples: int
    tensors: int
    kills: int
    found: Found | None


class Proof:
    """Runs one job as often as the proof needs it, in folders below `root`."""

    def __init__(self, wishes: Wishes, arguments: Sequence[str], root: Path, say: Say) -> None:
        self._wishes = wishes
        self._arguments = tuple(arguments)
        self._root = root
        self._say = say

    def run(self) -> Outcome:
        """Prove it, or find the first difference and its cause."""
        wishes = self._wishes
        reference = self._run_whole("reference")
        self._say(f"reference: {_ranks(wishes.worlds[0])}, {wishes.steps} steps without a kill")
        pattern = self._pattern()
        legs = self._killed_and_resumed(reference, pattern)
        found = self._first_difference(reference, legs)
        return Outcome(wishes.steps, reference.num_samples, reference.num_tensors, wishes.num_kills, found)

    def _run_whole(self, name: str) -> Traced:
        leg = self._leg(f"the {name} run", name, self._wishes.worlds[0])
        run_to_the_end(leg)
        return read_trace(RunFolder(leg.folder).trace_file(0).parent)

    def _pattern(self) -> Pattern:
        events = list(read_events(RunFolder(self._root / "reference").event_file(0)))
        pattern = Pattern(
            *(
                {event["step"]: event["seconds"] for event in events if event["kind"] == kind}
                for kind in ("checkpoint", "evaluation")
            )
        )
        if problem := too_early(self._wishes, pattern):
            raise ConfigError(
                [problem], next_step="--checkpoint.every_steps says how often the job saves here"
            )
        if self._wishes.moment == "evaluation" and not pattern.evaluation_s:
            self._say("the job has no evaluation data: it is killed between steps instead")
        return pattern

    def _killed_and_resumed(self, reference: Traced, pattern: Pattern) -> list[Traced]:
        for attempt in range(MAX_ATTEMPTS):
            legs = self._run_legs(reference, draw_kills(self._wishes, pattern, attempt=attempt))
            if legs is not None:
                return legs
            shutil.rmtree(self._root / "killed")
        raise RunFailedError(
            f"the job came to its end before it could be killed, {MAX_ATTEMPTS} times",
            next_step="give it more --steps, or larger batches",
        )

    def _run_legs(self, reference: Traced, kills: Sequence[Kill]) -> list[Traced] | None:
        """The traces of all legs, or of those up to the first that differs; None: a kill came too late."""
        legs: list[Traced] = []
        for number, (world, kill) in enumerate(
            zip(self._wishes.worlds, [*kills, None], strict=True), start=1
        ):
            leg = self._leg(f"leg {number}", "killed", world, log=f"leg-{number}")
            in_time = run_to_the_end(leg) if kill is None else run_and_kill(leg, kill)
            trace = read_trace(self._set_trace_aside(leg, number))
            legs.append(trace)
            differs = first_difference(reference, trace) is not None
            if not differs and (not in_time or trace.from_step >= self._wishes.steps):
                self._say(f"leg {number}: the kill came too late; once more, with an earlier one")
                return None
            where = f" from step {trace.from_step}" if number > 1 else ""
            end = "to the end" if kill is None or not in_time else describe(kill, max(trace.steps))
            self._say(f"leg {number}: {_ranks(world)}{where}, {end}")
            if differs:
                break
        return legs

    def _set_trace_aside(self, leg: Leg, number: int) -> Path:
        """A folder for each leg: what another one writes is its own."""
        trace = RunFolder(leg.folder).trace_file(0).parent
        return trace.rename(trace.with_name(f"trace-leg-{number}")) if trace.exists() else trace

    def _first_difference(self, reference: Traced, legs: Sequence[Traced]) -> Found | None:
        for number, leg in enumerate(legs, start=1):
            if (difference := first_difference(reference, leg)) is not None:
                return Found(difference, number, self._cause(difference, reference, leg, number))
        if (difference := self._missing(legs) or self._different_file()) is None:
            return None
        return Found(difference, len(legs), self._cause(difference, reference, legs[-1], len(legs)))

    def _missing(self, legs: Sequence[Traced]) -> Difference | None:
        for step in range(1, self._wishes.steps + 1):
            if not any(leg.is_whole(step) for leg in legs):
                return Difference("order", step, f"step {step} was never taken by all ranks", f"step {step}")
        return None

    def _different_file(self) -> Difference | None:
        steps = self._wishes.steps
        reference, killed = (
            RunFolder(self._root / name).checkpoints / f"step-{steps:08d}" for name in ("reference", "killed")
        )
        return compare_checkpoints(reference, killed, steps, same_world=not self._wishes.is_elastic)

    def _cause(self, found: Difference, reference: Traced, leg: Traced, number: int) -> Cause:
        if number == 1:  # up to its kill this leg is a second run that nobody interrupted
            return not_repeatable(found)
        self._say("a difference was found; the run without a kill is done once more, to find out why")
        again = first_difference(reference, self._run_whole("repeated"))
        if again is not None:
            return not_repeatable(again)
        return lost_in_the_kill(found, worlds=(reference.world_size, leg.world_size))

    def _leg(self, name: str, folder: str, world: int, log: str | None = None) -> Leg:
        return Leg(name, self._arguments, self._root / folder, self._root / f"{log or folder}.log", world)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number > 1 else ''}"
