"""Predictions, measurements and checks as lines of text: tables, and what follows from them.

nodes  ranks   step         (90%)  efficiency      (90%)  exposed  waiting
    2     16  46 ms  43 ms - 49 ms       91.3%  85% - 98%     3 ms     1 ms
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from drumline.base.text import columns, duration, join_names, plural, two_digits
from drumline.runs.profile_result import CROWDED, PART_NAMES
from drumline.runs.scaling_result import (
    MeasuredSize,
    Measurement,
    PredictedSize,
    Prediction,
    Range,
    usual_efficiency,
)
from drumline.tools.scale.prediction_check import PredictionCheck

WORTH = 0.02
WORTH_A_BATCH = 0.05
"""A change is mentioned when it saves this part of a step; one of the batch when it raises the
efficiency by this."""
MOST_SPREAD = 0.5
"""The standard deviation of steps, as a part of a step, from which on efficiencies are not reliable."""


def table_lines(headings: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned to the right; headings are separated by commas."""
    names = headings.split(",")
    return columns([names, *rows], right=range(len(names)))


def step_text(seconds: float) -> str:
    """`42 ms`, `1.2 s`."""
    return f"{two_digits(seconds * 1000)} ms" if seconds < 1 else duration(seconds)


def count_text(count: float) -> str:
    """`950`, `1.25 M`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"

    return f"{count:.0f}"


def _steps(value: Range) -> list[str]:
    """Two cells: a time, and its interval."""
    return [step_text(value[1]), f"{step_text(value[0])} - {step_text(value[2])}"]


def _parts(value: Range) -> list[str]:
    """Two cells: a fraction, and its interval."""
    return [f"{value[1]:.1%}", f"{value[0]:.0%} - {value[2]:.0%}"]


def prediction_lines(prediction: Prediction) -> Iterator[str]:
    """The table of sizes, then what to change and what was assumed."""
    options = prediction.options
    yield from _sources(prediction)
    yield ""
    interval = "(90%)" if prediction.is_model_compared else "(interval)"
    headings = f"nodes,ranks,step,{interval},efficiency,{interval},exposed,waiting,goodput,samples/day,cost/day"
    yield from table_lines(headings, list(map(_predicted_row, prediction.sizes)))
    yield ""
    yield from (line for size in prediction.sizes for line in _changes(prediction, size))
    limit = f"{options.pays_above:.0%}"
    largest = plural(prediction.sizes[-1].nodes, "node")

    if prediction.stops_paying is None:
        yield f"up to {largest}, each added node brings at least {limit} of one"
    else:
        yield (
            f"more nodes stop paying after {prediction.stops_paying:,}: each of the next brings less "
            f"than {limit} of one"
        )

    error = f"the intervals have the model's worst error, {prediction.model_error:.1%}"
    if not prediction.is_model_compared:
        error = (
            f"the intervals add {prediction.model_error:.0%} on both sides: NCCL's model was not "
            "compared with a cluster"
        )

    yield (
        f"assumed: a node fails every {options.mtbf_hours:,.0f} h, a restart takes {duration(options.restart_s)}, "
        f"a checkpoint every {plural(options.checkpoint_every, 'step')} pauses {duration(options.checkpoint_pause_s)}; "
        f"{error}"
    )


def _sources(prediction: Prediction) -> Iterator[str]:
    """What a prediction is of, and what it is from:

    train.py on NVIDIA H100 over 100gbit (nominal 100 Gbit/s a node, 96% of it with RDMA, ...)
    from runs/a, 2 ranks: a step alone takes 42 ms
    """
    yield f"{prediction.task} on {prediction.device} over {prediction.network} ({prediction.network_source})"
    if prediction.options.gpus_per_node > 1:
        yield f"within a node {prediction.inside} ({prediction.inside_source})"

    ranks = plural(prediction.profile_ranks, "rank")
    yield f"from {prediction.profile}, {ranks}: a step alone takes {step_text(prediction.alone_s)}"
    if (prediction.cpu_wait_part or 0.0) >= CROWDED:
        yield (
            f"the profile was taken on a crowded machine: a rank waited for a CPU in {prediction.cpu_wait_part:.0%} "
            "of its steps, so the intervals are wider by as much on both sides; profile it again when nothing else runs"
        )


def _predicted_row(size: PredictedSize) -> list[str]:
    """A row of the table of predictions."""
    samples = "-" if size.samples_per_day is None else count_text(size.samples_per_day)
    cost = "-" if size.cost_per_day is None else f"{size.cost_per_day:,.0f}"
    exposed = step_text(size.communication_s)
    waiting = step_text(size.waiting_s)
    first = [
        f"{size.nodes:,}",
        f"{size.ranks:,}",
        *_steps(size.step_s),
        *_parts(size.efficiency),
        exposed,
        waiting,
    ]

    return [*first, f"{size.goodput:.1%}", samples, cost]


def _changes(prediction: Prediction, size: PredictedSize) -> Iterator[str]:
    """Another bucket size or accumulation, where it is worth a change:

    8 nodes: --train.accumulate 4 would raise the efficiency to 91%, with a global batch 4 times ...
    """
    where = plural(size.nodes, "node")
    saved = 1 - size.best_bucket_step_s / size.step_s[1]
    if saved >= WORTH:
        yield (
            f"{where}: --dist.bucket_cap_mb {size.best_bucket_cap_mb:g} would shorten the step by {saved:.0%}, to "
            f"{step_text(size.best_bucket_step_s)}"
        )

    if size.best_accumulate_efficiency - size.efficiency[1] >= WORTH_A_BATCH:
        yield (
            f"{where}: --train.accumulate {size.best_accumulate} would raise the efficiency to "
            f"{size.best_accumulate_efficiency:.0%}, with a global batch "
            f"{size.best_accumulate / prediction.accumulate:g} times as large"
        )


def measurement_lines(measurement: Measurement) -> Iterator[str]:
    """A table for each kind of scaling, with why a size is below what is usual, and what was too noisy."""
    yield f"{measurement.task} on {measurement.device}"
    if measurement.shares_cores:
        yield "there are fewer cores or GPUs than ranks: ranks share them, so more ranks cannot be faster here"

    for scaling, meaning in (
        ("weak", "each rank keeps its batch"),
        ("strong", "all ranks share one batch"),
    ):
        if sizes := [size for size in measurement.sizes if size.scaling == scaling]:
            yield f"{scaling} scaling: {meaning}"
            headings = "ranks,nodes,batch,step,spread,speed-up,efficiency,usual,compute,exposed,hidden,waiting"
            yield from table_lines(headings, list(map(_measured_row, sizes)))
            yield from (line for size in sizes if (line := why_below_usual(size, sizes[0])))
            yield from map(_noise, filter(_is_noisy, sizes))


def _measured_row(size: MeasuredSize) -> list[str]:
    """A row of the table of measurements."""
    usual_range = usual_efficiency(size.ranks)
    usual = "-" if usual_range is None else "{:.0%} - {:.0%}".format(*usual_range)
    parts = ("compute", "exposed_communication", "waiting_for_rank")
    compute, exposed, waiting = (step_text(size.parts_s.get(part, 0.0)) for part in parts)
    times = [
        step_text(size.step_s),
        step_text(size.spread_s),
        f"{size.speedup:.2f}",
        f"{size.efficiency:.0%}",
        usual,
    ]
    sizes = [f"{size.ranks:,}", f"{size.nodes:,}", f"{size.batch_size:,}"]

    return [*sizes, *times, compute, exposed, step_text(size.hidden_communication_s), waiting]


def _is_noisy(size: MeasuredSize) -> bool:
    """Whether its steps vary too much to compare it with others."""
    return size.spread_s > MOST_SPREAD * size.step_s


def _noise(size: MeasuredSize) -> str:
    """What to do about a size whose steps vary too much."""
    return (
        f"{plural(size.ranks, 'rank')}: steps vary by {step_text(size.spread_s)} around {step_text(size.step_s)}, so "
        "efficiencies with them are not reliable: measure again when nothing else runs there"
    )


def why_below_usual(size: MeasuredSize, base: MeasuredSize) -> str | None:
    """The largest part of the step that the fewest ranks do not have, where the efficiency is below
    what is usual:

    8 ranks: 61% is below the usual 80%; the largest loss is exposed communication: 12 ms of a step (20%)
    """
    usual = usual_efficiency(size.ranks)
    if usual is None or size.efficiency >= usual[0]:
        return None

    # With one shared batch, a rank of more ranks has less to compute.
    shrink = 1.0 if size.scaling == "weak" else base.ranks / size.ranks
    lost = {
        part: size.parts_s.get(part, 0.0) - base.parts_s.get(part, 0.0) * shrink
        for part in PART_NAMES
    }
    part = max(lost, key=lost.__getitem__)
    lost_s = max(0.0, lost[part])
    longer = ", which takes longer than on the fewest ranks" if part == "compute" else ""

    return (
        f"{plural(size.ranks, 'rank')}: {size.efficiency:.0%} is below the usual {usual[0]:.0%}; the largest loss is "
        f"{PART_NAMES[part]}{longer}: {step_text(lost_s)} of a step ({lost_s / size.step_s:.0%})"
    )


def check_lines(check: PredictionCheck) -> Iterator[str]:
    """The predictions that were measured, their errors, and what was not compared."""
    if check.sizes:
        rows = []
        for size in check.sizes:
            times = [*_steps(size.predicted_s), step_text(size.measured_s), f"{size.error:+.1%}"]
            rows.append(
                [size.task, size.network, f"{size.nodes:,}", f"{size.ranks:,}", *times, size.run]
            )

        yield from table_lines(
            "task,network,nodes,ranks,predicted,(interval),measured,error,run", rows
        )
        errors = [abs(size.error) for size in check.sizes]
        outside = sum(not size.is_within for size in check.sizes)

        yield (
            f"{plural(len(rows), 'size')}: mean error {fmean(errors):.1%}, worst {max(errors):.1%}; {outside} outside "
            f"of the interval; {check.unmeasured} not measured yet"
        )
    elif check.unmeasured:
        missing = plural(check.unmeasured, "predicted size")
        yield f"none of {missing} was measured since with the same task, device, batch, nodes and ranks"

    if check.other_networks:
        yield (
            f"not compared: predictions for {join_names(check.other_networks)}; if the measured runs used that "
            "network, name it with --network"
        )
