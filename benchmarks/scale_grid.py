"""How far `drumline scale predict` is from what is measured: steps of DDP over gloo between hosts
with slow links.

    make bench-scale         (or: python -m benchmarks.scale_grid --cells 12 --to results.json)
    python -m benchmarks.scale_grid --again docs/scaling-grid.json
    python -m benchmarks.scale_grid --seed 1 --cells 30 --to drawn.json

Hosts are network namespaces on this machine (root is needed), with links limited by tc; compute is
replayed as timed waits (scale_replay.py). For each bandwidth two hosts measure plain all-reduces by
size, and one host profiles each model alone at one bucket size: all else is predicted. No cell is
used to fit anything. `--again` predicts the cells of an earlier run once more, from what it
measured. `--seed` runs jobs and links that are drawn at random (scale_cells.py), each predicted from
a profile of two hosts, as `drumline profile` makes it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.scale_cells import DrawnCell, drawn_cells, layer_bytes
from drumline.base.errors import UsageError
from drumline.runs.profile_result import PARTS, Bucket, GradientTensor, ProfileResult, RankSteps
from drumline.runs.scaling_result import ScaleOptions
from drumline.tools.profile.profile_analysis import analyse
from drumline.tools.scale.network_model import INSIDE, Link, Network, link_from_points
from drumline.tools.scale.scale_prediction import predict
from drumline.tools.scale.simulation import shape_of, step_s
from tests.multinode.hosts import Testbed

HOSTS = (2, 4, 8)
MBITS = (50, 100, 200, 500)
CAPS_MB = (1.0, 4.0, 25.0)
MODELS_MB = (2, 8, 24)
PROFILE_CAP_MB = 2.0
COMPUTE_S = 0.3
MOST_S = 4.0
MOST_MBIT = 2000
"""Of all hosts together: that much keeps two cores busy for 65 to 80% of the time, so more would
wait for the CPU."""
SIZES = (4096, 1 << 18, 1 << 20, 1 << 22, 1 << 23)
ROUNDS = 5
STEPS = 8
PROFILE_STEPS = 24
MIB = 1 << 20
ANSWER_S = 180.0
DRAWN = 30
DRAWN_PROFILE_CAP_MB = 25.0


class Ranks:
    """A rank on each host, which does what is ordered."""

    def __init__(self, bed: Testbed, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        self.jobs = [
            host.start(
                sys.executable,
                "-m",
                "benchmarks.scale_replay",
                str(folder),
                env={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(bed.hosts)),
                    "MASTER_ADDR": bed.hosts[0].address,
                    "MASTER_PORT": "29500",
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank, host in enumerate(bed.hosts)
        ]

    def order(self, kind: str, hosts: int, **values: Any) -> dict[str, Any]:
        name = f"{self.number:04d}"
        part = self.folder / f"{name}.write"
        part.write_text(json.dumps({"kind": kind, "hosts": hosts, "number": self.number, **values}))
        part.replace(self.folder / f"{name}.order")
        self.number += 1
        result = self.folder / f"{name}.result"
        deadline = time.monotonic() + ANSWER_S
        while hosts and not result.exists():
            if time.monotonic() > deadline or not all(job.is_running() for job in self.jobs):
                raise SystemExit("\n".join(job.log.read_text()[-2000:] for job in self.jobs))
            time.sleep(0.02)
        answer: dict[str, Any] = json.loads(result.read_text()) if hosts else {}
        return answer


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


def measure(bed: Testbed, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    ranks = Ranks(bed, folder)
    alone = {"compute_s": COMPUTE_S, "cap_mb": PROFILE_CAP_MB, "steps": PROFILE_STEPS}
    raw = {
        model: ranks.order("profile", 1, tensor_bytes=layer_bytes(model * MIB), **alone)
        for model in MODELS_MB
    }
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {"profiles": raw, "points": {}, "cells": rows}
    sizes = [size for size in HOSTS if size <= len(bed.hosts)]
    grid = [
        cell
        for cell in itertools.product(MBITS, sizes, CAPS_MB, MODELS_MB)
        if cell[0] * cell[1] <= MOST_MBIT
    ]
    cells = chosen(grid, options.cells)
    for mbit, group in itertools.groupby(cells, key=lambda cell: cell[0]):
        for host in bed.hosts:
            host.set_bandwidth(mbit)
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
            if found_s > options.most_s:
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
    ranks.order("end", 0)
    return rows


# Cells from a seed


def measure_drawn(bed: Testbed, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each cell has a link that two hosts measure, a profile of the same two hosts, and a
    prediction from both, as a user makes them; then its steps are measured."""
    ranks = Ranks(bed, folder)
    rows: list[dict[str, Any]] = []
    cells = drawn_cells(
        options.seed, cores=os.cpu_count() or 1, most_mbit=MOST_MBIT, most_s=options.most_s
    )
    for cell in cells:
        if len(rows) == (options.cells or DRAWN):
            break
        if cell.hosts > len(bed.hosts):
            continue
        row = drawn_row(cell, ranks, bed, options.most_s)
        if row is not None:
            rows.append(row)
            print(drawn_line(row), flush=True)
        if options.to:
            options.to.write_text(json.dumps({"seed": options.seed, "drawn": rows}, indent=1))
    ranks.order("end", 0)
    return rows


