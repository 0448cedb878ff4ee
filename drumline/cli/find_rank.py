"""One rank of `drumline find-lr` or `drumline find-batch`: imports torch and the task, measures,
and prints the result on rank 0."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from drumline.base.text import memory_size, print_message, show_lines, show_progress
from drumline.cli.as_rank import with_task
from drumline.cli.command_line import show_json
from drumline.config import FlagValues, Layers
from drumline.config.schema import Config
from drumline.tools.find.batch_search import BatchSearch, search_batch
from drumline.tools.find.range_test import SAFETY, RangeOptions, RangeTest, measure_range
from drumline.training.job.evaluation_job import with_local_data
from drumline.training.manager import RunManager
from drumline.training.memory.memory_plan import settle_mode
from drumline.training.tasks.base import Task

ROWS = 25
WIDTH = 40
# A size is worth mentioning if it is this much faster than the largest.
FASTER = 1.05


def find_lr(task: str, layers: Layers, verb_flags: FlagValues) -> int:
    """Measure as one rank of a group, or alone; returns the exit code."""
    return with_task(task, layers, partial(_find_lr, verb_flags))


def _find_lr(
    verb_flags: FlagValues, config: Config, task_class: type[Task], ddp: RunManager
) -> None:
    config = settle_mode(with_local_data(config, ddp), task_class, ddp)
    options = RangeOptions(verb_flags.low, verb_flags.high, verb_flags.steps)
    is_main = ddp.is_main_process()
    progress, note = _outputs(ddp)

    def on_step(number: int, rate: float, loss: float) -> None:
        progress(f"step {number + 1} of {options.steps}: rate {rate:.2g}, loss {loss:.4g}")

    test = measure_range(config, task_class, ddp, options, note=note, on_step=on_step)
    progress("")
    if is_main and not verb_flags.json:
        show_lines(range_table(test))
    rate = test.suggestion()  # raises on every rank if there is none
    if is_main and verb_flags.json:
        result = {
            "lr": None if test.own_optimizer else lr_setting(test, rate),
            "rate": rate,
            "has_diverged": test.has_diverged,
        }
        show_json({**result, "rates": test.rates, "losses": test.losses})
    elif is_main:
        show_lines([describe_rate(test, rate)])


def lr_setting(test: RangeTest, rate: float) -> float:
    """The value of `--optim.lr` for this rate."""
    return float(f"{rate * test.setting:.2g}")


def range_table(test: RangeTest) -> Iterator[str]:
    """The rates and losses of some steps, as a plot: the smoothed loss from left to right."""
    smooth = test.smooth
    lowest = test.lowest
    last = len(test.losses) - 1
    # what has diverged is at the edge
    low = smooth[lowest]
    high = smooth[0] + (smooth[0] - smooth[lowest]) / 4
    every = -(-len(smooth) // ROWS)
    yield f"{'rate':>9}  {'loss':>9}"
    for step in sorted({*range(0, len(smooth), every), lowest, last}):
        share = 1.0
        if math.isfinite(smooth[step]) and high > low:
            share = (smooth[step] - low) / (high - low)
        plot = f"|{' ' * round(WIDTH * min(1.0, share))}*"
        mark = ""
        if step == lowest:
            mark = "  lowest"
        elif step == last and test.has_diverged:
            mark = "  diverged"
        yield f"{test.rates[step]:>9.2e}  {test.losses[step]:>9.4g}  {plot}{mark}"


def describe_rate(test: RangeTest, rate: float) -> str:
    reason = f"1/{SAFETY} of {test.rates[test.lowest]:.2g}, the rate with the lowest loss"
    if test.own_optimizer is None:
        return f"--optim.lr {lr_setting(test, rate):g}: {reason}"
    return f"{test.own_optimizer}: {rate:g} as the highest lr of its groups, {reason}; the others in proportion"


def find_batch(task: str, layers: Layers, verb_flags: FlagValues) -> int:
    """Measure as one rank of a group, or alone; returns the exit code."""
    return with_task(task, layers, partial(_find_batch, verb_flags))


def _find_batch(
    verb_flags: FlagValues, config: Config, task_class: type[Task], ddp: RunManager
) -> None:
    config = settle_mode(with_local_data(config, ddp), task_class, ddp)
    margin = verb_flags.margin
    progress, note = _outputs(ddp)
    if config.train.step not in (None, "eager"):
        note(
            f"sizes are tried with eager steps; those of --train.step {config.train.step} may need more memory"
        )
    search = search_batch(
        config,
        task_class,
        ddp,
        margin=margin,
        on_trial=lambda trial: progress(f"tried micro-batches of {trial.size}"),
    )
    progress("")
    if not ddp.is_main_process():
        return
    if verb_flags.json:
        show_json({"micro_batch_size": search.chosen.size, **asdict(search)})
        return
    show_lines([*batch_table(search), *describe_batch(search, margin, ddp.world_size)])


def batch_table(search: BatchSearch) -> Iterator[str]:
    yield f"{'micro-batch':>11}  {'samples/s':>10}{'  memory' if search.measures_memory else ''}"
    for trial in sorted(search.trials, key=lambda trial: trial.size):
        speed = f"{trial.samples_per_s:>10,.0f}" if trial.fits else f"{'-':>10}"
        memory = f"  {memory_size(trial.memory) if trial.fits else 'out of memory'}"
        yield f"{trial.size:>11}  {speed}{memory if search.measures_memory or not trial.fits else ''}"


def describe_batch(search: BatchSearch, margin: float, world_size: int) -> Iterator[str]:
    chosen = search.chosen
    fastest = search.fastest
    count = -(-search.limit // chosen.size)
    stays = f"the global batch stays {search.batch_size}: {count} micro-batch{'' if count == 1 else 'es'} a step"
    where = f"on each of {world_size} ranks" if world_size > 1 else "on 1 rank"
    if not search.measures_memory:
        why = "the fastest"
    elif count > 1:
        why = f"the largest that fits with {margin:.0%} of the memory free"
    else:
        why = "all of a step fits"
    yield f"--train.micro_batch_size {chosen.size}: {why}; {stays} {where}"
    if not search.measures_memory:
        yield (
            "on the CPU only speed is measured, not what fits: a process that needs too much memory is killed by the "
            "kernel, it gets no error"
        )
    elif fastest.samples_per_s > FASTER * chosen.samples_per_s:
        yield f"{fastest.size} is faster: {fastest.samples_per_s:,.0f} samples/s"


def _outputs(ddp: RunManager) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Where progress is shown, and notes are printed: on rank 0, progress only on a terminal."""
    if not ddp.is_main_process():
        return _ignore, _ignore
    progress = show_progress if sys.stderr.isatty() else _ignore
    return progress, lambda message: print_message(f"note: {message}")


def _ignore(text: str) -> None: ...
