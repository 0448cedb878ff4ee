"""Runs the proof: a reference run without a kill, then the same run in legs, killed after each but the last."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drumline.audit.killed_run import Leg, RunFailedError, describe, run_and_kill, run_to_the_end
from drumline.audit.proof_plan import MAX_ATTEMPTS, Kill, ProofOptions, RunPattern, draw_kills, too_early
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
    """The first difference, in which leg (from 1), and its likely cause."""

    difference: RunDifference
    leg: int
    cause: DifferenceCause


@dataclass(frozen=True)
class Outcome:
    """The result; `found` is None when the bits are the same."""

    steps: int
    samples: int
    tensors: int
    kills: int
    found: FirstDifference | None
    unsaved: tuple[str, ...] = ()
    """Buffers with persistent=False that differed."""


class FinishedLeg(NamedTuple):
    trace: RunTrace
    comparison: Comparison
    """With the reference run."""


class Proof:
    """Runs one job as often as needed, in folders below `root`."""

    def __init__(self, options: ProofOptions, arguments: Sequence[str], root: Path, show: Report) -> None:
        self._options = options
        self._arguments = tuple(arguments)
        self._root = root
        self._show = show

    def run(self) -> Outcome:
        options = self._options
        ranks, steps = plural(options.worlds[0], "rank"), plural(options.steps, "step")
        self._show(f"reference: {ranks}, {steps} without a kill")
        reference = self._run_without_kill("reference")
        legs = self._killed_and_resumed(reference, self._pattern())
        found = self._found(reference, legs)
        unsaved = tuple(dict.fromkeys(name for leg in legs for name in leg.comparison.unsaved))
        return Outcome(options.steps, reference.num_samples, reference.num_tensors, options.num_kills, found, unsaved)

    def _run_without_kill(self, name: str) -> RunTrace:
        leg = self._leg(f"the {name} run", name, self._options.worlds[0])
        run_to_the_end(leg)
        return read_trace(RunFolder(leg.folder).trace_file(0).parent)

    def _pattern(self) -> RunPattern:
        events = list(read_events(RunFolder(self._root / "reference").event_file(0)))
        saves, evaluations = (
            {event["step"]: event["seconds"] for event in events if event["kind"] == kind}
            for kind in ("checkpoint", "evaluation")
        )
        pattern = RunPattern(saves, evaluations)
        if problem := too_early(self._options, pattern):
            raise ConfigError([problem], next_step="--checkpoint.every_steps sets how often the job saves here")
        if self._options.moment == "evaluation" and not pattern.evaluation_s:
            self._show("the job has no evaluation data: it is killed between steps instead")
        return pattern

    def _killed_and_resumed(self, reference: RunTrace, pattern: RunPattern) -> list[FinishedLeg]:
        for attempt in range(MAX_ATTEMPTS):
            legs = self._run_legs(reference, draw_kills(self._options, pattern, attempt=attempt))
            if legs is not None:
                return legs
            shutil.rmtree(self._root / "killed")
        raise RunFailedError(
            f"the job ended before it could be killed, {MAX_ATTEMPTS} times",
            next_step="give it more --steps, or larger batches",
        )

    def _run_legs(self, reference: RunTrace, kills: Sequence[Kill]) -> list[FinishedLeg] | None:
        """All legs, or those up to the first that differs; None: a kill came too late."""
        legs: list[FinishedLeg] = []
        plan = zip(self._options.worlds, [*kills, None], strict=True)
        for number, (world, kill) in enumerate(plan, start=1):
            leg = self._leg(f"leg {number}", "killed", world, log=f"leg-{number}")
            end = self._run_leg(leg, kill)
            folder = RunFolder(leg.folder).trace_file(0).parent
            if folder.exists():  # a folder for each leg
                folder = folder.rename(folder.with_name(f"trace-leg-{number}"))
            trace = read_trace(folder)
            legs.append(FinishedLeg(trace, compare(reference, trace)))
            differs = legs[-1].comparison.difference is not None
            if not differs and (end is None or trace.from_step >= self._options.steps):
                self._show(f"leg {number}: the kill came too late; trying again with an earlier one")
                return None
            where = f" from step {trace.from_step}" if number > 1 else ""
            self._show(f"leg {number}: {plural(world, 'rank')}{where}, {end or TO_THE_END}")
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

    def _found(self, reference: RunTrace, legs: Sequence[FinishedLeg]) -> FirstDifference | None:
        """In the last leg, if at all: no leg is started after one that differs."""
        last, number = legs[-1], len(legs)
        difference = last.comparison.difference or self._missing(reference, [leg.trace for leg in legs])
        if (difference := difference or self._different_file()) is None:
            return None
        return FirstDifference(difference, number, self._cause(difference, reference, last.trace, number))

    def _missing(self, reference: RunTrace, legs: Sequence[RunTrace]) -> RunDifference | None:
        for step in range(1, self._options.steps + 1):
            if not any(leg.is_complete(step) for leg in legs):
                return RunDifference("order", step, f"step {step} was never done by all ranks", f"step {step}")
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

    def _cause(self, found: RunDifference, reference: RunTrace, leg: RunTrace, number: int) -> DifferenceCause:
        if number == 1:  # up to its kill this leg is a second run without a kill
            return not_repeatable(found)
        self._show("a difference was found; repeating the run without a kill, to find the cause")
        again = compare(reference, self._run_without_kill("repeated")).difference
        if again is not None:
            return not_repeatable(again)
        return lost_in_the_kill(found, worlds=(reference.world_size, leg.world_size))

    def _leg(self, name: str, folder: str, world: int, log: str | None = None) -> Leg:
        return Leg(name, self._arguments, self._root / folder, self._root / f"{log or folder}.log", world)
