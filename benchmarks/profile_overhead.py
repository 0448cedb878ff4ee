"""What a profile costs: the steps that are profiled, and those after them, against the steps
before, in one run.

    make bench-overhead        (or: python -m benchmarks.profile_overhead --ranks 2 --runs 5; --device cuda on a GPU)

Each run starts the ranks anew. A loop (DDP, many small layers, AdamW) takes some steps, some with
the profiler that `drumline profile` and `log.profile` use, and some more. A block of steps is timed
until the device has finished its last one; the step in which the profiler warms up, and the pause
in which the trace is written, are between the blocks. On the CPU the ratios are of the processor's
time, in which other jobs on the machine show less. Printed are medians over runs; the spread is the
middle half.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.heartbeats import described
from benchmarks.ranks import start_ranks
from drumline.base.rank_environment import Topology
from drumline.rank.profiled.trace_capture import TraceCapture
from drumline.runs.profile_files import JobFacts

WARM_UP = 10
BEFORE = 30
PROFILED = 10
AFTER = 30


class Loop:
    """A job whose steps can be profiled."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        layers = [
            nn.Sequential(nn.Linear(options.width, options.width), nn.ReLU())
            for _ in range(options.layers)
        ]
        self.model = DistributedDataParallel(nn.Sequential(*layers).to(self.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(options.batch, options.width, device=self.device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def block(
        self, steps: range, begin_step: Callable[[int], None] | None = None
    ) -> tuple[float, float]:
        """Seconds for each of these steps, and what the ratios compare."""
        begun = self.now()
        used = time.process_time()
        for number in steps:
            if begin_step is not None and number > steps.start:
                begin_step(number)
            self.step()
        taken = (self.now() - begun) / len(steps)
        used = (time.process_time() - used) / len(steps)
        return taken, taken if self.device.type == "cuda" else used


def run_rank(options: argparse.Namespace) -> None:
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    loop = Loop(options)
    first = WARM_UP + BEFORE + 1
    profiled = range(first, first + PROFILED)
    capture = TraceCapture(
        profiled,
        options.to.parent / "profile",
        Topology(rank=rank, world_size=world_size, local_world_size=world_size),
        JobFacts(task="overhead"),
    )
    loop.block(range(WARM_UP))
    times: dict[str, Any] = {"before": loop.block(range(WARM_UP, first - 1))}
    begin_step = (lambda number: None) if options.control else capture.begin_step
    begin_step(first - 1)
    loop.step()
    begin_step(first)
    times["profiled"] = loop.block(profiled, begin_step)
    begun = loop.now()
    begin_step(profiled.stop)
    times["writing"] = loop.now() - begun
    dist.barrier()
    times["after"] = loop.block(range(AFTER))
    if rank == 0:
        options.to.write_text(json.dumps(times))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--runs", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--layers", type=int, default=24, help="[%(default)s]")
    parser.add_argument("--width", type=int, default=256, help="[%(default)s]")
    parser.add_argument("--batch", type=int, default=64, help="of each rank [%(default)s]")
    parser.add_argument(
        "--control", action="store_true", help="without the profiler: what the order of blocks does"
    )
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
        return 0
    rounds = []
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "times.json"
            if code := start_ranks(
                options.ranks, "benchmarks.profile_overhead", *sys.argv[1:], "--to", str(file)
            ):
                return code
            rounds.append(json.loads(file.read_text()))
    print(
        f"{options.layers} layers of {options.width}, batch {options.batch}, {options.ranks} ranks, {options.device},"
    )
    print(
        f"torch {torch.__version__}, n = {options.runs} runs of {BEFORE}, {PROFILED} profiled and {AFTER} steps"
    )
    for name in ("before", "profiled", "after"):
        print(f"  {name:<18} {described([times[name][0] * 1e3 for times in rounds], 2)} ms a step")
    for name in ("profiled", "after"):
        ratios = [times[name][1] / times["before"][1] for times in rounds]
        print(f"  {name + ' / before':<18} {described(ratios, 3)}")
    print(
        f"  {'writing the trace':<18} {described([times['writing'] * 1e3 for times in rounds], 0)} ms, once"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
