"""What `--dist.sync` does to bytes, steps a second and the loss on slow links between two hosts, with one rank each.

    make bench-sync         (or: python -m benchmarks.slow_links --mbit 10,100 --seeds 0; as root, on Linux)

The hosts are network namespaces of this machine. On each link a job with as many parameters as a small GPT trains for
some rounds; its compute is replayed as timed waits, so that two cores, and what else runs on them, hardly change the
result. Bytes are what an interface has sent. `compute` is the length of a step of the same job without any round and
without a limit, as a fraction of the length of the row's: the mean over a round, the median over rounds.

The loss does not depend on the link. So each row trains a real GPT on text to the end, without a limit, on the same
samples, once for each seed; the loss is that of the evaluation at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comm_hooks import CountedText, train_on_hosts
from benchmarks.scale_replay import BACKWARD, FORWARD, LAYERS, TimedLayer
from drumline import Loss

ALONE = ["--dist.sync", "local:1000000"]
COMPUTE_S = 0.08
"""Of a step: what half a batch of 8 x 64 takes with the GPT of `make bench-comm` on one of our cores."""
PARAMETERS = 828_544
PLAIN_STEPS, FIRST, ROUNDS = 6, 3, 3
TEXT = ["--model.layers", "2", "--model.width", "64", "--optim.lr", "4e-3", "--optim.warmup_steps", "50"]


class WaitingText(CountedText):
    """A model of as many parameters as the GPT of `make bench-comm`, whose steps wait instead of computing."""

    def model(self) -> nn.Module:
        layers = [TimedLayer(PARAMETERS // LAYERS) for _ in range(LAYERS)]
        for layer in layers:
            layer.step_s = COMPUTE_S / (FORWARD + BACKWARD)
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        total: Tensor = model(torch.ones(1, requires_grad=True))
        return Loss(total.sum() * len(batch[0]))


def rows(every: int, overlap: int) -> dict[str, list[str]]:
    """The flags of each row; the first is what the others are compared with."""
    int8 = ["--dist.outer_dtype", "int8"]
    streamed = ["--dist.sync_parts", "2", "--dist.sync_overlap", str(overlap)]
    return {
        "step (plain DDP)": ["--dist.sync", "step"],
        f"local:{every}": ["--dist.sync", f"local:{every}"],
        f"diloco:{every}": ["--dist.sync", f"diloco:{every}"],
        f"diloco:{every} int8": ["--dist.sync", f"diloco:{every}", *int8],
        f"diloco:{every} int8, 2 parts": ["--dist.sync", f"diloco:{every}", *int8, *streamed],
    }


def measure(mbit: float | None, words: list[str], *, first: int, round_steps: int) -> tuple[float, float]:
    """Bytes and seconds of a step: the mean over a round of so many steps, the median over rounds after the first
    steps."""
    last = first + ROUNDS * round_steps
    noted, _ = _train(mbit, f"{Path(__file__)}:WaitingText", words, steps=last + 2)  # then there is one more round
    ends = [noted[number] for number in range(first, last + 1, round_steps)]
    seconds = statistics.median(end[0] - begin[0] for begin, end in pairwise(ends))
    return (ends[-1][1] - ends[0][1]) / (last - first), seconds / round_steps


def _train(mbit: float | None, task: str | None, words: list[str], *, steps: int) -> Any:
    from tests.multinode.hosts import Testbed

    with tempfile.TemporaryDirectory() as scratch, Testbed(Path(scratch) / "bed", ["a", "b"]) as bed:
        for host in bed.hosts if mbit else ():
            host.set_bandwidth(mbit)
        return train_on_hosts(bed, Path(scratch) / "run", words, steps=steps, task=task)


def show_links(found: dict[str, list[str]], mbits: list[float], own: list[str], every: int) -> None:
    """A table for each link."""
    _, alone_s = measure(None, [*ALONE, *own], first=FIRST, round_steps=every)
    print(f"a step without communication: {alone_s * 1e3:.1f} ms", flush=True)
    for mbit in mbits:
        print(f"{mbit:g} Mbit/s".ljust(28), "kB a step   fewer   steps/s   compute", flush=True)
        plain = 0.0
        for name, words in found.items():
            first, length = (FIRST, PLAIN_STEPS) if "step" in words else (every + FIRST, every)
            sent, took = measure(mbit, [*words, *own], first=first, round_steps=length)
            plain = plain or sent
            figures = f"{sent / 1e3:>9.1f} {plain / sent:>6.0f}x {1 / took:>9.2f} {alone_s / took:>8.0%}"
            print(f"{name:<28} {figures}", flush=True)


def show_losses(found: dict[str, list[str]], own: list[str], *, steps: int, seeds: int) -> None:
    """The loss of each row and seed, and how much higher it is than the first row's of the same seed."""
    print(f"GPT 2 layers of 64 on text, batch 8 x 64, {steps} steps", flush=True)
    plain: list[float] = []
    for name, words in found.items():
        losses = []
        for seed in range(seeds):
            losses.append(_train(None, None, [*words, *own, *TEXT, "--train.seed", str(seed)], steps=steps)[1])
        plain = plain or losses
        higher = [loss / other - 1 for loss, other in zip(losses, plain, strict=True)]
        spread = f"{statistics.fmean(higher):+.1%} ({min(higher):+.1%} to {max(higher):+.1%})"
        print(f"{name:<28} loss {', '.join(f'{loss:.4f}' for loss in losses)}  {spread}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="10,100", help="the links, in Mbit/s; empty: none [10,100]")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps to the loss [4000]")
    parser.add_argument("--seeds", type=int, default=3, help="how often each row trains to the loss [3]")
    parser.add_argument("--every", type=int, default=30, help="steps between two rounds [30]")
    parser.add_argument("--overlap", type=int, default=15, help="steps while a part is sent, in the last row [15]")
    parser.add_argument("--rows", default="", help="only rows with this text in their name, and the first")
    parser.add_argument("--flags", default="", help="more flags for every row")
    options = parser.parse_args()
    own = ["--log.every_steps", str(options.every), *options.flags.split()]
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, Linux {platform.release()}"
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"2 hosts with one rank each, gloo; {PARAMETERS:,} parameters, waits of {COMPUTE_S * 1e3:.0f} ms a step")
    found = rows(options.every, options.overlap)
    found = {name: words for name, words in found.items() if "step" in words or options.rows in name}
    if options.mbit:
        show_links(found, [float(one) for one in options.mbit.split(",")], own, options.every)
    if options.seeds:
        show_losses(found, own, steps=options.steps, seeds=options.seeds)


if __name__ == "__main__":
    main()
