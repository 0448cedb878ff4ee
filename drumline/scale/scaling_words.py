"""Predictions, measurements and checks as lines of text: tables, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drumline.scale.prediction_check import PredictionCheck
from drumline.scale.scaling_result import USUAL, MeasuredSize, Measurement, PredictedSize, Prediction
from drumline.text import duration, plural, two_digits

WORTH = 0.02
"""A change is mentioned when it saves this part of a step."""
PART_WORDS = {
    "compute": "compute, which takes longer than on the fewest ranks",
    "exposed_communication": "exposed communication",
    "waiting_for_rank": "waiting for a slower rank",
    "data": "waiting for data",
    "host_sync": "host synchronisation",
    "gaps": "gaps between operations",
}


def table_lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns aligned to the right, but for the last."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def step_text(seconds: float) -> str:
    return f"{two_digits(seconds * 1000)} ms" if seconds < 1 else duration(seconds)


def count_text(count: float | None) -> str:
    if count is None:
        return "unknown"
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


# Predictions


def prediction_lines(prediction: Prediction) -> Iterator[str]:
    one = prediction
    within = f"; within a node {one.inside} ({one.inside_source})" if one.sizes[-1].ranks > one.sizes[-1].nodes else ""
    yield f"{one.task} on {one.device} over {one.network} ({one.network_source}){within}"
    yield f"from the profile of {plural(one.profile_ranks, 'rank')} in {one.profile}: a step alone takes " + step_text(
        one.alone_s
    )
    yield ""
    headings = ["nodes", "ranks", "step", "(90%)", "efficiency", "(90%)", "exposed", "waiting", "goodput", "(90%)"]
    priced = one.price is not None
    headings += ["samples/day", *(["cost/day"] if priced else [])]
    yield from table_lines(headings, [_predicted_row(size, priced=priced) for size in one.sizes])
    yield ""
    yield from (line for size in one.sizes for line in _changes(one, size))
    yield _paying_line(one)
    yield (
        f"assumed: a node fails every {one.mtbf_hours:,.0f} h, a restart takes {duration(one.restart_s)}, a checkpoint "
        f"every {plural(one.checkpoint_every, 'step')} pauses {duration(one.checkpoint_pause_s)}; compute as profiled; "
        f"the intervals have the model's worst error, {one.model_error:.1%}"
    )


def _predicted_row(size: PredictedSize, *, priced: bool) -> list[str]:
    cost = [] if not priced else ["-" if size.cost_per_day is None else f"{size.cost_per_day:,.0f}"]
    return [
        f"{size.nodes:,}",
        f"{size.ranks:,}",
        step_text(size.step_s),
        f"{step_text(size.low_step_s)} - {step_text(size.high_step_s)}",
        f"{size.efficiency:.0%}",
        f"{size.low_efficiency:.0%} - {size.high_efficiency:.0%}",
        step_text(size.communication_s),
        step_text(size.waiting_s),
        f"{size.goodput:.1%}",
        f"{size.low_goodput:.1%} - {size.high_goodput:.1%}",
        count_text(size.samples_per_day),
        *cost,
    ]


def _changes(prediction: Prediction, size: PredictedSize) -> Iterator[str]:
    where = plural(size.nodes, "node")
    saved = 1 - size.best_bucket_step_s / size.step_s
    if saved >= WORTH:
        yield (
            f"{where}: --dist.bucket_cap_mb {size.best_bucket_cap_mb:g} would shorten the step by {saved:.0%}, to "
            f"{step_text(size.best_bucket_step_s)}"
        )
    if size.best_accumulate > prediction.accumulate:
        times = size.best_accumulate / prediction.accumulate
        yield (
            f"{where}: --train.accumulate {size.best_accumulate} would raise the efficiency to "
            f"{size.best_accumulate_efficiency:.0%}, with a global batch {times:g} times as large"
        )


def _paying_line(prediction: Prediction) -> str:
    limit, largest = f"{prediction.pays_above:.0%}", prediction.sizes[-1].nodes
    if prediction.stops_paying is None:
        return f"up to {plural(largest, 'node')}, each added node brings at least {limit} of one"
    stop = f"{prediction.stops_paying:,}"
    return f"more nodes stop paying after {stop}: each of the next ones brings less than {limit} of a node"


# Measurements


def measurement_lines(measurement: Measurement) -> Iterator[str]:
    yield f"{measurement.task} on {measurement.device}"
    if measurement.shares_cores:
        yield "there are fewer cores or GPUs than ranks: ranks share them, so more ranks cannot be faster here"
    for scaling in dict.fromkeys(size.scaling for size in measurement.sizes):
        sizes = [size for size in measurement.sizes if size.scaling == scaling]
        kept = "each rank keeps its batch" if scaling == "weak" else "all ranks share one batch"
        yield ""
        yield f"{scaling} scaling: {kept}"
        headings = ["ranks", "nodes", "batch", "step", "spread", "speed-up", "efficiency", "usual", "compute"]
        headings += ["exposed", "hidden", "waiting"]
        yield from table_lines(headings, list(map(_measured_row, sizes)))
        yield from (line for size in sizes if (line := why_below_usual(size, sizes[0])))


def _measured_row(size: MeasuredSize) -> list[str]:
    usual = USUAL.get(size.ranks)
    return [
        f"{size.ranks:,}",
        f"{size.nodes:,}",
        "unknown" if size.batch_size is None else f"{size.batch_size:,}",
        step_text(size.step_s),
        step_text(size.spread_s),
        f"{size.speedup:.2f}",
        f"{size.efficiency:.0%}",
        "-" if usual is None else f"{usual[0]:.0%} - {usual[1]:.0%}",
        step_text(size.parts_s.get("compute", 0.0)),
        step_text(size.parts_s.get("exposed_communication", 0.0)),
        step_text(size.hidden_communication_s),
        step_text(size.parts_s.get("waiting_for_rank", 0.0)),
    ]


def why_below_usual(size: MeasuredSize, base: MeasuredSize) -> str | None:
    """The largest part of the step that the fewest ranks do not have, where the efficiency is below what is usual."""
    usual = USUAL.get(size.ranks)
    if usual is None or size.efficiency >= usual[0]:
        return None
    # With one shared batch, a rank of more ranks has less to compute.
    shrink = 1.0 if size.scaling == "weak" else base.ranks / size.ranks
    lost = {part: size.parts_s.get(part, 0.0) - base.parts_s.get(part, 0.0) * shrink for part in PART_WORDS}
    part = max(lost, key=lambda name: lost[name])
    return (
        f"{plural(size.ranks, 'rank')}: {size.efficiency:.0%} is below the usual {usual[0]:.0%}; the largest loss is "
        f"{PART_WORDS[part]}: {step_text(max(0.0, lost[part]))} of a step ({max(0.0, lost[part]) / size.step_s:.0%})"
    )


# Checks


def check_lines(check: PredictionCheck) -> Iterator[str]:
    if not check.checked:
        missing = plural(check.unmeasured, "predicted size")
        yield f"none of {missing} was measured since with the same task, device, batch and ranks"
        return
    headings = ["task", "network", "nodes", "ranks", "predicted", "(90%)", "measured", "error", "in it", "run"]
    rows = [
        [
            one.task,
            one.network,
            f"{one.nodes:,}",
            f"{one.ranks:,}",
            step_text(one.predicted_s),
            f"{step_text(one.low_s)} - {step_text(one.high_s)}",
            step_text(one.measured_s),
            f"{one.error:+.1%}",
            "yes" if one.is_within else "no",
            one.run,
        ]
        for one in check.checked
    ]
    yield from table_lines(headings, rows)
    outside = sum(not one.is_within for one in check.checked)
    yield (
        f"{plural(len(check.checked), 'size')}: mean error {check.mean_error:.1%}, worst {check.worst_error:.1%}; "
        f"{outside} outside of the interval; {check.unmeasured} not measured yet"
    )
