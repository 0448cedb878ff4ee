"""Reads the traces of two runs, and finds the first difference (samples, tensors, metrics) and its
likely cause."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from safetensors import deserialize

from drumline.base.errors import TrainingError
from drumline.base.text import plural
from drumline.runs.events import read_events


@dataclass(frozen=True)
class TensorHashes:
    """Hashes of all tensors after a step, by name."""

    saved: Mapping[str, str]
    unsaved: Mapping[str, str]
    """Buffers with persistent=False, which are in no checkpoint."""


@dataclass
class StepTrace:
    """One step, over all ranks."""

    step: int
    epoch: int
    samples: dict[int, tuple[int | None, str]] = field(default_factory=dict)
    """By position in the epoch's order: the sample's index, if it has one, and the hash of its
    bits."""
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
    evaluations: Mapping[int, Mapping[str, str]]
    """The metrics of completed evaluations, by step, each number as text with all its digits."""

    def is_complete(self, step: int) -> bool:
        return step in self.steps and self.steps[step].num_ranks == self.world_size

    @property
    def num_samples(self) -> int:
        return sum(len(step.samples) for step in self.steps.values())

    @property
    def num_tensors(self) -> int:
        last = self.steps[max(self.steps)].state
        return 0 if last is None else sum(not name.endswith(".json") for name in last.saved)


def read_trace(folder: Path) -> RunTrace:
    """The attempt whose trace is in this folder."""
    ranks = [list(read_events(file)) for file in sorted(folder.glob("rank-*.jsonl"))]
    if not ranks or not ranks[0] or ranks[0][0]["kind"] != "start":
        raise TrainingError(
            f"there is no trace in {folder}: the run wrote none",
            next_step="read its output, in the .log files beside its folder",
        )
    start = ranks[0][0]
    steps: dict[int, StepTrace] = {}
    for line in (line for lines in ranks for line in lines if line["kind"] == "step"):
        step = steps.setdefault(line["step"], StepTrace(line["step"], line["epoch"]))
        step.num_ranks += 1
        if "tensors" in line:
            step.state = TensorHashes(line["tensors"], line["unsaved"])
        for batch in line["batches"]:
            positions = range(batch["low"], batch["high"])
            step.rests[batch["low"], batch["high"]] = batch["rest"]
            samples = zip(
                batch["indices"] or [None] * len(positions), batch["samples"], strict=True
            )
            step.samples |= dict(zip(positions, samples, strict=True))
    evaluations = {  # as text, because NaN is not equal to itself
        line["step"]: {name: repr(value) for name, value in line["metrics"].items()}
        for line in ranks[0]
        if line["kind"] == "evaluated"
    }
    state = TensorHashes(start["tensors"], start["unsaved"])
    return RunTrace(
        start["world_size"], start["step"], state, dict(sorted(steps.items())), evaluations
    )


Kind = Literal["order", "sample", "batch", "tensor", "evaluation", "file"]
NOTHING = TensorHashes({}, {})


@dataclass(frozen=True)
class RunDifference:
    kind: Kind
    step: int
    """0: before the first step."""
    sentence: str
    name: str
    """The sample, tensor or metric."""
    unsaved: tuple[str, ...] = ()
    """Buffers with persistent=False that also differ, or differed before."""
    of_a_stream: bool = False
    """Whether it is a stream, whose samples have no index."""


@dataclass(frozen=True)
class Comparison:
    difference: RunDifference | None
    """The first difference, if there is one."""
    unsaved: tuple[str, ...]
    """Buffers with persistent=False that differ. Alone they do not count as a difference: such a
    buffer may be a cache that is filled at its first use."""


def compare(reference: RunTrace, other: RunTrace) -> Comparison:
    """Compare a complete run and an attempt, which may have begun later and ended earlier."""
    found = next(_differences(reference, other), None)
    last = max(other.steps, default=0) if found is None else found.step
    pairs = [
        (one.unsaved, two.unsaved)
        for number, one, two in _states(reference, other)
        if number <= last
    ]
    # Those that differed last come first: they are more likely the cause.
    unsaved = tuple(
        dict.fromkeys(name for one, two in reversed(pairs) for name in _unequal(one, two))
    )
    return Comparison(found and replace(found, unsaved=unsaved), unsaved)


def compare_restored(reference: RunTrace, legs: Sequence[RunTrace]) -> RunDifference | None:
    """Compare the last leg of a run with those before it, in other modes: its samples with those of
    the reference, and the tensors that it restored with those that were saved."""
    *before, leg = legs

    def differences() -> Iterator[RunDifference]:
        saved = next(
            (one.steps[leg.from_step].state for one in before[::-1] if leg.from_step in one.steps),
            None,
        )
        if saved is not None:
            when = f"as restored from the checkpoint of step {leg.from_step}"
            yield from _tensors(saved.saved, leg.start.saved, leg.from_step, when)
        for number, step in leg.steps.items():
            yield from _samples(reference.steps[number], step, is_complete=leg.is_complete(number))

    return next(differences(), None)


def weight_distance(reference: Path, other: Path) -> float:
    """How far the weights of two checkpoints are apart, as a fraction of their norm."""
    from drumline.checkpoint import store  # loads torch

    one, two = (
        store.read(folder, only=("model",)).tensors["model"] for folder in (reference, other)
    )
    pairs = [(one[name].double(), two[name].double()) for name in one]
    difference, size = (
        sum(float(part.square().sum()) for part in parts)
        for parts in ((a - b for a, b in pairs), (a for a, _ in pairs))
    )
    return float((difference / size) ** 0.5) if size else 0.0


def _differences(reference: RunTrace, other: RunTrace) -> Iterator[RunDifference]:
    for number, wanted, found in _states(reference, other):
        if number > other.from_step:
            step = reference.steps[number]
            of_a_stream = any(index is None for index, _ in step.samples.values())
            of_step = _samples(step, other.steps[number], is_complete=other.is_complete(number))
            yield from (replace(one, of_a_stream=of_a_stream) for one in of_step)
            when = f"after step {number}"
        else:
            when = (
                f"as restored from the checkpoint of step {number}"
                if number
                else "before the first step"
            )
        yield from _tensors(wanted.saved, found.saved, number, when)
        yield from _metrics(
            reference.evaluations.get(number), other.evaluations.get(number), number
        )


def _states(
    reference: RunTrace, other: RunTrace
) -> Iterator[tuple[int, TensorHashes, TensorHashes]]:
    """The states that must be equal, by step: at the start of the attempt, and after each of its
    steps."""
    first = reference.steps[other.from_step].state if other.from_step else reference.start
    yield other.from_step, first or NOTHING, other.start
    for number, step in other.steps.items():
        wanted = reference.steps[number].state or NOTHING
        yield number, wanted, step.state or wanted  # rank 0 may have been killed before it wrote it


def _samples(wanted: StepTrace, found: StepTrace, *, is_complete: bool) -> Iterator[RunDifference]:
    step = wanted.step
    if wanted.epoch != found.epoch:
        sentence = f"step {step} is in epoch {found.epoch + 1}, not in epoch {wanted.epoch + 1}"
        yield RunDifference("order", step, sentence, f"epoch {found.epoch + 1}")
        return
    for position in sorted(found.samples.keys() | (wanted.samples.keys() if is_complete else ())):
        one = wanted.samples.get(position)
        other = found.samples.get(position)
        where = f"position {position} of epoch {wanted.epoch + 1}"
        if one is None or other is None:
            sentence = f"step {step} has {'a' if one is None else 'no'} sample at {where}, unlike the run without kills"
            yield RunDifference("order", step, sentence, where)
        elif one[0] != other[0]:
            sentence = f"step {step} took sample {other[0]} at {where}, not sample {one[0]}"
            yield RunDifference("order", step, sentence, f"sample {other[0]}")
        elif one[1] != other[1]:
            name = f"the sample at {where}" if one[0] is None else f"sample {one[0]}"
            place = "" if one[0] is None else f" ({where})"
            yield RunDifference("sample", step, f"{name}{place} differs at step {step}", name)
    for (low, high), rest in found.rests.items():
        if wanted.rests.get((low, high), rest) != rest:
            name = f"the micro-batch of positions {low} to {high - 1}"
            sentence = f"{name} differs at step {step}, in what belongs to no single sample"
            yield RunDifference("batch", step, sentence, name)


def _tensors(
    wanted: Mapping[str, str], found: Mapping[str, str], step: int, when: str
) -> Iterator[RunDifference]:
    if names := _unequal(wanted, found):
        more = len(names) - 1
        others = f", and {plural(more, 'other tensor')} with it" if more else ""
        yield RunDifference("tensor", step, f"{names[0]} differs {when}{others}", names[0])


def _metrics(
    wanted: Mapping[str, str] | None, found: Mapping[str, str] | None, step: int
) -> Iterator[RunDifference]:
    """Compares the evaluation after a step. A killed attempt may lack its last one."""
    if wanted is None or found is None:
        return
    for name in _unequal(wanted, found):
        values = f"{found.get(name, 'missing')}, not {wanted.get(name, 'missing')}"
        sentence = f"{name} of the evaluation after step {step} is {values}"
        yield RunDifference("evaluation", step, sentence, name)


def _unequal(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]


# The manifest contains the time of the save; in progress.json only the step and the cursor must be
# equal.
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
RANDOM = "rng.safetensors"


def compare_checkpoints(
    reference: Path, other: Path, step: int, *, same_world: bool
) -> RunDifference | None:
    """Compare the folders of one step. `same_world`: the random state of every rank must be equal
    too."""
    names = {file.name for folder in (reference, other) for file in folder.iterdir()}
    for name in sorted(names - {MANIFEST} - (set() if same_world else {RANDOM})):
        one, two = (_read_comparable(folder / name) for folder in (reference, other))
        if one != two:
            inner = ""
            if one is not None and two is not None and name.endswith(".safetensors"):
                # As bytes: NaN is not equal to itself.
                first, second = (dict(deserialize(raw)) for raw in (one, two))  # type: ignore[no-untyped-call]
                inner = next(
                    (key for key in sorted(first | second) if first.get(key) != second.get(key)), ""
                )
            sentence = (
                f"{name} of the checkpoint of step {step} differs{inner and f', first in {inner}'}"
            )
            return RunDifference("file", step, sentence, inner or name)
    return None


def _read_comparable(file: Path) -> bytes | None:
    if not file.exists():
        return None
    if file.name != PROGRESS:
        return file.read_bytes()
    progress = json.loads(file.read_bytes())
    return json.dumps([progress["step"], progress["cursor"]]).encode()


@dataclass(frozen=True)
class DifferenceCause:
    what: str
    next_step: str


GENERATORS = "the global generators of torch, numpy or random"
REMEMBERS = "without kills it gives the same bits twice, so it keeps something in memory that a new process lacks"


def not_repeatable(found: RunDifference) -> DifferenceCause:
    """The cause if two runs of the same command differ, both without a kill."""
    if found.kind in ("sample", "batch"):
        return DifferenceCause(
            f"unseeded randomness in the dataset: {found.name} is not the same twice, even without a kill",
            f"draw from {GENERATORS}, which are seeded for every sample, or from the draws that a BatchDataset "
            "is given; seed your own generator from the index",
        )
    if found.kind == "order":
        return DifferenceCause(
            "the dataset is not the same twice: the order of samples follows from its length, the seed and the epoch",
            "let len(dataset) be the same at every start",
        )
    if found.step == 0:
        return DifferenceCause(
            f"unseeded randomness in model(): {found.name} starts from different values each time",
            "draw initial weights from torch's global generator, which is seeded before model() is called",
        )
    where, same = (
        ("evaluation", "weights")
        if found.kind == "evaluation"
        else ("the model or its loss", "samples")
    )
    return DifferenceCause(
        f"a non-deterministic kernel, or randomness in {where} that is not from {GENERATORS}: the {same} are the "
        f"same twice, but {found.name} is not, even without a kill",
        f"try --train.deterministic; draw random numbers in {where} from {GENERATORS}, whose state is saved",
    )


def lost_in_the_kill(found: RunDifference, *, worlds: tuple[int, int]) -> DifferenceCause:
    """The cause if only the killed run differs. `worlds`: ranks of the run without kills, and of
    the leg that differs."""
    if found.kind == "order":
        return DifferenceCause(
            "the dataset changed between the legs: the order of samples depends on its length, the seed and the epoch",
            "let a stream end at the same sample each time it is read"
            if found.of_a_stream
            else "let len(dataset) be the same at every start",
        )
    if found.kind in ("sample", "batch"):
        return DifferenceCause(
            f"state outside the checkpoint, in the dataset: {REMEMBERS}",
            "let the stream's state_dict() and load_state_dict() hold everything that decides the next sample; one "
            "without them is read from its beginning, and must give the same each time"
            if found.of_a_stream
            else "let a sample depend on its index and the seeded generators alone, not on earlier samples",
        )
    used = ", used in evaluation" if found.kind == "evaluation" else ""
    if worlds[0] != worlds[1]:
        return DifferenceCause(
            f"arithmetic that depends on the number of ranks ({worlds[0]} and {worlds[1]}), or state outside the "
            f"checkpoint{used}",
            f"prove it with --world {worlds[0]} first: if that holds, it is the number of ranks",
        )
    if found.unsaved:
        return DifferenceCause(
            f"state outside the checkpoint{used}: the buffer {found.unsaved[0]} has persistent=False and is not saved",
            "register it without persistent=False, or compute it again from what is saved",
        )
    return DifferenceCause(
        f"state outside the checkpoint{used or ', in the model, the task or the optimizer'}: {REMEMBERS}",
        f"keep what {'evaluation' if used else 'the loss'} depends on in a buffer of the model (register_buffer) or in "
        "the optimizer's state; plain attributes of the task or the model, such as counters and caches, are not saved",
    )
