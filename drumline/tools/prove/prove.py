"""Runs the proof: a reference run without a kill, then the same run in legs, killed after each but
the last; and compares them: the first difference of their traces (samples, tensors, metrics), and its
likely cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from drumline.base.errors import ConfigError, TrainingError
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
        """Whether the bits are the same. A hook that ends the job early does so in the killed run too."""
        options = self.options
        ranks = plural(options.worlds[0], "rank")
        steps = plural(options.steps, "step")
        self.show(f"reference: {ranks}, {steps} without a kill")
        reference = self._run_without_kill("reference")

        last = max(reference.steps, default=options.steps)
        if last >= options.steps:
            return self._compare(reference)

        self.show(f"a hook of the task ended it after step {last}: so must the killed run")
        shorter = replace(self, options=replace(options, steps=last))
        return shorter._compare(reference)

    def _compare(self, reference: RunTrace) -> bool:
        """Run the legs, and show whether they are as the reference.

        not proved: head.weight differs after step 7, and 3 other tensors with it [leg 2]
          likely cause: state outside the checkpoint: the buffer running has persistent=False ...
          try: register it without persistent=False, or compute it again from what is saved
        """
        options = self.options
        steps = plural(options.steps, "step")
        kills = plural(options.num_kills, "kill")
        legs = self._killed_and_resumed(reference)
        # A difference is in the last leg: no leg is started after one that differs.
        difference = self._difference(reference, legs) or self._missing(reference, legs)

        if difference is None:
            last = folder_name(options.steps)
            reference_folder = RunFolder(self.root / "reference").checkpoints / last
            killed_folder = RunFolder(self.root / "killed").checkpoints / last
            if options.modes:
                return self._compare_weights(reference, reference_folder, killed_folder)

            difference = compare_checkpoints(
                reference_folder,
                killed_folder,
                options.steps,
                same_world=not options.is_elastic,
            )

        if difference is not None:
            cause = self._cause(difference, reference, legs)
            self.show(f"not proved: {difference.sentence} [leg {len(legs)}]")
            self.show(f"  likely cause: {cause.what}")
            self.show(f"  try: {cause.next_step}")

            return False

        self.show(f"proved: {steps}, {reference.extent()}: the same bits after {kills}")
        unsaved = [name for leg in legs for name in compare(reference, leg).unsaved]
        for name in dict.fromkeys(unsaved):
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
        self,
        reference: RunTrace,
        reference_folder: Path,
        killed_folder: Path,
    ) -> bool:
        """Show how far the weights are from those of the reference.

        proved: 1,280 samples, 31 tensors: each mode resumed with the bits that the one before had saved;
        the weights after step 10 differ by 2.1e-06 of their size
        """
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
        self,
        name: str,
        folder: str,
        world: int,
        log: str | None = None,
        mode: str | None = None,
    ) -> Leg:
        """A leg in this folder; without a mode of its own, in the first mode."""
        if mode is None and self.options.modes:
            mode = self.options.modes[0]

        arguments = [*self.arguments]
        if mode:
            arguments.append(f"--dist.mode={mode}")

        output = self.root / f"{log or folder}.log"
        return Leg(name, tuple(arguments), self.root / folder, output, world)

    def _run_without_kill(self, name: str) -> RunTrace:
        """Run it to the end, and read its trace."""
        leg = self._leg(f"the {name} run", name, self.options.worlds[0])
        run_to_the_end(leg)
        return read_trace(RunFolder(leg.folder).trace_file(0).parent)

    def _killed_and_resumed(self, reference: RunTrace) -> list[RunTrace]:
        """The legs of the killed run; tried again where a kill came too late."""
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
            kills = draw_kills(self.options, pattern, attempt=attempt)
            legs = self._run_legs(reference, kills)
            if legs is not None:
                return legs

            shutil.rmtree(self.root / "killed")

        raise RunFailedError(
            f"the job ended before it could be killed, {MAX_ATTEMPTS} times",
            next_step="give it more --steps, or larger batches",
        )

    def _run_legs(self, reference: RunTrace, kills: Sequence[Kill]) -> list[RunTrace] | None:
        """All legs, or those up to the first that differs; None: a kill came too late.

        leg 1: 4 ranks, killed with -9 during the save of step 4 (rank 2)
        leg 2: 2 ranks from step 2, to the end
        """
        legs: list[RunTrace] = []
        modes = self.options.modes or [None] * len(self.options.worlds)
        plan = zip(self.options.worlds, modes, [*kills, None], strict=True)

        for number, (world, mode, kill) in enumerate(plan, start=1):
            leg = self._leg(f"leg {number}", "killed", world, log=f"leg-{number}", mode=mode)
            is_in_time = True
            if kill is None:
                run_to_the_end(leg)
            else:
                is_in_time = run_and_kill(leg, kill)

            trace = _take_trace(leg, number)
            legs.append(trace)
            differs = self._difference(reference, legs) is not None

            if not differs and (not is_in_time or trace.from_step >= self.options.steps):
                self.show(f"leg {number}: the kill came too late; trying again with an earlier one")
                return None

            ranks = plural(world, "rank")
            if mode:
                ranks += f" in mode {mode}"

            where = f" from step {trace.from_step}" if number > 1 else ""
            end = "to the end"
            if kill is not None and is_in_time:
                end = describe(kill, max(trace.steps, default=trace.from_step))

            self.show(f"leg {number}: {ranks}{where}, {end}")
            if differs:
                break

        return legs

    def _missing(self, reference: RunTrace, legs: Sequence[RunTrace]) -> RunDifference | None:
        """The first step or evaluation that no leg has completed.

        `step 9 was never done by all ranks`, where a leg began after it and the one before had not reached it.
        """
        for step in range(1, self.options.steps + 1):
            if not any(leg.is_complete(step) for leg in legs):
                name = f"step {step}"
                return RunDifference("order", step, f"{name} was never done by all ranks", name)

            if step in reference.evaluations and not any(step in leg.evaluations for leg in legs):
                name = f"the evaluation after step {step}"
                return RunDifference("evaluation", step, f"{name} was never done", name)

        return None

    def _cause(
        self,
        difference: RunDifference,
        reference: RunTrace,
        legs: Sequence[RunTrace],
    ) -> DifferenceCause:
        """The likely cause: of a difference in the second leg or later, after one more run without
        a kill."""
        if len(legs) == 1:  # up to its kill this leg is a second run without a kill
            return not_repeatable(difference)

        self.show("a difference was found; repeating the run without a kill, to find the cause")
        again = compare(reference, self._run_without_kill("repeated")).difference
        if again is not None:
            return not_repeatable(again)

        return lost_in_the_kill(difference, worlds=(reference.world_size, legs[-1].world_size))


def _take_trace(leg: Leg, number: int) -> RunTrace:
    """What a leg has done. Its trace gets a folder of its own, so that the next leg begins another."""
    folder = RunFolder(leg.folder).trace_file(0).parent
    if folder.exists():
        folder = folder.rename(folder.with_name(f"trace-leg-{number}"))

    return read_trace(folder)


# What a run has done, from its trace

ByName = Mapping[str, str]
"""A hash, or a number as text, of each name."""


@dataclass(frozen=True)
class TensorHashes:
    """Hashes of all tensors after a step, by name."""

    saved: ByName
    unsaved: ByName
    """Buffers with persistent=False, which are in no checkpoint."""


NOTHING = TensorHashes({}, {})


class SampleTrace(NamedTuple):
    """A sample that a step has taken."""

    number: int | None
    """Its index; None: of a stream, whose samples have no index."""
    bits: str
    """Their hash."""


@dataclass
class StepTrace:
    """One step, over all ranks."""

    step: int
    epoch: int
    samples: dict[int, SampleTrace] = field(default_factory=dict)
    """By position in the epoch's order."""
    rests: dict[tuple[int, int], str] = field(default_factory=dict)
    """By micro-batch: the hash of everything that does not belong to a single sample."""
    num_ranks: int = 0
    """How many ranks have written it; some may be missing in the last step of a killed attempt."""
    state: TensorHashes | None = None


