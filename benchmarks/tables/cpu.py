"""What the engine costs over a loop by hand, with everything on: watch, ledger, events, and a
checkpoint in each block.

Ours is `drumline train` itself with its run folder. The save comes in the middle of the block, so
that the steps after it bear what it does in the background. Both run in the main thread, as a
training does: between two of its steps ours lets the loop by hand take its block. In threads of
their own, as the ways of the other tables are, both are slower here, and ours more so.
"""

from __future__ import annotations

import statistics
import time
from contextlib import suppress

from benchmarks.harness import Taken, time_steps
from benchmarks.in_memory import SAVE_EVERY, TINY_WORK, WORK, InMemoryTask, plain_work
from benchmarks.options import Options
from benchmarks.paused_loop import LoopClosed
from benchmarks.report import Goal, Row, Table, described
from benchmarks.ways.by_hand import steps_by_hand
from benchmarks.ways.ours import whole_run
from drumline.config.schema import Config
from drumline.training.manager import RunManager

RANKS = "1,2"
GOAL = 1.02


def make(options: Options, ddp: RunManager) -> Table:
    works = TINY_WORK if options.tiny else WORK
    rounds = options.rounds_or(4)
    pairs = {name: _pair(name, config, options, ddp, rounds) for name, config in works.items()}
    return pairs_table(
        f"cpu-{ddp.world_size}",
        f"cpu: ours with everything on against a loop by hand, {ranks_text(ddp)}",
        pairs,
        f"n = {rounds} pairs of blocks of {SAVE_EVERY} steps with a save in each, in turn in one process; medians",
        goal=GOAL,
    )


def _pair(name: str, config: Config, options: Options, ddp: RunManager, rounds: int) -> list[Taken]:
    """Collective: blocks of both in turn; the first of each is for warming up."""
    hand, drumline = (Taken(f"{name}: {way}", steps=SAVE_EVERY) for way in ("by hand", "ours"))
    by_hand = steps_by_hand(plain_work(config, ddp))
    way = whole_run(
        drumline.name, ddp, config, InMemoryTask, options.folder, samples=config.data.samples
    )
    # The save is due after every SAVE_EVERY steps: half a block more, and it comes in the middle of
    # each.
    left = SAVE_EVERY // 2
    begun = time.perf_counter()
    num_blocks = -1

    def after_each_step(_: int) -> None:
        nonlocal left, begun, num_blocks
        left -= 1
        if left:
            return
        if num_blocks >= 0:
            drumline.seconds.append(time.perf_counter() - begun)
        way.rest()
        seconds = time_steps(by_hand, SAVE_EVERY) * SAVE_EVERY
        if num_blocks >= 0:
            hand.seconds.append(seconds)
        num_blocks += 1
        way.wake()
        if num_blocks == rounds:
            raise LoopClosed
        left = SAVE_EVERY
        begun = time.perf_counter()

    with suppress(LoopClosed):
        way.run(after_each_step)
    return [hand, drumline]


def ranks_text(ddp: RunManager) -> str:
    return f"{ddp.world_size} rank{'s' if ddp.world_size > 1 else ''}"


def pairs_table(
    name: str, title: str, pairs: dict[str, list[Taken]], how: str, *, goal: float | None = None
) -> Table:
    """Two ways for each work, and their ratio block by block."""
    rows = []
    notes = []
    goals = []
    for work, (first, second) in pairs.items():
        rows += [
            Row(taken.name, [value * 1e3 for value in taken.per_step()], taken.failure)
            for taken in (first, second)
        ]
        if first.failure or second.failure:
            continue
        ratios = [
            after / before for before, after in zip(first.seconds, second.seconds, strict=True)
        ]
        notes.append(f"{work}: ratio of pairs {described(ratios).strip()}")
        if goal is not None:
            goals.append(Goal(f"{work}: ratio", statistics.median(ratios), at_most=goal))
    return Table(name, title, "ms a step", rows, how, goals, notes, is_one_work=False)
