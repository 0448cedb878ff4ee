"""What `--dist.sync` does to bytes, steps a second and the loss on slow links between two hosts, with one rank each.

    make bench-sync         (or: python -m benchmarks.slow_links --mbit 10,100 --steps 1000; as root, on Linux)

The hosts are network namespaces of this machine, and the job is that of `make bench-comm`: a small GPT on text. The
loss does not depend on the link, so each row trains once to the end without a limit, on the same samples; then it
trains for some steps on each link, where bytes and time are counted over whole rounds. Compute is the time of a step of
the same job without any round and without a limit, as a fraction of the time of this row's.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.comm_hooks import train_on_hosts

ALONE = ["--dist.sync", "local:1000000"]
PLAIN_STEPS, FIRST = 12, 3


def rows(every: int, overlap: int) -> dict[str, list[str]]:
    """The flags of each row; the first is what the others are compared with."""
    int8 = ["--dist.outer_dtype", "int8"]
    streamed = ["--dist.sync_parts", "4", "--dist.sync_overlap", str(overlap)]
    return {
        "step (plain DDP)": ["--dist.sync", "step"],
        f"local:{every}": ["--dist.sync", f"local:{every}"],
        f"diloco:{every}": ["--dist.sync", f"diloco:{every}"],
        f"diloco:{every} int8": ["--dist.sync", f"diloco:{every}", *int8],
        f"diloco:{every} int8, 4 parts": ["--dist.sync", f"diloco:{every}", *int8, *streamed],
    }


def measure(mbit: float | None, words: list[str], *, first: int, steps: int) -> tuple[float, float]:
    """Bytes and seconds of a step, the mean over `steps` steps after the first ones."""
    noted, _ = _train(mbit, words, steps=first + steps + 2)  # after the last step there is one more round
    (began, before), (ended, after) = noted[first], noted[first + steps]
    return (after - before) / steps, (ended - began) / steps


def _train(mbit: float | None, words: list[str], *, steps: int) -> Any:
    from tests.multinode.hosts import Testbed

    with tempfile.TemporaryDirectory() as scratch, Testbed(Path(scratch) / "bed", ["a", "b"]) as bed:
        for host in bed.hosts if mbit else ():
            host.set_bandwidth(mbit)
        return train_on_hosts(bed, Path(scratch) / "run", words, steps=steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", default="10,100", help="the links, in Mbit/s [10,100]")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps to the loss; 0: no loss [1000]")
    parser.add_argument("--every", type=int, default=50, help="steps between two rounds [50]")
    parser.add_argument("--overlap", type=int, default=10, help="steps while a part is sent, in the last row [10]")
    parser.add_argument("--flags", default="", help="more flags for every row")
    options = parser.parse_args()
    every = options.every
    own = ["--log.every_steps", str(every), *options.flags.split()]
    cores = len(os.sched_getaffinity(0))
    machine = f"{platform.machine()}, {cores} cores, Linux {platform.release()}"
    print(f"{machine}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"GPT 4 layers of 128 on text, batch 8 x 64, {options.steps} steps, 2 hosts with one rank each, gloo")
    _, compute_s = measure(None, [*ALONE, *own], first=FIRST, steps=every)
    print(f"a step without communication: {compute_s * 1e3:.1f} ms", flush=True)
    found = rows(every, options.overlap)
    losses: list[float] = []
    for name, words in found.items() if options.steps else ():
        _, loss = _train(None, [*words, *own], steps=options.steps)
        losses.append(loss)
        print(f"{name:<26} loss {loss:.4f} ({loss / losses[0] - 1:+.1%})", flush=True)
    for mbit in map(float, options.mbit.split(",")):
        print(f"{mbit:g} Mbit/s".ljust(26), "  kB a step   fewer   steps/s   compute", flush=True)
        plain = 0.0
        for name, words in found.items():
            first, steps = (FIRST, PLAIN_STEPS) if "step" in words else (every + FIRST, every)
            sent, took = measure(mbit, [*words, *own], first=first, steps=steps)
            plain = plain or sent
            figures = f"{sent / 1e3:>11.1f} {plain / sent:>6.0f}x {1 / took:>9.2f} {compute_s / took:>8.0%}"
            print(f"{name:<26} {figures}", flush=True)


if __name__ == "__main__":
    main()
