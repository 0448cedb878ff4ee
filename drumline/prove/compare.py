"""The first difference between a run that nobody interrupted and one attempt of another: in the order in which they
came about, samples before tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from drumline.prove.traces import State, Traced, TracedStep

Kind = Literal["order", "sample", "batch", "tensor", "file"]


@dataclass(frozen=True)
class Difference:
    """What is not the same, in words, and where."""

    kind: Kind
    step: int
    """0: before the first."""
    sentence: str
    name: str
    """Of the sample or tensor."""
    unsaved: tuple[str, ...] = ()
    """Buffers that differ too and that no checkpoint holds."""


def first_difference(reference: Traced, other: Traced) -> Difference | None:
    """Between a whole run and an attempt, which may have begun later and ended earlier."""
    return next(_differences(reference, other), None)


def _differences(reference: Traced, other: Traced) -> Iterator[Difference]:
    if other.from_step == 0:
        yield from _states(reference.start, other.start, 0, "before the first step")
    elif (before := reference.steps[other.from_step].state) is not None:
        when = f"as restored from the checkpoint of step {other.from_step}"
        yield from _states(before, other.start, other.from_step, when)
    for number, step in other.steps.items():
        wanted = reference.steps[number]
        yield from _samples(wanted, step, is_whole=other.is_whole(number))
        if wanted.state is not None and step.state is not None:
            yield from _states(wanted.state, step.state, number, f"after step {number}")


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


def _states(wanted: State, found: State, step: int, when: str) -> Iterator[Difference]:
    saved = _unequal(wanted.saved, found.saved)
    unsaved = _unequal(wanted.unsaved, found.unsaved)
    names = [*saved, *unsaved]
    if names:
        more = len(names) - 1
        others = "" if not more else f", and {more} other tensor{'s' if more > 1 else ''} with it"
        yield Difference("tensor", step, f"{names[0]} differs {when}{others}", names[0], tuple(unsaved))


def _unequal(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