@dataclass(frozen=True)
class RunTrace:
    """One attempt."""

    world_size: int
    from_step: int
    start: TensorHashes
    steps: Mapping[int, StepTrace]
    evaluations: Mapping[int, ByName]
    """The metrics of completed evaluations, by step, each number as text with all its digits."""

    def is_complete(self, step: int) -> bool:
        """Whether all ranks have written this step."""
        return step in self.steps and self.steps[step].num_ranks == self.world_size

    def extent(self) -> str:
        """`1,280 samples, 31 tensors`."""
        num_samples = sum(len(step.samples) for step in self.steps.values())
        last = self.steps[max(self.steps)].state or NOTHING
        num_tensors = sum(not name.endswith(".json") for name in last.saved)

        return f"{plural(num_samples, 'sample')}, {plural(num_tensors, 'tensor')}"


def read_trace(folder: Path) -> RunTrace:
    """The attempt whose trace is in this folder.

    A rank's first line is the start, then one for each step and evaluation.
    """
    ranks = [list(read_events(file)) for file in sorted(folder.glob("rank-*.jsonl"))]
    if not ranks or not ranks[0] or ranks[0][0]["kind"] != "start":
        raise TrainingError(
            f"there is no trace in {folder}: the run wrote none",
            next_step="read its output, in the .log files beside its folder",
        )

    start = ranks[0][0]
    steps: dict[int, StepTrace] = {}
    for line in chain.from_iterable(ranks):
        if line["kind"] == "step":
            new_step = StepTrace(line["step"], line["epoch"])
            _add_rank(steps.setdefault(line["step"], new_step), line)

    evaluations = {  # as text, because NaN is not equal to itself
        line["step"]: {name: repr(value) for name, value in line["metrics"].items()}
        for line in ranks[0]
        if line["kind"] == "evaluated"
    }

    return RunTrace(
        world_size=start["world_size"],
        from_step=start["step"],
        start=TensorHashes(start["tensors"], start["unsaved"]),
        steps=dict(sorted(steps.items())),
        evaluations=evaluations,
    )


