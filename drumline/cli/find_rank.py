"""One rank of `drumline find-lr` or `drumline find-batch`: imports torch and the task, measures,
and prints the result on rank 0."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from drumline.base.text import memory_size, print_message, show_lines, show_progress
from drumline.cli.command_line import show_json
from drumline.config import FlagValues
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


def find_lr(
    verb_flags: FlagValues, config: Config, task_class: type[Task], ddp: RunManager
) -> None:
    """Collective: measure, and print the table and the rate on rank 0."""
    config = settle_mode(with_local_data(config, ddp), task_class, ddp)
    options = RangeOptions(verb_flags.low, verb_flags.high, verb_flags.steps)
    progress, note = _outputs(ddp)

    def on_step(number: int, rate: float, loss: float) -> None:
        progress(f"step {number + 1} of {options.steps}: rate {rate:.2g}, loss {loss:.4g}")

    test = measure_range(config, task_class, ddp, options, note=note, on_step=on_step)
    progress("")
    is_main = ddp.is_main_process()
    if is_main and not verb_flags.json:
        show_lines(range_table(test))
    rate = test.suggestion()  # raises on every rank if there is none
    if is_main and verb_flags.json:
        result = {
            "lr": None if test.own_optimizer else lr_setting(test, rate),
            "rate": rate,
            "has_diverged": test.has_diverged,
            "rates": test.rates,
            "losses": test.losses,
        }
        show_json(result)
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
    low = smooth[lowest]
    high = smooth[0] + (smooth[0] - low) / 4  # what has diverged is at the edge

    every = math.ceil(len(smooth) / ROWS)
    yield f"{'rate':>9}  {'loss':>9}  {'smoothed':>9}"
    for step in sorted({*range(0, len(smooth), every), lowest, last}):
        part = 1.0
        if math.isfinite(smooth[step]) and high > low:
            part = min(1.0, (smooth[step] - low) / (high - low))
        plot = f"|{' ' * round(WIDTH * part)}*"
        mark = ""
        if step == lowest:
            mark = "  lowest"
        elif step == last and test.has_diverged:
            mark = "  diverged"
        numbers = f"{test.rates[step]:>9.2e}  {test.losses[step]:>9.4g}  {smooth[step]:>9.4g}"
        yield f"{numbers}  {plot}{mark}"


def describe_rate(test: RangeTest, rate: float) -> str:
    reason = f"1/{SAFETY} of {test.rates[test.lowest]:.2g}, the rate with the lowest smoothed loss"
    if test.own_optimizer is None:
        return f"--optim.lr {lr_setting(test, rate):g}: {reason}"
    return f"{test.own_optimizer}: {rate:g} as the highest lr of its groups, {reason}; the others in proportion"


def find_batch(
    verb_flags: FlagValues, config: Config, task_class: type[Task], ddp: RunManager
) -> None:
    """Collective: measure, and print the table and the size on rank 0."""
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
    """The sizes that were tried, with speed and memory."""
    heading = f"{'micro-batch':>11}  {'samples/s':>10}"
    yield f"{heading}  memory" if search.measures_memory else heading
    for trial in sorted(search.trials, key=lambda trial: trial.size):
        if not trial.fits:
            yield f"{trial.size:>11}  {'-':>10}  out of memory"
            continue
        row = f"{trial.size:>11}  {trial.samples_per_s:>10,.0f}"
        yield f"{row}  {memory_size(trial.memory)}" if search.measures_memory else row


def describe_batch(search: BatchSearch, margin: float, world_size: int) -> Iterator[str]:
    """The size to set, and why."""
    chosen = search.chosen
    fastest = search.fastest
    count = math.ceil(search.limit / chosen.size)
    micro_batches = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    stays = f"the global batch stays {search.batch_size}: {micro_batches} a step"
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
