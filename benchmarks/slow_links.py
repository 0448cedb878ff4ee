"""What `--dist.sync` does to bytes, steps a second and the loss on slow links between two hosts,
with one rank each.

    make bench-sync         (or: python -m benchmarks.slow_links --mbit 10,100 --seeds ''; as root, on Linux)

The hosts are network namespaces of this machine. On each link a job with as many parameters as a
small GPT trains for some rounds; its compute is replayed as timed waits, so that two cores, and
what else runs on them, change the result less. Bytes are what an interface has sent. `compute` is
the length of a row's steps in which nothing is sent, as a fraction of the length of all of its
steps, which other programs slow down alike; for plain DDP, which has no such steps, it is the
length of the other rows'.

The loss does not depend on the link. So each row trains a real GPT on text to the end, without a
limit, on the same samples, once for each seed; the loss is that of the evaluation at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.comm_hooks import CountedText, train_on_hosts
from benchmarks.scale_replay import BACKWARD, FORWARD, TimedLayer
from drumline import Loss

COMPUTE_S = 0.08
"""Of a step: what half a batch of 8 x 64 takes with the GPT of `make bench-comm` on one of our
cores."""
PARAMETERS = 828_544
NUM_LAYERS = 4
PLAIN_STEPS = 12
FIRST = 3
ROUNDS = 3
TEXT = {
    "--model.layers": "2",
    "--model.width": "64",
    "--train.batch_size": "32",
    "--optim.lr": "4e-3",
    "--optim.warmup_steps": "50",
}


class WaitingText(CountedText):
    """A model of as many parameters as the GPT of `make bench-comm`, whose steps wait instead of
    computing."""

    def model(self) -> nn.Module:
        sizes = [PARAMETERS // NUM_LAYERS]
        # A few long waits: each ends late on a busy machine.
        layers = [TimedLayer(sizes, 1 / NUM_LAYERS, time.sleep) for _ in range(NUM_LAYERS)]
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
        f"local:{every} int8": ["--dist.sync", f"local:{every}", *int8],
        f"diloco:{every}": ["--dist.sync", f"diloco:{every}"],
        f"diloco:{every} int8": ["--dist.sync", f"diloco:{every}", *int8],
        f"diloco:{every} int8, 2 parts": ["--dist.sync", f"diloco:{every}", *int8, *streamed],
    }


def measure(
    mbit: float, words: list[str], *, first: int, steps: int, between: Callable[[int], bool]
) -> Row:
    """The means over `steps` steps after the first ones. `between`: whether nothing is sent in the
    step of a number."""
    noted, _ = _train(mbit, words, steps=first + steps + 2, task=f"{Path(__file__)}:WaitingText")
    seconds = {
        step: noted[step - 1][0] - noted[step - 2][0]
        for step in range(first + 1, first + steps + 1)
    }
    free = [length for step, length in seconds.items() if between(step)]
    sent = noted[first + steps - 1][1] - noted[first - 1][1]
    return Row(
        sent / steps, statistics.fmean(seconds.values()), statistics.fmean(free) if free else None
    )


class Row(NamedTuple):
    """Of a step: the bytes sent, the seconds, and the seconds of those steps in which nothing is
    sent."""

    sent: float
    seconds: float
    free_s: float | None


def _train(
    mbit: float | None,
    words: list[str],
    *,
    steps: int,
    task: str | None = None,
    run: Path | None = None,
) -> Any:
    from tests.multinode.hosts import Testbed

    with (
        tempfile.TemporaryDirectory() as scratch,
        Testbed(Path(scratch) / "bed", ["a", "b"]) as bed,
    ):
        for host in bed.hosts if mbit else ():
            host.set_bandwidth(mbit)
        return train_on_hosts(bed, run or Path(scratch) / "run", words, steps=steps, task=task)


def is_between(step: int, *, apart: int, last: int, is_plain: bool) -> bool:
    """Whether no synchronization is open in this step."""
    return not is_plain and step % apart > last


def show_links(
    flags_by_row: dict[str, list[str]], mbits: list[float], common_flags: list[str], every: int
) -> None:
    """A table for each link."""
    for mbit in mbits:
        print(f"{mbit:g} Mbit/s".ljust(28), "kB a step   fewer   steps/s   compute", flush=True)
        measured = {}
        for name, words in flags_by_row.items():
            flags = dict(zip(words[::2], words[1::2], strict=True))
            apart = every // int(flags.get("--dist.sync_parts", 1))
            last = int(flags.get("--dist.sync_overlap", 0))
            is_plain = "step" in words
            measured[name] = measure(
                mbit,
                [*words, *common_flags],
                first=FIRST if is_plain else every + FIRST,
                steps=PLAIN_STEPS if is_plain else ROUNDS * every,
                between=partial(is_between, apart=apart, last=last, is_plain=is_plain),
            )
        plain = next(iter(measured.values()))
        alone_s = statistics.fmean(row.free_s for row in measured.values() if row.free_s)
        for name, row in measured.items():
            figures = (
                f"{row.sent / 1e3:>9.1f} {plain.sent / row.sent:>6.0f}x {1 / row.seconds:>9.2f}"
            )
            print(f"{name:<28} {figures} {(row.free_s or alone_s) / row.seconds:>8.0%}", flush=True)


def show_losses(
    flags_by_row: dict[str, list[str]],
    common_flags: dict[str, str],
    *,
    plain_lr: str,
    steps: int,
    base_steps: int,
    seeds: list[int],
) -> None:
    """The loss of each row and seed, how much higher it is than the first row's of the same seed,
    and how many times fewer bytes were sent. `plain_lr`: the rate of plain DDP; empty: that of all
    rows."""
    begin = f"the weights after {base_steps} steps of DDP" if base_steps else "random weights"
    text = TEXT | common_flags
    size = f"{text['--model.layers']} layers of {text['--model.width']}, batch {text['--train.batch_size']} x 64"
    print(
        f"GPT on text, {size}, a rate of {text['--optim.lr']}, {steps} steps from {begin}",
        flush=True,
    )
    losses: dict[str, list[float]] = {name: [] for name in flags_by_row}
    sent: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            base = Path(scratch) / str(seed)
            seeded = text | {"--train.seed": str(seed)}
            if base_steps:
                _train(
                    None,
                    _words(seeded | {"--optim.schedule": "constant"}),
                    steps=base_steps,
                    run=base,
                )
                # With samples in a different order.
                seeded |= {"--train.seed": str(1000 + seed), "--model.init": str(base)}
            for name, words in flags_by_row.items():
                rate = {"--optim.lr": plain_lr} if plain_lr and "step" in words else {}
                noted, loss = _train(None, [*_words(seeded | rate), *words], steps=steps)
                losses[name].append(loss)
                sent[name] = noted[-1][1] - noted[0][1]
                print(
                    f"  seed {seed}: {name:<28} {loss:.4f}  {sent[name] / 1e6:.2f} MB", flush=True
                )
    plain = next(iter(flags_by_row))
    for name, ends in losses.items():
        higher = [
            loss / plain_loss - 1 for loss, plain_loss in zip(ends, losses[plain], strict=True)
        ]
        spread = f"{statistics.fmean(higher):+.1%} ({min(higher):+.1%} to {max(higher):+.1%})"
        print(
            f"{name:<28} loss {statistics.fmean(ends):.4f}  {spread}, {sent[plain] / sent[name]:.0f}x",
            flush=True,
        )


def _words(flags: dict[str, str]) -> list[str]:
    return [word for pair in flags.items() for word in pair]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mbit", default="10,100", help="the links, in Mbit/s; empty: none [10,100]"
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help="optimizer steps to the loss [1500]"
    )
    parser.add_argument(
        "--base-steps",
        type=int,
        default=0,
        help="begin with weights after as many steps of DDP [0]",
    )
    parser.add_argument(
        "--seeds", default="0,1,2", help="each row trains to the loss with each of these [0,1,2]"
    )
    parser.add_argument("--every", type=int, default=30, help="steps between two rounds [30]")
    parser.add_argument(
        "--overlap", type=int, default=5, help="steps while a part is sent, in the last row [5]"
    )
    parser.add_argument(
        "--rows",
        default="",
        help="only rows whose name matches this, as local.*int8, and the first",
    )
    parser.add_argument(
        "--flags", default="", help="more flags for every row, such as --train.batch_size 256"
    )
    parser.add_argument(
        "--plain-lr", default="", help="to the loss, the rate of plain DDP [that of all rows]"
    )
    options = parser.parse_args()
    extra_flags = options.flags.split()
    common_flags = {"--log.every_steps": str(options.every)} | dict(
        zip(extra_flags[::2], extra_flags[1::2], strict=True)
    )
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, Linux {platform.release()}"
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"2 hosts with one rank each, gloo; {PARAMETERS:,} parameters, waits of {COMPUTE_S * 1e3:.0f} ms a step"
    )
    flags_by_row = rows(options.every, options.overlap)
    flags_by_row = {
        name: words
        for name, words in flags_by_row.items()
        if "step" in words or re.search(options.rows, name)
    }
    if options.mbit:
        show_links(
            flags_by_row,
            [float(mbit) for mbit in options.mbit.split(",")],
            _words(common_flags),
            options.every,
        )
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
        lengths = {"steps": options.steps, "base_steps": options.base_steps}
        show_losses(flags_by_row, common_flags, plain_lr=options.plain_lr, **lengths, seeds=seeds)


if __name__ == "__main__":
    main()
