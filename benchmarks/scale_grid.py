"""How far `drumline scale predict` is from what is measured: steps of DDP over gloo between hosts
with slow links.

    make bench-scale         (or: python -m benchmarks.scale_grid --cells 12 --to results.json)
    python -m benchmarks.scale_grid --again docs/scaling-grid.json
    python -m benchmarks.scale_grid --seed 1 --cells 30 --to drawn.jsonl

Hosts are network namespaces on this machine (root is needed), with links limited by tc; compute is
replayed as timed waits (scale_replay.py). For each bandwidth two hosts measure plain all-reduces by
size, and one host profiles each model alone at one bucket size: all else is predicted. No cell is
used to fit anything. `--again` predicts the cells of an earlier run once more, from what it
measured. `--seed` runs jobs and links that are drawn at random (scale_cells.py, scale_drawn.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import scale_drawn
from benchmarks.scale_cells import MOST_MBIT, layer_bytes
from benchmarks.scale_ranks import Ranks, started_ranks
from drumline.runs.profile_result import PARTS, Bucket, GradientTensor, ProfileResult, RankSteps
from drumline.tools.scale.network_model import INSIDE, Link, Network, link_from_points
from drumline.tools.scale.scale_prediction import shape_of, step_s

HOSTS = (2, 4, 8)
MBITS = (50, 100, 200, 500)
CAPS_MB = (1.0, 4.0, 25.0)
MODELS_MB = (2, 8, 24)
PROFILE_CAP_MB = 2.0
COMPUTE_S = 0.3
MOST_S = 4.0
SIZES = (4096, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
ROUNDS = 5
STEPS = 8
PROFILE_STEPS = 24
MIB = 1 << 20


def tensor_times(
    sizes: Sequence[int], buckets: Sequence[Sequence[float]], begin_s: float
) -> list[tuple[int, float]]:
    """The bytes of each gradient, the last layer first, and when it was ready: each layer of a
    replayed model waits as long, whatever its size."""
    tensors: list[tuple[int, float]] = []
    left = list(reversed(sizes))
    for num_bytes, ready_s in buckets:
        count = next(n for n in range(1, len(left) + 1) if sum(left[:n]) >= num_bytes)
        times = [begin_s + (ready_s - begin_s) * (n + 1) / count for n in range(count)]
        tensors += zip(left[:count], times, strict=True)
        left = left[count:]
        begin_s = ready_s
    return tensors


def as_profile(raw: Mapping[str, Any], sizes: Sequence[int]) -> ProfileResult:
    """What `drumline profile` would have written about the replayed steps of one rank."""
    times = tuple(raw["compute_s"])
    parts = {**dict.fromkeys(PARTS, 0.0), "compute": fmean(times)}
    forward_s = 0.30 * fmean(times)
    return ProfileResult(
        task="replay",
        world_size=1,
        num_nodes=1,
        device="cpu",
        backend="gloo",
        first_step=2,
        num_steps=len(times),
        batch_size=None,
        accumulate=1,
        precision=None,
        bucket_cap_mb=PROFILE_CAP_MB,
        settings={},
        step_s=fmean(times),
        parts_s=parts,
        hidden_communication_s=0.0,
        ranks=(
            RankSteps(
                rank=0,
                host="a",
                step_s=times,
                compute_s=times,
                parts_s=parts,
                hidden_communication_s=0.0,
                critical_steps=0,
            ),
        ),
        buckets=tuple(
            Bucket(num_bytes=size, ready_s=ready_s, backward_s=ready_s - forward_s, reduce_s=0.0)
            for size, ready_s in raw["buckets"]
        ),
        tensors=tuple(
            GradientTensor(
                num_bytes=size, ready_s=ready_s, backward_s=ready_s - forward_s, host_s=0.0
            )
            for size, ready_s in tensor_times(sizes, raw["buckets"], forward_s)
        ),
        other_collectives_s=0.0,
        other_collectives=0.0,
        kernels=(),
        syncs=(),
        network_bytes_per_s=None,
    )


def link_of(mbit: float, points: Sequence[Sequence[float]]) -> Link:
    pairs = [(num_bytes, seconds) for num_bytes, seconds in points]
    return link_from_points(f"{mbit:g}mbit", pairs, world_size=2, backend="gloo")


def predicted(profile: ProfileResult, link: Link, hosts: int, cap_mb: float) -> tuple[float, float]:
    """The step of a cell, and that of a rank alone."""
    shape = shape_of(profile).with_bucket_cap(cap_mb)
    network = Network(backend="gloo", between=link, inside=INSIDE["loopback"])
    return step_s(shape, network, hosts, 1), shape.alone_s


def predicted_again(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of an earlier run, with new predictions beside what it measured."""
    rows = []
    for row in results["cells"]:
        link = link_of(row["mbit"], results["points"][str(row["mbit"])])
        raw = results["profiles"][str(row["model_mb"])]
        profile = as_profile(raw, layer_bytes(row["model_mb"] * MIB))
        predicted_s, alone_s = predicted(profile, link, row["hosts"], row["cap_mb"])
        rows.append(
            {
                **row,
                "predicted_s": predicted_s,
                "alone_s": alone_s,
                "error": predicted_s / row["measured_s"] - 1,
            }
        )
    return rows


