"""The proof: a run that nobody interrupts, the same run in legs with a kill after each but the last, the comparison."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.audit.kill_schedule import MAX_ATTEMPTS, Kill, ProofOptions, RunPattern, draw_kills, too_early
from drumline.audit.killed_run import Leg, RunFailedError, describe, run_and_kill, run_to_the_end
from drumline.audit.run_comparison import (
    Comparison,
    DifferenceCause,
    RunDifference,
    compare,
    compare_checkpoints,
    lost_in_the_kill,
    not_repeatable,
)
from drumline.audit.run_traces import RunTrace, read_trace
from drumline.engine.run_folder import RunFolder
from drumline.errors import ConfigError
from drumline.metrics.events import read_events
from drumline.text import plural

Report = Callable[[str], None]
TO_THE_END = "to the end"


@dataclass(frozen=True)
class FirstDifference:
    """A difference, in which leg (from 1), and why."""

    difference: RunDifference
    leg: int
    cause: DifferenceCause


@dataclass(frozen=True)
class Outcome:
    """What came out; `found` is None when the bits are the same."""

    steps: int
    samples: int
    tensors: int
    kills: int
    found: FirstDifference | None
    unsaved: tuple[str, ...] = ()
    """Buffers that no checkpoint holds and that were not the same."""


@dataclass(frozen=True)
class FinishedLeg:
    """A leg that has ended, compared with the run without kills."""

    trace: RunTrace
    comparison: Comparison


class Proof:
    """Runs one job as often as the proof needs it, in folders below `root`."""

    def __init__(self, options: ProofOptions, arguments: Sequence[str], root: Path, say: Report) -> None:
        self._options = options
        self._arguments = tuple(arguments)
        self._root = root
        self._say = say

    def run(self) -> Outcome:
        """Prove it, or find the first difference and its cause."""
        options = self._options
        self._say(
            f"reference: {plural(options.worlds[0], 'rank')}, {plural(options.steps, 'step')} without a kill"
        )
        reference = self._run_whole("reference")
        legs = self._killed_and_resumed(reference, self._pattern())
        found = self._found(reference, legs)
        unsaved = tuple(dict.fromkeys(name for leg in legs for name in leg.comparison.unsaved))
        return Outcome(
            options.steps, reference.num_samples, reference.num_tensors, options.num_kills, found, unsaved
        )

    def _run_whole(self, name: str) -> RunTrace:
        leg = self._leg(f"the {name} run", name, self._options.worlds[0])
        run_to_the_end(leg)
        return read_trace(RunFolder(leg.folder).trace_file(0).parent)

    def _pattern(self) -> RunPattern:
        events = list(read_events(RunFolder(self._root / "reference").event_file(0)))
        pattern = RunPattern(
            *(
                {event["step"]: event["seconds"] for event in events if event["kind"] == kind}
                for kind in ("checkpoint", "evaluation")
            )
        )
        if problem := too_early(self._options, pattern):
            raise ConfigError(
                [problem], next_step="--checkpoint.every_steps says how often the job saves here"
            )
        if self._options.moment == "evaluation" and not pattern.evaluation_s:
            self._say("the job has no evaluation data: it is killed between steps instead")
        return pattern

    def _killed_and_resumed(self, reference: RunTrace, pattern: RunPattern) -> list[FinishedLeg]:
        for attempt in range(MAX_ATTEMPTS):
            legs = self._run_legs(reference, draw_kills(self._options, pattern, attempt=attempt))
            if legs is not None:
                return legs
            shutil.rmtree(self._root / "killed")
        raise RunFailedError(
            f"the job came to its end before it could be killed, {MAX_ATTEMPTS} times",
            next_step="give it more --steps, or larger batches",
        )

    def _run_legs(self, reference: RunTrace, kills: Sequence[Kill]) -> list[FinishedLeg] | None:
        """All legs, or those up to the first that differs; None: a kill came too late."""
        legs: list[FinishedLeg] = []
        for number, (world, kill) in enumerate(
            zip(self._options.worlds, [*kills, None], strict=True), start=1
        ):
            leg = self._leg(f"leg {number}", "killed", world, log=f"leg-{number}")
            end = self._run_leg(leg, kill)
            trace = read_trace(self._set_trace_aside(leg, number))
            legs.append(FinishedLeg(trace, compare(reference, trace)))
            differs = legs[-1].comparison.difference is not None
            if not differs and (end is None or trace.from_step >= self._options.steps):
                self._say(f"leg {number}: the kill came too late; once more, with an earlier one")
                return None
            where = f" from step {trace.from_step}" if number > 1 else ""
            self._say(f"leg {number}: {plural(world, 'rank')}{where}, {end or TO_THE_END}")
            if differs:
                break
        return legs

    def _run_leg(self, leg: Leg, kill: Kill | None) -> str | None:
        """How it ended; None: by itself, before it was killed."""
        if kill is None:
            run_to_the_end(leg)
            return TO_THE_END
        if not run_and_kill(leg, kill):
            return None
        lines = read_events(RunFolder(leg.folder).trace_file(0))
        return describe(kill, leg, max(line["step"] for line in lines))

    def _set_trace_aside(self, leg: Leg, number: int) -> Path:
        """A folder for each leg: what another one writes is its own."""
        trace = RunFolder(leg.folder).trace_file(0).parent
        return trace.rename(trace.with_name(f"trace-leg-{number}")) if trace.exists() else trace

    def _found(self, reference: RunTrace, legs: Sequence[FinishedLeg]) -> FirstDifference | None:
        """In the last leg, if at all: none is started after one that differs."""
        last = legs[-1]
        difference = last.comparison.difference or self._missing(reference, [leg.trace for leg in legs])
        if (difference := difference or self._different_file()) is None:
            return None
        return FirstDifference(
            difference, len(legs), self._cause(difference, reference, last.trace, len(legs))
        )

    def _missing(self, reference: RunTrace, legs: Sequence[RunTrace]) -> RunDifference | None:
        for step in range(1, self._options.steps + 1):
            if not any(leg.is_whole(step) for leg in legs):
                return RunDifference(
                    "order", step, f"step {step} was never taken by all ranks", f"step {step}"
                )
            if step in reference.evaluations and not any(step in leg.evaluations for leg in legs):
                name = f"the evaluation after step {step}"
                return RunDifference("evaluation", step, f"{name} was never done", name)
        return None

    def _different_file(self) -> RunDifference | None:
        steps = self._options.steps
        reference, killed = (
            RunFolder(self._root / name).checkpoints / f"step-{steps:08d}" for name in ("reference", "killed")
        )
        return compare_checkpoints(reference, killed, steps, same_world=not self._options.is_elastic)

    def _cause(
        self, found: RunDifference, reference: RunTrace, leg: RunTrace, number: int
    ) -> DifferenceCause:
        if number == 1:  # up to its kill this leg is a second run that nobody interrupted
            return not_repeatable(found)
        self._say("a difference was found; the run without a kill is done once more, to find out why")
        again = compare(reference, self._run_whole("repeated")).difference
        if again is not None:
            return not_repeatable(again)
        return lost_in_the_kill(found, worlds=(reference.world_size, leg.world_size))

    def _leg(self, name: str, folder: str, world: int, log: str | None = None) -> Leg:
        return Leg(name, self._arguments, self._root / folder, self._root / f"{log or folder}.log", world)