def drawn_row(cell: DrawnCell, ranks: Ranks, bed: Testbed, most_s: float) -> dict[str, Any] | None:
    """None: its step would be too long to measure."""
    for host in bed.hosts:
        host.set_bandwidth(cell.mbit)
    # No size that takes more than about a second.
    sizes = [size for size in SIZES if size <= max(SIZES[2], cell.mbit * 1e6 / 8)]
    points = ranks.order("calibrate", 2, sizes=sizes, rounds=ROUNDS)["points"]
    job = {"tensor_bytes": cell.tensor_bytes, "work": cell.work, "compute_s": cell.compute_s}
    profile_folder = ranks.folder / f"profile-{ranks.number}"
    ranks.order(
        "trace", 2, **job, cap_mb=DRAWN_PROFILE_CAP_MB, steps=STEPS, folder=str(profile_folder)
    )
    profile = analyse(profile_folder)
    row = {**asdict(cell), "points": points, "profile": asdict(profile)}
    link = link_of(cell.mbit, points)
    network = Network(backend="gloo", between=link, inside=INSIDE["loopback"])
    options = ScaleOptions(nodes=(cell.hosts,), gpus_per_node=1, bucket_cap_mb=cell.cap_mb)
    try:
        (size,) = predict(profile, network, options, source=str(profile_folder)).sizes
    except UsageError as error:
        return {**row, "refused": error.what}
    if size.step_s[1] > most_s:
        return None
    measured_s = ranks.order("cell", cell.hosts, **job, cap_mb=cell.cap_mb, steps=STEPS)["mean_s"]
    low_s, predicted_s, high_s = size.step_s
    return {
        **row,
        "interval_s": [low_s, high_s],
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "error": predicted_s / measured_s - 1,
        "is_within": low_s <= measured_s <= high_s,
    }


def drawn_line(row: Mapping[str, Any]) -> str:
    job = (
        f"| {row['work']} | {row['tensors']} | {row['model_bytes'] / MIB:.1f} | {row['mbit']:g} | "
        f"{row['hosts']} | {row['cap_mb']:g} |"
    )
    if "refused" in row:
        return f"{job} | | refused: {row['refused']} | |"
    low_s, high_s = row["interval_s"]
    where = "" if row["is_within"] else ", outside"
    return (
        f"{job} {row['measured_s'] * 1000:.0f} | {row['predicted_s'] * 1000:.0f} | "
        f"{low_s * 1000:.0f} - {high_s * 1000:.0f}{where} | {row['error']:+.1%} |"
    )


def drawn_summary(rows: Sequence[Mapping[str, Any]]) -> str:
    predicted_rows = [row for row in rows if "refused" not in row]
    within = sum(row["is_within"] for row in predicted_rows)
    counts = f"{within} inside of their intervals, {len(rows) - len(predicted_rows)} refused"
    return f"{summary(predicted_rows)}; {counts}" if predicted_rows else counts


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
    parser.add_argument("--cells", type=int, help="so many cells of the grid, spread over it [all]")
    parser.add_argument(
        "--hosts", type=int, default=max(HOSTS), help="at most so many hosts [%(default)s]"
    )
    parser.add_argument(
        "--most-s", type=float, default=MOST_S, help="no cells with longer steps [%(default)s]"
    )
    parser.add_argument(
        "--seed",
        type=int,
        help=f"not the grid: --cells [{DRAWN}] jobs and links at random, each with a profile of two hosts",
    )
    parser.add_argument("--to", type=Path, help="a JSON file for the raw results")
    parser.add_argument(
        "--again", type=Path, help="such a file: measure nothing, predict its cells again"
    )
    options = parser.parse_args()
    if options.seed is not None:
        print(
            "| work | tensors | model, MiB | Mbit/s | hosts | bucket, MiB | measured, ms |", end=""
        )
        print(" predicted, ms | interval, ms | error |\n|" + " --- |" * 10)
        rows = on_hosts(measure_drawn, options)
        print(f"\n{drawn_summary(rows)}")
        return
    print("| Mbit/s | hosts | model, MiB | bucket, MiB | measured, ms | predicted, ms | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    if options.again:
        rows = predicted_again(json.loads(options.again.read_text()))
        print("\n".join(map(line, rows)))
    else:
        rows = on_hosts(measure, options)
    print(f"\n{summary(rows)}")


def on_hosts(
    measure_rows: Callable[[Testbed, Path, argparse.Namespace], list[dict[str, Any]]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    os.nice(-19)  # a wait for the CPU would count as communication
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "orders"
        folder.mkdir()
        with Testbed(Path(name), [chr(97 + number) for number in range(options.hosts)]) as bed:
            return measure_rows(bed, folder, options)


if __name__ == "__main__":
    main()
