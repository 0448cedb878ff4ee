"""The step of `--train.exact elastic` against the ordinary one, with a shard for every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.harness import Way, measure
from benchmarks.in_memory import TINY_WORK, WORK, InMemoryTask
from benchmarks.options import Options
from benchmarks.paused_loop import AfterStep
from benchmarks.report import Table
from benchmarks.tables.cpu import pairs_table, ranks_text
from benchmarks.ways.ours import engine_steps
from drumline.config.schema import Config
from drumline.training.manager import RunManager

RANKS = "2,4"
STEPS = 4


def make(options: Options, ddp: RunManager) -> Table:
    rounds = options.rounds_or(20)
    pairs = {}
    for name, config in (TINY_WORK if options.tiny else WORK).items():
        elastic = replace(
            config, train=replace(config.train, exact="elastic", shards=ddp.world_size)
        )
        ways = [
            Way(f"{name}: ordinary", _steps(ddp, config)),
            Way(f"{name}: elastic", _steps(ddp, elastic)),
        ]
        pairs[name] = measure(ways, rounds=rounds, steps=STEPS, warm_up=STEPS)
    how = f"n = {rounds} pairs of blocks of {STEPS} steps, in turn in the same processes; medians"
    return pairs_table(
        f"elastic-{ddp.world_size}",
        f"elastic: steps for any number of ranks, {ranks_text(ddp)}",
        pairs,
        how,
    )


def _steps(ddp: RunManager, config: Config) -> Callable[[AfterStep], None]:
    def run(after_step: AfterStep) -> None:
        for samples in engine_steps(ddp, config, InMemoryTask(config)):
            after_step(samples)

    return run