def _add_rank(step: StepTrace, line: Mapping[str, Any]) -> None:
    """What one rank has written of the step.

    Its batches have positions in the epoch's order, an index and a hash for each sample, and a hash of
    all that belongs to no single sample.
    """
    step.num_ranks += 1
    if "tensors" in line:
        step.state = TensorHashes(line["tensors"], line["unsaved"])

    for batch in line["batches"]:
        positions = range(batch["low"], batch["high"])
        step.rests[batch["low"], batch["high"]] = batch["rest"]
        indices = batch["indices"] or [None] * len(positions)

        for position, index, bits in zip(positions, indices, batch["samples"], strict=True):
            step.samples[position] = SampleTrace(index, bits)


# Comparing two runs


Kind = Literal["order", "sample", "batch", "tensor", "evaluation", "file"]


@dataclass(frozen=True)
class RunDifference:
    """What differs between two runs."""

    kind: Kind
    step: int
    """0: before the first step."""
    sentence: str
    name: str
    """The sample, tensor or metric."""
    unsaved: tuple[str, ...] = ()
    """Buffers with persistent=False that also differ, or differed before."""


@dataclass(frozen=True)
class Comparison:
    """How an attempt differs from the reference."""

    difference: RunDifference | None
    """The first difference, if there is one."""
    unsaved: tuple[str, ...]
    """Buffers with persistent=False that differ. Alone they do not count as a difference: such a
    buffer may be a cache that is filled at its first use."""


def compare(reference: RunTrace, attempt: RunTrace) -> Comparison:
    """Compare a complete run and an attempt, which may have begun later and ended earlier."""
    difference = next(_differences(reference, attempt), None)
    last = max(attempt.steps, default=0) if difference is None else difference.step

    unequal: list[str] = []
    for number, expected, actual in _states(reference, attempt):
        if number <= last:
            # Those that differed last come first: they are more likely the cause.
            unequal = [*_unequal(expected.unsaved, actual.unsaved), *unequal]

    unsaved = tuple(dict.fromkeys(unequal))
    return Comparison(difference and replace(difference, unsaved=unsaved), unsaved)


def compare_restored(reference: RunTrace, legs: Sequence[RunTrace]) -> RunDifference | None:
    """Compare the last leg of a run with those before it, in other modes: its samples with those of
    the reference, and the tensors that it restored with those that were saved."""
    *before, leg = legs

    def differences() -> Iterator[RunDifference]:
        """What was restored first, then the samples of the steps."""
        saved = None
        for earlier in before:
            if leg.from_step in earlier.steps:
                saved = earlier.steps[leg.from_step].state

        if saved is not None:
            when = f"as restored from the checkpoint of step {leg.from_step}"
            yield from _tensors(saved.saved, leg.start.saved, leg.from_step, when)

        for number, step in leg.steps.items():
            yield from _samples(reference.steps[number], step, is_complete=leg.is_complete(number))

    return next(differences(), None)


def _differences(reference: RunTrace, attempt: RunTrace) -> Iterator[RunDifference]:
    """All differences, in the order of steps."""
    for number, expected, actual in _states(reference, attempt):
        if number > attempt.from_step:
            yield from _samples(
                reference.steps[number],
                attempt.steps[number],
                is_complete=attempt.is_complete(number),
            )
            when = f"after step {number}"
        elif number:
            when = f"as restored from the checkpoint of step {number}"
        else:
            when = "before the first step"

        yield from _tensors(expected.saved, actual.saved, number, when)
        yield from _metrics(
            reference.evaluations.get(number), attempt.evaluations.get(number), number
        )


