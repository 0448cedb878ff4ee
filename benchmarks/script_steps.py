"""What it costs a script to be observed by `drumline launch --watch`: steps with torch wrapped,
against torch as it is.

    make bench-watch        (or: python -m benchmarks.script_steps --pairs 20)

Blocks of 100 steps of one loop (DataLoader, DDP, AdamW) alternate in the same processes: on, with
the wrapped functions, which hash the parameters once in such a block; off, with torch's own. Each
goes first in every other pair. Times are the processor's, of the main thread: what it waits for
others is not in them. Printed are medians over blocks and over the ratios of pairs; spread is the
middle half.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.heartbeats import described, print_goal
from benchmarks.ranks import start_ranks
from drumline.base.rank_environment import Topology
from drumline.parallel.scripts import torch_hooks
from drumline.parallel.scripts.script_recorder import ScriptRecorder
from drumline.watch.heartbeat import HeartbeatWriter

STEPS = 100
GOAL_RATIO = 1.005
SIZES = {"linear, 272 parameters": (16, 16), "3 layers, 1.1 M parameters": (16, 512, 2048, 16)}


@contextmanager
def torchs_own(wrapped: dict[tuple[type, str], tuple[object, object]]) -> Iterator[None]:
    from torch.optim import optimizer

    hook_tables: Any = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    hooks = [(table, dict(table)) for table in hook_tables]
    for (owner, name), (before, _) in wrapped.items():
        setattr(owner, name, before)
    for hook_table, _ in hooks:
        hook_table.clear()
    yield
    for (owner, name), (_, after) in wrapped.items():
        setattr(owner, name, after)
    for hook_table, all_of_it in hooks:
        hook_table.update(all_of_it)


def observe(folder: Path) -> dict[tuple[type, str], tuple[object, object]]:
    """As a script is; what was replaced, and by what."""
    replaced: dict[tuple[type, str], tuple[object, object]] = {}
    wrap = torch_hooks.wrap_method

    def recorded(owner: type, name: str, wrapper: Callable[..., object]) -> None:
        before = getattr(owner, name)
        wrap(owner, name, wrapper)
        replaced[owner, name] = before, getattr(owner, name)

    torch_hooks.wrap_method = recorded
    rank = dist.get_rank()
    recorder = ScriptRecorder(folder / f"{rank}.script", Topology(rank=rank, world_size=2))
    torch_hooks.observe_torch(HeartbeatWriter(folder / f"{rank}.activity", rank=rank), recorder)
    return replaced


def blocks(sizes: tuple[int, ...]) -> Callable[[], float]:
    data = TensorDataset(torch.randn(STEPS * 32, sizes[0]), torch.randn(STEPS * 32, sizes[-1]))
    loader = DataLoader(data, batch_size=32)  # noqa: DL003 - the same batches on both ranks will do here
    layers = [nn.Linear(num_in, num_out) for num_in, num_out in pairwise(sizes)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())

    def block() -> float:
        begun = time.thread_time()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return (time.thread_time() - begun) / STEPS * 1e3

    return block


def run_rank(pairs: int) -> None:
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        wrapped = observe(Path(folder))
        for name, sizes in SIZES.items():
            block = blocks(sizes)
            block()
            times: dict[str, list[float]] = {"off": [], "on": []}
            for pair in range(pairs):
                for way in ("off", "on") if pair % 2 else ("on", "off"):
                    if way == "on":
                        times[way].append(block())
                    else:
                        with torchs_own(wrapped):
                            times[way].append(block())
            if dist.get_rank() == 0:
                print(f"{name}, 2 ranks (cpu), n = {pairs} pairs of blocks of {STEPS} steps")
                for way, taken in times.items():
                    print(f"  observed {way:<7} {described(taken, 3)} ms a step")
                ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
                print(f"  {'on / off':<16} {described(ratios, 4)}")
                print_goal("on / off", ratios, GOAL_RATIO, "")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=40, help="of blocks [40]")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.pairs)
        return 0
    return start_ranks(2, "benchmarks.script_steps", "--pairs", str(options.pairs))


if __name__ == "__main__":
    sys.exit(main())
