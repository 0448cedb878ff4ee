"""Runs the proof: a reference run without a kill, then the same run in legs, killed after each but
the last."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drumline.base.errors import ConfigError
from drumline.base.text import plural
from drumline.runs.catalog import folder_name
from drumline.runs.events import read_events
from drumline.runs.run_folder import RunFolder
from drumline.tools.prove.killed_run import (
    Leg,
    RunFailedError,
    describe,
    run_and_kill,
    run_to_the_end,
)
from drumline.tools.prove.proof_plan import (
    MAX_ATTEMPTS,
    Kill,
    Moment,
    ProofOptions,
    draw_kills,
    too_early,
)
from drumline.tools.prove.run_comparison import (
    DifferenceCause,
    RunDifference,
    RunTrace,
    compare,
    compare_checkpoints,
    compare_restored,
    lost_in_the_kill,
    not_repeatable,
    read_trace,
    weight_distance,
)

# Of weights that differ in the order of sums alone, after a few steps; a lost optimizer state
# changes more.
MOST_DISTANCE = 1e-2


@dataclass(frozen=True)
class Proof:
    """Runs one job as often as needed, in folders below `root`, and prints what it does."""

    options: ProofOptions
    arguments: Sequence[str]
    """What follows `drumline train`."""
    root: Path
    show: Callable[[str], None]

    def run(self) -> bool:
        """Whether the bits are the same."""
        options = self.options
        ranks = plural(options.worlds[0], "rank")
        steps = plural(options.steps, "step")
        self.show(f"reference: {ranks}, {steps} without a kill")
        reference = self._run_without_kill("reference")
        if (last := max(reference.steps, default=options.steps)) < options.steps:
            self.show(f"a hook of the task ended it after step {last}: so must the killed run")
            return replace(self, options=replace(options, steps=last))._compare(reference)
        return self._compare(reference)

    def _compare(self, reference: RunTrace) -> bool:
        """Run the legs, and show whether they are as the reference."""
        options = self.options
        steps = plural(options.steps, "step")
        kills = plural(options.num_kills, "kill")
        legs = self._killed_and_resumed(reference)
        compared = [compare(reference, leg) for leg in legs]
        # A difference is in the last leg: no leg is started after one that differs.
        difference = self._difference(reference, legs) or self._missing(reference, legs)
        if difference is None:
            last = folder_name(options.steps)
            reference_folder = RunFolder(self.root / "reference").checkpoints / last
            killed_folder = RunFolder(self.root / "killed").checkpoints / last
            if options.modes:
                return self._compare_weights(reference, reference_folder, killed_folder)
            difference = compare_checkpoints(
                reference_folder, killed_folder, options.steps, same_world=not options.is_elastic
            )
        if difference is not None:
            cause = self._cause(difference, reference, legs)
            self.show(f"not proved: {difference.sentence} [leg {len(legs)}]")
            self.show(f"  likely cause: {cause.what}")
            self.show(f"  try: {cause.next_step}")
            return False
        self.show(f"proved: {steps}, {reference.extent()}: the same bits after {kills}")
        for name in dict.fromkeys(name for comparison in compared for name in comparison.unsaved):
            self.show(
                f"  note: the buffer {name} (persistent=False) is not in checkpoints and differed at some step; "
                "nothing that was compared depends on it"
            )
        return True

    def _difference(self, reference: RunTrace, legs: Sequence[RunTrace]) -> RunDifference | None:
        """The first difference in the last of these legs. In another mode sums have another order,
        and so other bits: there samples, and what was restored, must be the same."""
        if self.options.modes and len(legs) > 1:
            return compare_restored(reference, legs)
        return compare(reference, legs[-1]).difference

    def _compare_weights(
        self, reference: RunTrace, reference_folder: Path, killed_folder: Path
    ) -> bool:
        """Show how far the weights are from those of the reference."""
        options = self.options
        distance = weight_distance(reference_folder, killed_folder)
        text = f"the weights after step {options.steps} differ by {distance:.1e} of their size"
        if distance > MOST_DISTANCE:
            self.show(f"not proved: {text} from the run without a kill in mode {options.modes[0]}")
            self.show(
                f"  try: --modes {','.join(options.modes[:1] * 2)} first; a lower --optim.lr, if training diverges"
            )
            return False
        self.show(
            f"proved: {reference.extent()}: each mode resumed with the bits that the one before had saved; {text}"
        )
        return True

    def _leg(
        self, name: str, folder: str, world: int, log: str | None = None, mode: str | None = None
    ) -> Leg:
        if mode is None and self.options.modes:
            mode = self.options.modes[0]
        arguments = (*self.arguments, *([f"--dist.mode={mode}"] if mode else []))
        return Leg(name, arguments, self.root / folder, self.root / f"{log or folder}.log", world)

    def _run_without_kill(self, name: str) -> RunTrace:
        leg = self._leg(f"the {name} run", name, self.options.worlds[0])
        run_to_the_end(leg)
        return read_trace(RunFolder(leg.folder).trace_file(0).parent)

    def _killed_and_resumed(self, reference: RunTrace) -> list[RunTrace]:
        events = list(read_events(RunFolder(self.root / "reference").event_file(0)))
        kinds: dict[Moment, str] = {"save": "checkpoint", "evaluation": "evaluation"}
        pattern = {
            moment: {event["step"]: event["seconds"] for event in events if event["kind"] == kind}
            for moment, kind in kinds.items()
        }
        if problem := too_early(self.options, pattern):
            raise ConfigError(
                [problem], next_step="--checkpoint.every_steps sets how often the job saves here"
            )
        if self.options.moment == "evaluation" and not pattern["evaluation"]:
            self.show("the job has no evaluation data: it is killed between steps instead")
        for attempt in range(MAX_ATTEMPTS):
            legs = self._run_legs(reference, draw_kills(self.options, pattern, attempt=attempt))
            if legs is not None:
                return legs
            shutil.rmtree(self.root / "killed")
        raise RunFailedError(
            f"the job ended before it could be killed, {MAX_ATTEMPTS} times",
            next_step="give it more --steps, or larger batches",
        )

    def _run_legs(self, reference: RunTrace, kills: Sequence[Kill]) -> list[RunTrace] | None:
        """All legs, or those up to the first that differs; None: a kill came too late."""
        legs: list[RunTrace] = []
        modes = self.options.modes or [None] * len(self.options.worlds)
        plan = zip(self.options.worlds, modes, [*kills, None], strict=True)
        for number, (world, mode, kill) in enumerate(plan, start=1):
            leg = self._leg(f"leg {number}", "killed", world, log=f"leg-{number}", mode=mode)
            if kill is None:
                run_to_the_end(leg)
            is_in_time = kill is None or run_and_kill(leg, kill)
            folder = RunFolder(leg.folder).trace_file(0).parent
            if folder.exists():  # a folder for each leg
                folder = folder.rename(folder.with_name(f"trace-leg-{number}"))
            trace = read_trace(folder)
            legs.append(trace)
            differs = self._difference(reference, legs) is not None
            if not differs and (not is_in_time or trace.from_step >= self.options.steps):
                self.show(f"leg {number}: the kill came too late; trying again with an earlier one")
                return None
            where = f" from step {trace.from_step}" if number > 1 else ""
            end = "to the end"
            if kill is not None and is_in_time:
                end = describe(kill, max(trace.steps, default=trace.from_step))
            ranks = plural(world, "rank") + (f" in mode {mode}" if mode else "")
            self.show(f"leg {number}: {ranks}{where}, {end}")
            if differs:
                break
        return legs

    def _missing(self, reference: RunTrace, legs: Sequence[RunTrace]) -> RunDifference | None:
        for step in range(1, self.options.steps + 1):
            if not any(leg.is_complete(step) for leg in legs):
                return RunDifference(
                    "order", step, f"step {step} was never done by all ranks", f"step {step}"
                )
            if step in reference.evaluations and not any(step in leg.evaluations for leg in legs):
                name = f"the evaluation after step {step}"
                return RunDifference("evaluation", step, f"{name} was never done", name)
        return None

    def _cause(
        self, difference: RunDifference, reference: RunTrace, legs: Sequence[RunTrace]
    ) -> DifferenceCause:
        if len(legs) == 1:  # up to its kill this leg is a second run without a kill
            return not_repeatable(difference)
        self.show("a difference was found; repeating the run without a kill, to find the cause")
        again = compare(reference, self._run_without_kill("repeated")).difference
        if again is not None:
            return not_repeatable(again)
        return lost_in_the_kill(difference, worlds=(reference.world_size, legs[-1].world_size))