def _states(
    reference: RunTrace, attempt: RunTrace
) -> Iterator[tuple[int, TensorHashes, TensorHashes]]:
    """The states that must be equal, by step: at the start of the attempt, and after each of its
    steps."""
    first = reference.steps[attempt.from_step].state if attempt.from_step else reference.start
    yield attempt.from_step, first or NOTHING, attempt.start
    for number, step in attempt.steps.items():
        expected = reference.steps[number].state or NOTHING
        # rank 0 may have been killed before it wrote it
        actual = step.state or expected
        yield number, expected, actual


def _samples(
    expected: StepTrace,
    actual: StepTrace,
    *,
    is_complete: bool,
) -> Iterator[RunDifference]:
    """The differences in the samples of one step; those that are missing count if it is complete.

    step 4 took sample 17 at position 65 of epoch 1, not sample 12
    sample 12 (position 65 of epoch 1) differs at step 4
    the micro-batch of positions 64 to 79 differs at step 4, in what belongs to no single sample
    """
    step = expected.step
    if expected.epoch != actual.epoch:
        sentence = f"step {step} is in epoch {actual.epoch + 1}, not in epoch {expected.epoch + 1}"
        yield RunDifference("order", step, sentence, f"epoch {actual.epoch + 1}")
        return

    positions = set(actual.samples)
    if is_complete:
        positions |= expected.samples.keys()

    for position in sorted(positions):
        where = f"position {position} of epoch {expected.epoch + 1}"
        expected_sample = expected.samples.get(position)
        actual_sample = actual.samples.get(position)

        if expected_sample is None or actual_sample is None:
            has = "has a" if expected_sample is None else "has no"
            sentence = f"step {step} {has} sample at {where}, unlike the run without kills"
            yield RunDifference("order", step, sentence, where)
        else:
            yield from _sample(expected_sample, actual_sample, step, where)

    for (low, high), rest in actual.rests.items():
        if expected.rests.get((low, high), rest) != rest:
            name = f"the micro-batch of positions {low} to {high - 1}"
            sentence = f"{name} differs at step {step}, in what belongs to no single sample"
            yield RunDifference("batch", step, sentence, name)


def _sample(
    expected: SampleTrace, actual: SampleTrace, step: int, where: str
) -> Iterator[RunDifference]:
    """Another sample at this place, or the same one with other bits."""
    if expected.number != actual.number:
        sentence = (
            f"step {step} took sample {actual.number} at {where}, not sample {expected.number}"
        )
        yield RunDifference("order", step, sentence, f"sample {actual.number}")

    elif expected.bits != actual.bits:
        name = f"the sample at {where}"
        named = name
        if expected.number is not None:
            name = f"sample {expected.number}"
            named = f"{name} ({where})"

        yield RunDifference("sample", step, f"{named} differs at step {step}", name)


def _tensors(
    expected: ByName,
    actual: ByName,
    step: int,
    when: str,
) -> Iterator[RunDifference]:
    """A difference that names the first tensor, if any has other bits.

    `head.weight differs after step 7, and 3 other tensors with it`.
    """
    if names := _unequal(expected, actual):
        first, *rest = names
        also_differ = f", and {plural(len(rest), 'other tensor')} with it" if rest else ""
        yield RunDifference("tensor", step, f"{first} differs {when}{also_differ}", first)


def _metrics(
    expected: ByName | None,
    actual: ByName | None,
    step: int,
) -> Iterator[RunDifference]:
    """Compares the evaluation after a step. A killed attempt may lack its last one.

    `accuracy of the evaluation after step 8 is 0.75, not 0.8125`.
    """
    if expected is None or actual is None:
        return
    for name in _unequal(expected, actual):
        values = f"{actual.get(name, 'missing')}, not {expected.get(name, 'missing')}"
        sentence = f"{name} of the evaluation after step {step} is {values}"
        yield RunDifference("evaluation", step, sentence, name)


def _unequal(expected: ByName, actual: ByName) -> list[str]:
    """The names whose values differ."""
    return [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]


# The manifest contains the time of the save; in progress.json only the step and the cursor must be
# equal.
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
RANDOM = "rng.safetensors"


def compare_checkpoints(
    reference: Path,
    resumed: Path,
    step: int,
    *,
    same_world: bool,
) -> RunDifference | None:
    """Compare the folders of one step. `same_world`: the random state of every rank must be equal
    too.

    `model.safetensors of the checkpoint of step 10 differs`.
    """
    names = {file.name for folder in (reference, resumed) for file in folder.iterdir()}
    names -= {MANIFEST} if same_world else {MANIFEST, RANDOM}
    for name in sorted(names):
        expected = _read_comparable(reference / name)
        actual = _read_comparable(resumed / name)
        if expected != actual:
            sentence = f"{name} of the checkpoint of step {step} differs"
            return RunDifference("file", step, sentence, name)

    return None


