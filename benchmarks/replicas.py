"""What the replica comparison costs: one comparison of all ranks' tensors against a training step
of the same model.

    make bench-exact        (or: python -m benchmarks.replicas --size 1,10: millions of parameters)

A GPT of that size takes steps with AdamW under DDP; comparisons of its parameters and optimizer
state come in between. Printed are medians: of a step, of a comparison, and what one comparison in
100 steps (the default) adds to a step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.ranks import start_ranks
from drumline.parallel.replicas import ReplicaComparison, replica_tensors
from drumline.rank.tensor_hash import combine, hash_tensors
from drumline.training.manager import RunManager
from drumline.training.tasks.built_in import GPT

DEFAULT_EVERY = 100
CONTEXT = 128
BATCH = 8
WIDTH = 256


def seconds(work: Callable[[], None], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def run_rank(size: float, rounds: int) -> None:
    layers = max(1, round(size * 1e6 / (12 * WIDTH**2)))
    with RunManager(seed=0) as ddp:
        model = ddp.wrap(GPT(vocab_size=256, context=CONTEXT, layers=layers, heads=8, width=WIDTH))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        comparison = ReplicaComparison(model, optimizer, host=ddp.host, device=ddp.device)
        tokens = torch.randint(0, 256, (BATCH // ddp.world_size, CONTEXT + 1), device=ddp.device)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            scores = model(tokens[:, :-1])
            functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()

        def compare() -> None:
            if ddp.world_size > 1:
                comparison.check(0)
            else:  # a single rank: only its own part, which is most of the time
                tensors = replica_tensors(model, optimizer, include_buffers=True)
                combine(hash_tensors(list(tensors.values()), ddp.device), list(tensors)).item()

        steps = []
        checks = []
        for _ in range(rounds + 2):
            steps += [seconds(step, ddp.device) for _ in range(3)]
            checks += [seconds(compare, ddp.device)]
        if ddp.is_main_process():
            tensors = replica_tensors(model, optimizer, include_buffers=True).values()
            millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            megabytes = sum(tensor.nbytes for tensor in tensors) / 1e6
            a_step = statistics.median(steps[6:]) * 1e3
            a_check = statistics.median(checks[2:]) * 1e3
            print(
                f"{millions:>10.2f} {len(tensors):>8} {megabytes:>9.1f} {ddp.world_size:>6} {a_step:>10.1f} "
                f"{a_check:>16.1f} {a_check / a_step:>8.3f} {1 + a_check / a_step / DEFAULT_EVERY:>17.5f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="1,10", help="millions of parameters [1,10]")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks [2]")
    parser.add_argument("--rounds", type=int, default=10, help="comparisons to time [10]")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(float(options.size), options.rounds)
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(
        "millions of parameters, tensors and megabytes compared, ranks; ms of a step and of a comparison; their ratio; "
        f"a step with one comparison in {DEFAULT_EVERY} against one without"
    )
    print(
        f"{'parameters':>10} {'tensors':>8} {'megabytes':>9} {'ranks':>6} {'step (ms)':>10} {'comparison (ms)':>16} "
        f"{'ratio':>8} {'with it / without':>17}",
        flush=True,
    )
    for size in options.size.split(","):
        start_ranks(
            options.ranks, "benchmarks.replicas", "--size", size, "--rounds", str(options.rounds)
        )


if __name__ == "__main__":
    main()