def chosen(
    cells: list[tuple[int, int, float, int]], count: int | None
) -> list[tuple[int, int, float, int]]:
    """All, or this many, spread over the grid; by bandwidth, so that a link is set once."""
    if count is not None and count < len(cells):
        cells = random.Random(20).sample(cells, count)
    return sorted(cells)


def measure(ranks: Ranks, options: argparse.Namespace) -> list[dict[str, Any]]:
    alone = {"compute_s": COMPUTE_S, "cap_mb": PROFILE_CAP_MB, "steps": PROFILE_STEPS}
    raw = {
        model: ranks.order("profile", 1, tensor_bytes=layer_bytes(model * MIB), **alone)
        for model in MODELS_MB
    }
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"profiles": raw, "points": {}, "cells": rows}
    sizes = [size for size in HOSTS if size <= options.hosts]
    grid = [
        cell
        for cell in itertools.product(MBITS, sizes, CAPS_MB, MODELS_MB)
        if cell[0] * cell[1] <= MOST_MBIT
    ]
    cells = chosen(grid, options.cells)
    for mbit, group in itertools.groupby(cells, key=lambda cell: cell[0]):
        ranks.set_bandwidth(mbit)
        points = ranks.order("calibrate", 2, sizes=SIZES, rounds=ROUNDS)["points"]
        results["points"][mbit] = points
        link = link_of(mbit, points)
        print(
            f"# {mbit} Mbit/s: measured {link.bytes_per_s * 8e-6:.1f} Mbit/s, {link.latency_s * 1e6:.0f} us",
            points,
        )
        for _, hosts, cap_mb, model in group:
            profile = as_profile(raw[model], layer_bytes(model * MIB))
            found_s, alone_s = predicted(profile, link, hosts, cap_mb)
            if found_s > (options.most_s or MOST_S):
                continue
            values = {
                "tensor_bytes": layer_bytes(model * MIB),
                "compute_s": COMPUTE_S,
                "cap_mb": cap_mb,
                "steps": STEPS,
            }
            measured = ranks.order("cell", hosts, **values)
            row = {
                "mbit": mbit,
                "hosts": hosts,
                "cap_mb": cap_mb,
                "model_mb": model,
                "predicted_s": found_s,
                "measured_s": measured["mean_s"],
                "alone_s": alone_s,
                "step_s": measured["step_s"],
                "error": found_s / measured["mean_s"] - 1,
            }
            rows.append(row)
            print(line(row), flush=True)
            if options.to:
                options.to.write_text(json.dumps(results, indent=1) + "\n")
    return rows


def line(row: Mapping[str, Any]) -> str:
    return (
        f"| {row['mbit']} | {row['hosts']} | {row['model_mb']} | {row['cap_mb']:g} | {row['measured_s'] * 1000:.0f} | "
        f"{row['predicted_s'] * 1000:.0f} | {row['error']:+.1%} |"
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    errors = [abs(row["error"]) for row in rows]
    return f"{len(rows)} cells: mean error {fmean(errors):.1%}, worst {max(errors):.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cells", type=int, help="so many cells of the grid, spread over it [all], or of a seed"
    )
    parser.add_argument(
        "--hosts", type=int, default=max(HOSTS), help="at most so many hosts [%(default)s]"
    )
    parser.add_argument(
        "--most-s",
        type=float,
        help=f"no cells with longer steps [{MOST_S:g}; with --seed {scale_drawn.MOST_S:g}]",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help=f"not the grid: --cells [{scale_drawn.CELLS}] jobs and links at random",
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="with --seed: start no cell after so many"
    )
    parser.add_argument(
        "--nice", type=int, default=-19, help="of the ranks; 0: no priority [%(default)s]"
    )
    parser.add_argument(
        "--to",
        type=Path,
        help="a file for the raw results: JSON; with --seed, a line is appended for each cell (.jsonl)",
    )
    parser.add_argument(
        "--again", type=Path, help="such a file: measure nothing, predict its cells again"
    )
    options = parser.parse_args()
    if options.seed is not None or (options.again and options.again.suffix == ".jsonl"):
        scale_drawn.run_drawn(options)
    else:
        run_grid(options)


def run_grid(options: argparse.Namespace) -> None:
    print("| Mbit/s | hosts | model, MiB | bucket, MiB | measured, ms | predicted, ms | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    if options.again:
        rows = predicted_again(json.loads(options.again.read_text()))
        print("\n".join(map(line, rows)))
    else:
        with started_ranks(options.hosts, nice=options.nice) as ranks:
            rows = measure(ranks, options)
    print(f"\n{summary(rows)}")


if __name__ == "__main__":
    main()
