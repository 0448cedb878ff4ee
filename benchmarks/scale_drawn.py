"""The cells of `benchmarks.scale_grid --seed`: each has a link that two hosts measure, a profile of
the same two hosts as `drumline profile` makes it, a prediction from both, and steps that are
measured on its hosts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.scale_cells import MIB, DrawnCell, drawn_cells
from benchmarks.scale_ranks import Ranks, RanksError, started_ranks
from drumline.base.errors import DrumlineError, UsageError
from drumline.base.untrusted import from_json
from drumline.runs.profile_result import ProfileResult
from drumline.runs.scaling_result import ScaleOptions
from drumline.tools.profile.profile_analysis import analyse
from drumline.tools.scale.network_model import INSIDE, Network, link_from_points
from drumline.tools.scale.scale_prediction import predict

Row = dict[str, Any]
CELLS = 30
MOST_S = 2.5
"""A cell has about 45 steps."""
SIZES = (4096, 1 << 18, 1 << 20, 1 << 21, 1 << 22, 1 << 23)
ROUNDS = 9
PROFILE_CAP_MB = 25.0
PROFILED_STEPS = 8
STEPS = 8
STEADY = 0.04
"""The halves of a cell differ by so much at most. Where they differ by more, the machine was not
quiet: the cell is measured again, whatever was predicted."""
ATTEMPTS = 3
HEADINGS = (
    "work",
    "tensors",
    "model, MiB",
    "Mbit/s",
    "hosts",
    "bucket, MiB",
    "CPU wait",
    "measured, ms",
    "predicted, ms",
    "interval, ms",
    "error",
)


def run_drawn(options: argparse.Namespace) -> None:
    """Measures the cells of a seed, or predicts those of a file again, and prints them."""
    print(f"| {' | '.join(HEADINGS)} |\n|{' --- |' * len(HEADINGS)}", flush=True)
    rows = []
    for row in predicted_again(options.again) if options.again else measured_rows(options):
        rows.append(row)
        print(drawn_line(row), flush=True)
        if options.to:
            with options.to.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"\n{drawn_summary(rows)}")


def measured_rows(options: argparse.Namespace) -> Iterator[Row]:
    """One for each cell, as it is measured. After a failure the hosts are made anew."""
    deadline = time.monotonic() + options.minutes * 60
    cores = len(os.sched_getaffinity(0))
    drawn = drawn_cells(options.seed, cores=cores, most_s=options.most_s or MOST_S)
    usable = (cell for cell in drawn if cell.hosts <= options.hosts)
    cells = list(itertools.islice(usable, options.cells or CELLS))
    count = len(cells)
    while cells and time.monotonic() < deadline:
        with started_ranks(options.hosts, nice=options.nice) as ranks:
            has_failed = False
            while cells and not has_failed and time.monotonic() < deadline:
                cell = cells.pop(0)
                print(f"# {count - len(cells)} of {count}: {cell}", file=sys.stderr, flush=True)
                row = measured_row(cell, ranks)
                has_failed = "failed" in row
                yield row
    if cells:
        print(f"# no time for {len(cells)} cells", file=sys.stderr)


def measured_row(cell: DrawnCell, ranks: Ranks) -> Row:
    begin = time.monotonic()
    row = asdict(cell)
    try:
        row.update(_measured_steadily(cell, ranks))
    except (RanksError, DrumlineError, OSError, ValueError) as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    return {**row, "load": os.getloadavg()[0], "seconds": time.monotonic() - begin}


def _measured_steadily(cell: DrawnCell, ranks: Ranks) -> Row:
    """Of the attempts, the first in which both halves are as long; else the one whose halves differ
    least."""
    attempts: list[Row] = []
    while len(attempts) < ATTEMPTS and (not attempts or _drift(attempts[-1]) > STEADY):
        attempts.append(_measured(cell, ranks))
    steadiest = min(attempts, key=_drift)
    return {**steadiest, "attempts": len(attempts), "drift": _drift(steadiest)}


def _drift(row: Row) -> float:
    """By how much one half of a cell's steps was longer than the other."""
    return float(max(row["halves_s"]) / min(row["halves_s"]) - 1)