def _read_comparable(file: Path) -> bytes | None:
    """The bytes of a file that must be equal; None: it is missing."""
    if not file.exists():
        return None
    if file.name != PROGRESS:
        return file.read_bytes()

    progress = json.loads(file.read_bytes())
    return json.dumps([progress["step"], progress["cursor"]]).encode()


def weight_distance(reference: Path, resumed: Path) -> float:
    """How far the weights of two checkpoints are apart, as a fraction of their norm."""
    from drumline.checkpoint import store  # loads torch

    expected = store.read(reference, only=("model",)).tensors["model"]
    actual = store.read(resumed, only=("model",)).tensors["model"]

    difference = 0.0
    size = 0.0
    for name, tensor in expected.items():
        weights = tensor.double()
        difference += float((weights - actual[name].double()).square().sum())
        size += float(weights.square().sum())

    return float((difference / size) ** 0.5) if size else 0.0


# Causes


@dataclass(frozen=True)
class DifferenceCause:
    """Why two runs probably differ, and what to do."""

    what: str
    next_step: str


GENERATORS = "the global generators of torch, numpy or random"
SAME_LENGTH = "let len(dataset) be the same at every start, and a stream end at the same sample"
REMEMBERS = "without kills it gives the same bits twice, so it keeps something in memory that a new process lacks"


def not_repeatable(difference: RunDifference) -> DifferenceCause:
    """The cause if two runs of the same command differ, both without a kill."""
    if difference.kind in ("sample", "batch"):
        return DifferenceCause(
            f"unseeded randomness in the dataset: {difference.name} is not the same twice, even without a kill",
            f"draw from {GENERATORS}, which are seeded for every sample, or from the draws that a BatchDataset "
            "is given; seed your own generator from the index",
        )

    if difference.kind == "order":
        return DifferenceCause(
            "the dataset is not the same twice: the order of samples follows from its length, the seed and the epoch",
            SAME_LENGTH,
        )

    if difference.step == 0:
        return DifferenceCause(
            f"unseeded randomness in model(): {difference.name} starts from different values each time",
            "draw initial weights from torch's global generator, which is seeded before model() is called",
        )

    where = "the model or its loss"
    repeated = "samples"
    if difference.kind == "evaluation":
        where = "evaluation"
        repeated = "weights"

    return DifferenceCause(
        f"a non-deterministic kernel, or randomness in {where} that is not from {GENERATORS}: the {repeated} are the "
        f"same twice, but {difference.name} is not, even without a kill",
        f"try --train.deterministic; draw random numbers in {where} from {GENERATORS}, whose state is saved",
    )


def lost_in_the_kill(difference: RunDifference, *, worlds: tuple[int, int]) -> DifferenceCause:
    """The cause if only the killed run differs. `worlds`: ranks of the run without kills, and of
    the leg that differs."""
    if difference.kind == "order":
        return DifferenceCause(
            "the dataset changed between the legs: the order of samples depends on its length, the seed and the epoch",
            SAME_LENGTH,
        )

    if difference.kind in ("sample", "batch"):
        return DifferenceCause(
            f"state outside the checkpoint, in the dataset: {REMEMBERS}",
            "let a sample depend on its index and the seeded generators alone, not on earlier samples; a stream's "
            "state_dict() and load_state_dict() must hold everything that decides the next sample",
        )

    used = ", used in evaluation" if difference.kind == "evaluation" else ""
    if worlds[0] != worlds[1]:
        return DifferenceCause(
            f"arithmetic that depends on the number of ranks ({worlds[0]} and {worlds[1]}), or state outside the "
            f"checkpoint{used}",
            f"prove it with --world {worlds[0]} first: if that holds, it is the number of ranks",
        )

    if difference.unsaved:
        buffer = difference.unsaved[0]
        return DifferenceCause(
            f"state outside the checkpoint{used}: the buffer {buffer} has persistent=False and is not saved",
            "register it without persistent=False, or compute it again from what is saved",
        )

    return DifferenceCause(
        f"state outside the checkpoint{used or ', in the model, the task or the optimizer'}: {REMEMBERS}",
        f"keep what {'evaluation' if used else 'the loss'} depends on in a buffer of the model (register_buffer) or in "
        "the optimizer's state; plain attributes of the task or the model, such as counters and caches, are not saved",
    )
