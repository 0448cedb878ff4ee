"""What the lines of the user's code cost a rank: samples of its stack, by the function that ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from drumline.runs.profile_files import SampledLine, StackSamples
from drumline.runs.profile_result import LineCost

Seconds = NDArray[np.float64]
SampleCosts = Mapping[str, Seconds]
"""What each sample costs, as means over the steps, by the fields of `LineCost`."""
REST = "rest"
OUR_LIBRARIES = ("torch", "drumline")
"""What they do is not the user's Python."""
MOST_LINES = 20
FORWARD_PHASES = ("forward", "to the device", REST)
"""Where operations usually have a gradient, and where the user's code may call what is no operation of
torch: elsewhere torch's own code has its own phases."""
DIFFERENTIATED = 0.2
"""Of what code computes: with less in operations that have a gradient, it has none. Some of those
before and after it are in its first and last sample."""


def place_of(line: SampledLine) -> str:
    """`train.py:7`."""
    return f"{line.file}:{line.line}"


def line_of(stacks: StackSamples, number: int) -> SampledLine:
    """The line of a sample."""
    return stacks.lines[stacks.samples[number].line]


def is_user_s_own(stacks: StackSamples) -> NDArray[np.bool_]:
    """In which samples neither torch nor Drumline runs."""
    libraries = [stacks.lines[sample.line].library for sample in stacks.samples]
    return ~np.isin(libraries, OUR_LIBRARIES)


def costliest(
    stacks: StackSamples,
    costs: SampleCosts,
    operations: NDArray[np.int64] | None = None,
    steps: NDArray[np.int64] | None = None,
) -> list[LineCost]:
    """The functions of the user's code by their time in each phase, with the costliest line of
    each. `operations`: how many begin in each sample; `steps`: its step, from 0."""
    functions: dict[tuple[int, str, str, str], list[int]] = defaultdict(list)
    for number, sample in enumerate(stacks.samples):
        line = stacks.lines[sample.line]
        if line.file and costs["seconds"][number] > 0:
            caller = _caller_of(stacks, number)
            function = "" if caller else line.function
            functions[sample.phase, line.file, function, caller].append(number)

    lines = []
    for (_, _, _, caller), samples in functions.items():
        cost = _cost_of(stacks, costs, samples, caller)
        if operations is not None and steps is not None:
            of_line = [
                number for number in samples if place_of(line_of(stacks, number)) == cost.source
            ]
            by_itself = [number for number in of_line if not line_of(stacks, number).library]
            by_library = [number for number in of_line if line_of(stacks, number).library]
            cost = replace(
                cost,
                operations=usual_count(operations, steps, by_itself),
                library_operations=usual_count(operations, steps, by_library),
            )

        lines.append(cost)

    return costliest_first(lines)


def _caller_of(stacks: StackSamples, number: int) -> str:
    """The statement between the phases of a step that led to a sample: what it calls in a file is
    one cost. Empty: there is none, or it is in the function itself."""
    if not stacks.statements or stacks.phases[stacks.samples[number].phase] != REST:
        return ""

    statement = stacks.lines[stacks.statements[number]]
    is_itself = statement.function == line_of(stacks, number).function
    return "" if is_itself or not statement.file else place_of(statement)


def _cost_of(
    stacks: StackSamples, costs: SampleCosts, samples: Sequence[int], caller: str
) -> LineCost:
    """The sums over some samples, at their costliest line."""
    seconds = costs["seconds"]
    lines_s: dict[tuple[int, str], float] = defaultdict(float)
    for number in samples:
        phase = stacks.samples[number].phase
        lines_s[phase, place_of(line_of(stacks, number))] += seconds[number]

    phase, place = max(lines_s, key=lines_s.__getitem__)
    line = next(line for line in stacks.lines if place_of(line) == place)
    sums = {name: float(values[samples].sum()) for name, values in costs.items()}
    return LineCost(
        phase=stacks.phases[phase],
        source=place,
        function=line.function,
        text=line.source,
        caller=caller,
        **sums,
    )


def usual_count(
    counts: NDArray[np.int64], steps: NDArray[np.int64], samples: Sequence[int]
) -> float:
    """The median over all steps: a sample that lasts long on a busy machine may have the operations
    of another line."""
    num_steps = int(steps.max()) + 1
    return float(np.median(np.bincount(steps[samples], counts[samples], num_steps)))


def costliest_first(lines: Iterable[LineCost]) -> list[LineCost]:
    """The MOST_LINES lines that take longest."""
    return sorted(lines, key=lambda line: -line.seconds)[:MOST_LINES]


def without_gradient(
    stacks: StackSamples,
    seconds: Seconds,
    computes_s: Seconds,
    differentiated_s: Seconds,
) -> Iterator[LineCost]:
    """The user's statements that compute with torch and have no gradient, and functions in the
    others, by their costliest line. The times are of each sample."""
    # a captured step has no operations
    if not stacks.statements or not differentiated_s.any():
        return

    def has_gradient(samples: Sequence[int]) -> bool:
        """Whether most of it is no computing, or enough of that has a gradient."""
        computed_s = computes_s[samples].sum()
        return bool(
            computed_s < seconds[samples].sum() / 2
            or differentiated_s[samples].sum() >= DIFFERENTIATED * computed_s
        )

    statements: dict[int, list[int]] = defaultdict(list)
    for number, sample in enumerate(stacks.samples):
        if stacks.phases[sample.phase] in FORWARD_PHASES:
            statements[stacks.statements[number]].append(number)

    costs = {"seconds": seconds}
    functions: dict[tuple[str, str], list[int]] = defaultdict(list)
    for statement, samples in statements.items():
        line = stacks.lines[statement]
        if not has_gradient(samples):
            if line.file:
                yield _cost_of(stacks, costs, samples, place_of(line))
            continue

        for number in samples:
            line = line_of(stacks, number)
            if line.file:
                functions[line.file, line.function].append(number)

    for samples in functions.values():
        if not has_gradient(samples):
            yield _cost_of(stacks, costs, samples, "")