def _measured(cell: DrawnCell, ranks: Ranks) -> Row:
    ranks.set_bandwidth(cell.mbit)
    # No size that takes more than about a second.
    sizes = [size for size in SIZES if size <= max(SIZES[2], cell.mbit * 1e6 / 8)]
    points = ranks.order("calibrate", 2, sizes=sizes, rounds=ROUNDS)["points"]
    job = {"tensor_bytes": cell.tensor_bytes, "work": cell.work, "compute_s": cell.compute_s}
    folder = ranks.folder / f"profile-{ranks.number}"
    # The machine's own speed drifts by some percent in a minute: half of the steps are before the
    # profile, half behind it.
    before = ranks.order("cell", cell.hosts, **job, cap_mb=cell.cap_mb, steps=STEPS)
    ranks.order("trace", 2, **job, cap_mb=PROFILE_CAP_MB, steps=PROFILED_STEPS, folder=str(folder))
    profile = analyse(folder)
    behind = ranks.order("cell", cell.hosts, **job, cap_mb=cell.cap_mb, steps=STEPS)
    halves = (before, behind)
    measured_s = fmean(half["mean_s"] for half in halves)
    row = {
        "points": points,
        "profile": asdict(profile),
        "measured_s": measured_s,
        "halves_s": [half["mean_s"] for half in halves],
        "step_s": [seconds for half in halves for seconds in half["step_s"]],
        "cpu_s": fmean(half["cpu_s"] for half in halves),
        "cpu_wait_s": fmean(half["cpu_wait_s"] for half in halves),
    }
    return {**row, **prediction_of(cell, points, profile, measured_s)}


def prediction_of(
    cell: DrawnCell, points: Sequence[Sequence[float]], profile: ProfileResult, measured_s: float
) -> Row:
    pairs = [(num_bytes, seconds) for num_bytes, seconds in points]
    link = link_from_points(f"{cell.mbit:g}mbit", pairs, world_size=2, backend="gloo")
    network = Network(backend="gloo", between=link, inside=INSIDE["loopback"])
    options = ScaleOptions(nodes=(cell.hosts,), gpus_per_node=1, bucket_cap_mb=cell.cap_mb)
    try:
        prediction = predict(profile, network, options, source="")
    except UsageError as error:
        return {"refused": error.what}
    low_s, predicted_s, high_s = prediction.sizes[0].step_s
    return {
        "cpu_wait_part": prediction.cpu_wait_part,
        "interval_s": [low_s, high_s],
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1,
        "is_within": low_s <= measured_s <= high_s,
    }


def predicted_again(path: Path) -> Iterator[Row]:
    """The cells of an earlier run, with new predictions beside what it measured."""
    for text in path.read_text().splitlines():
        row = json.loads(text)
        if "profile" not in row:
            yield row
            continue
        cell = DrawnCell(**{name: row[name] for name in DrawnCell.__dataclass_fields__})
        profile = from_json(ProfileResult, row["profile"])
        row.pop("refused", None)
        yield {**row, **prediction_of(cell, row["points"], profile, row["measured_s"])}


def drawn_line(row: Mapping[str, Any]) -> str:
    job = (
        f"| {row['work']} | {row['tensors']} | {row['model_bytes'] / MIB:.1f} | {row['mbit']:g} | "
        f"{row['hosts']} | {row['cap_mb']:g} |"
    )
    if "failed" in row:
        reason = str(row["failed"]).strip().splitlines()[-1]
        return f"{job} | | | failed: {reason} | |"
    measured = f"{row['measured_s'] * 1000:.0f}"
    if "refused" in row:
        return f"{job} | {measured} | | refused: {row['refused']} | |"
    low_s, high_s = row["interval_s"]
    where = "" if row["is_within"] else ", outside"
    return (
        f"{job} {row['cpu_wait_part'] or 0.0:.0%} | {measured} | {row['predicted_s'] * 1000:.0f} | "
        f"{low_s * 1000:.0f} - {high_s * 1000:.0f}{where} | {row['error']:+.1%} |"
    )


def drawn_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    compared = [row for row in rows if "error" in row]
    refused = sum("refused" in row for row in rows)
    failed = sum("failed" in row for row in rows)
    unsteady = sum(row.get("drift", 0.0) > STEADY for row in rows)
    counts = (
        f"{refused} refused, {failed} failed, {unsteady} on an unsteady machine in all attempts"
    )
    if not compared:
        return f"no cell was compared; {counts}"
    errors = [abs(row["error"]) for row in compared]
    within = sum(row["is_within"] for row in compared)
    return (
        f"{len(compared)} cells: mean error {fmean(errors):.1%}, worst {max(errors):.1%}; "
        f"{within} ({within / len(compared):.0%}) inside of their intervals; {counts}"
    )
