"""The first difference between a run that nobody interrupted and one attempt of another: in the order in which they
came about: samples, tensors, evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from drumline.prove.traces import State, Traced, TracedStep

Kind = Literal["order", "sample", "batch", "tensor", "evaluation", "file"]

NOTHING = State({}, {})


@dataclass(frozen=True)
class Difference:
    """What is not the same, in words, and where."""

    kind: Kind
    step: int
    """0: before the first."""
    sentence: str
    name: str
    """Of the sample, tensor or metric."""
    unsaved: tuple[str, ...] = ()
    """Buffers that no checkpoint holds and that differ too, or did before."""
    of_a_stream: bool = False
    """Its samples have no index."""


@dataclass(frozen=True)
class Comparison:
    """What came out of comparing two traces."""

    difference: Difference | None
    """The first."""
    unsaved: tuple[str, ...]
    """Buffers that no checkpoint holds and that differ. Alone they are no difference of the runs: a cache that is
    filled at the first use is such a buffer."""


def compare(reference: Traced, other: Traced) -> Comparison:
    """Between a whole run and an attempt, which may have begun later and ended earlier."""
    found = next(_differences(reference, other), None)
    unsaved = tuple(
        _unsaved(reference, other, up_to=max(other.steps, default=0) if found is None else found.step)
    )
    return Comparison(found and replace(found, unsaved=unsaved), unsaved)


def _differences(reference: Traced, other: Traced) -> Iterator[Difference]:
    for number, wanted, found in _states(reference, other):
        if number > other.from_step:
            step = reference.steps[number]
            of_step = _samples(step, other.steps[number], is_whole=other.is_whole(number))
            yield from (replace(one, of_a_stream=step.is_of_a_stream) for one in of_step)
            when = f"after step {number}"
        else:
            when = f"as restored from the checkpoint of step {number}" if number else "before the first step"
        yield from _tensors(wanted.saved, found.saved, number, when)
        yield from _metrics(reference.evaluations.get(number), other.evaluations.get(number), number)


def _states(reference: Traced, other: Traced) -> Iterator[tuple[int, State, State]]:
    """What is to be the same, by step: at the start of the attempt, and after each step of it."""
    first = reference.steps[other.from_step].state if other.from_step else reference.start
    yield other.from_step, first or NOTHING, other.start
    for number, step in other.steps.items():
        wanted = reference.steps[number].state or NOTHING
        yield number, wanted, step.state or wanted  # rank 0 may have been killed before it wrote that down


def _samples(wanted: TracedStep, found: TracedStep, *, is_whole: bool) -> Iterator[Difference]:
    step = wanted.step
    if wanted.epoch != found.epoch:
        sentence = f"step {step} is one of epoch {found.epoch + 1}, not of epoch {wanted.epoch + 1}"
        yield Difference("order", step, sentence, f"epoch {found.epoch + 1}")
        return
    positions = sorted(found.samples.keys() | (wanted.samples.keys() if is_whole else ()))
    for position in positions:
        one, other = wanted.samples.get(position), found.samples.get(position)
        where = f"position {position} of epoch {wanted.epoch + 1}"
        if one is None:
            sentence = f"step {step} has a sample at {where}, unlike the run without kills"
            yield Difference("order", step, sentence, where)
        elif other is None:
            sentence = f"step {step} has no sample at {where}, where there is one in the run without kills"
            yield Difference("order", step, sentence, where)
        elif one[0] != other[0]:
            sentence = f"step {step} took sample {other[0]} at {where}, not sample {one[0]}"
            yield Difference("order", step, sentence, f"sample {other[0]}")
        elif one[1] != other[1]:
            name = f"the sample at {where}" if one[0] is None else f"sample {one[0]}"
            place = "" if one[0] is None else f" ({where})"
            yield Difference("sample", step, f"{name}{place} has other bits at step {step}", name)
    for (low, high), rest in found.rests.items():
        if wanted.rests.get((low, high), rest) != rest:
            name = f"the micro-batch of positions {low} to {high - 1}"
            sentence = f"{name} has other bits at step {step}, in what belongs to no single sample"
            yield Difference("batch", step, sentence, name)


def _tensors(
    wanted: Mapping[str, str], found: Mapping[str, str], step: int, when: str
) -> Iterator[Difference]:
    if names := _unequal(wanted, found):
        more = len(names) - 1
        others = "" if not more else f", and {more} other tensor{'s' if more > 1 else ''} with it"
        yield Difference("tensor", step, f"{names[0]} differs {when}{others}", names[0])


def _metrics(
    wanted: Mapping[str, str] | None, found: Mapping[str, str] | None, step: int
) -> Iterator[Difference]:
    """Of the evaluation after a step. A killed attempt may lack its last."""
    if wanted is None or found is None:
        return
    for name in _unequal(wanted, found):
        values = f"{found.get(name, 'missing')}, not {wanted.get(name, 'missing')}"
        yield Difference("evaluation", step, f"{name} of the evaluation after step {step} is {values}", name)


def _unsaved(reference: Traced, other: Traced, *, up_to: int) -> list[str]:
    """Those that differ last come first: they are the likelier cause of what differs then."""
    pairs = [(one.unsaved, two.unsaved) for number, one, two in _states(reference, other) if number <= up_to]
    return list(dict.fromkeys(name for one, two in reversed(pairs) for name in _unequal(one, two)))


def _unequal(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
