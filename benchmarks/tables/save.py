"""What a save costs a run: GPT-2 124M with AdamW, 1.49 GB of state, saved in the middle of a block
of steps.

The end of every step is marked on the device. The step that follows the save ends later than usual
by as much as it was stopped; what the steps after it lose while the state is written is counted
apart. Besides: the time from the call until the state is on disk, which is that of the folder for
temporary files (TMPDIR).
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.harness import Way, error_line, synchronize
from benchmarks.options import Options
from benchmarks.paused_loop import AfterStep, PausedLoop
from benchmarks.report import Goal, Row, Table, described, figure, ratio
from benchmarks.tables.gpt import Windows, gpt_config, write_tokens
from benchmarks.ways.ours import whole_run
from benchmarks.work import Work, plain_optimizer
from drumline.training.manager import RunManager
from drumline.training.tasks import load_task

GOAL_MS = 25.0
GOAL_TOTAL = 1.0
SIZE = 16
EVERY = 80
TINY_SIZE = 2
TINY_EVERY = 10
DEADLINE_S = 120.0
OURS = "ours"
TORCH = "torch.save"


@dataclass
class Saving:
    """One way to save, and what was seen of it."""

    way: Way
    save: Callable[[int, Callable[[], None]], None]
    """Given the step, and what to call when all is on disk."""
    marks: list[Any] = field(default_factory=list)
    """The ends of the steps of a block."""
    stopped_ms: list[float] = field(default_factory=list)
    later_ms: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    failure: str | None = None

    def __post_init__(self) -> None:
        self.baton = PausedLoop(self._run)

    def _run(self, after_step: AfterStep) -> None:
        """In the thread of the way, and on its stream."""

        def mark_and_continue(samples: int) -> None:
            self.marks.append(_mark())
            after_step(samples)

        self.way.run(mark_and_continue)


def make(options: Options, ddp: RunManager) -> Table:
    folder = options.folder
    size, every = (TINY_SIZE, TINY_EVERY) if options.tiny else (SIZE, EVERY)
    config = gpt_config(folder, size=size, is_cuda=ddp.device.type == "cuda", tiny=options.tiny)
    config = replace(config, checkpoint=replace(config.checkpoint, every_steps=every))
    tokens = write_tokens(folder, windows=2048, config=config, tiny=options.tiny)
    supply = Windows(
        tokens, size=size, context=config.model.context, pinned=ddp.device.type == "cuda"
    )
    work = Work(config, {"vocab_size": 64 if options.tiny else 50304}, ddp.device, lambda: supply)
    samples = len(tokens) // (config.model.context + 1)
    our_run = whole_run(OURS, ddp, config, load_task("text"), folder, samples=samples)
    savings = [
        _by_hand(TORCH, work, folder, _torch_save),
        _by_hand("torch.save, then fsync", work, folder, _torch_save_and_flush),
        _by_hand("DCP async_save", work, folder, _dcp_saver()),
        Saving(
            our_run,
            lambda step, done: _watch_for(folder / OURS / f"checkpoints/step-{step:08d}", done),
        ),
    ]
    savings = [saving for saving in savings if options.wants(saving.way.name)]
    rounds = options.rounds_or(5)
    _measure(savings, rounds, every)
    state = 3 * sum(parameter.numel() for parameter in work.module().parameters()) * 4
    how = f"n = {rounds} saves, each within {every} eager steps of batch {size}, in turn in one process; medians"
    return _table(savings, state, how)


def _measure(savings: list[Saving], rounds: int, every: int) -> None:
    try:
        for saving in reversed(savings):
            _try(saving, partial(saving.baton.take, every // 2))
        for turn in range(1, rounds + 1):
            for saving in savings[turn % len(savings) :] + savings[: turn % len(savings)]:
                _try(saving, partial(_time_save, saving, turn * every, every // 2))
    finally:
        for saving in savings:
            saving.way.wake()
            saving.baton.close()


def _try(saving: Saving, work: Callable[[], object]) -> None:
    if saving.failure is not None:
        return
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        saving.failure = error_line(error)


def _time_save(saving: Saving, at_step: int, half: int) -> None:
    on_disk = threading.Event()
    ended = []

    def done() -> None:
        ended.append(time.perf_counter())
        on_disk.set()

    saving.marks.clear()
    saving.way.wake()
    saving.baton.take(half)
    begun = time.perf_counter()
    saving.save(at_step, done)
    saving.baton.take(half)
    synchronize()
    if not on_disk.wait(DEADLINE_S):
        raise RuntimeError(f"nothing was on disk after {DEADLINE_S:g} s")
    saving.way.rest()
    times = [after - before for before, after in pairwise(_ends_in_ms(saving.marks))]
    before = times[: half - 1]
    with_save = times[half - 1]
    after = times[half:]
    usual = statistics.median(before)
    saving.stopped_ms.append(with_save - usual)
    saving.later_ms.append(sum(after) - usual * len(after))
    saving.total_s.append(ended[0] - begun)


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ends_in_ms(marks: list[Any]) -> list[float]:
    if isinstance(marks[0], float):
        return [mark * 1e3 for mark in marks]
    return [marks[0].elapsed_time(mark) for mark in marks]


def _by_hand(
    name: str,
    work: Work,
    folder: Path,
    write: Callable[[nn.Module, Any, Path, Callable[[], None]], None],
) -> Saving:
    """Plain steps, whose state the driver of the steps saves in between."""
    held: dict[str, Any] = {}
    target = folder / re.sub(r"\W+", "-", name)

    def run(after_step: AfterStep) -> None:
        module = held["module"] = work.module()
        optimizer = held["optimizer"] = plain_optimizer(module, work.config)
        for inputs, targets in map(work.on_device, work.batches()):
            with work.autocast():
                loss = module(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), work.clip_norm or 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            after_step(len(inputs))

    def tidy() -> None:
        shutil.rmtree(target, ignore_errors=True)
        os.sync()

    def save(step: int, done: Callable[[], None]) -> None:
        target.mkdir(exist_ok=True)
        write(held["module"], held["optimizer"], target, done)

    return Saving(Way(name, run, rest=tidy), save)


def _torch_save(module: nn.Module, optimizer: Any, target: Path, done: Callable[[], None]) -> None:
    torch.save(
        {"model": module.state_dict(), "optimizer": optimizer.state_dict()}, target / "state.pt"
    )
    done()


def _torch_save_and_flush(
    module: nn.Module, optimizer: Any, target: Path, done: Callable[[], None]
) -> None:
    _torch_save(module, optimizer, target, lambda: None)
    with (target / "state.pt").open("rb") as file:
        os.fsync(file.fileno())
    done()


def _dcp_saver() -> Callable[[nn.Module, Any, Path, Callable[[], None]], None]:
    groups: list[Any] = []

    def save(module: nn.Module, optimizer: Any, target: Path, done: Callable[[], None]) -> None:
        if dist.is_initialized() and not groups:
            # It wants collectives on the CPU, which the group for the GPU has not.
            groups.append(dist.new_group(backend="gloo"))
        model, state = get_state_dict(module, optimizer)
        answer: Any = dcp.async_save(
            {"model": model, "optimizer": state},
            checkpoint_id=target / "dcp",
            process_group=groups[0] if groups else None,
        )
        future = getattr(answer, "upload_completion", answer)
        future.add_done_callback(lambda _: done())

    return save


def _watch_for(folder: Path, done: Callable[[], None]) -> None:
    """The run saves by itself, and a checkpoint has its name when it is whole and on disk."""

    def look() -> None:
        begun = time.monotonic()
        while not folder.is_dir() and time.monotonic() - begun < DEADLINE_S:
            time.sleep(0.005)
        if folder.is_dir():
            done()

    threading.Thread(target=look, daemon=True).start()


def _table(savings: list[Saving], state: int, how: str) -> Table:
    rows = [Row(saving.way.name, saving.stopped_ms, saving.failure) for saving in savings]
    table = Table("save", f"save: {state / 1e9:.2f} GB of training state", "ms stopped", rows, how)
    totals = {
        saving.way.name: Row(saving.way.name, saving.total_s)
        for saving in savings
        if saving.total_s
    }
    our_row = table.row(OURS)
    goals = [
        Goal("ours, ms stopped", our_row.median if our_row else None, at_most=GOAL_MS),
        Goal(
            "ours / torch.save, until on disk",
            ratio(totals.get(OURS), totals.get(TORCH)),
            at_most=GOAL_TOTAL,
        ),
    ]
    measured = [saving for saving in savings if saving.total_s]
    notes = [
        *([f"the first save of ours: {figure(our_row.values[0])} ms"] if our_row else []),
        "seconds from the call until it is on disk:",
        *(f"  {saving.way.name}: {described(saving.total_s).strip()}" for saving in measured),
        "ms that all later steps of the block took longer:",
        *(f"  {saving.way.name}: {described(saving.later_ms).strip()}" for saving in measured),
    ]
    return replace(table, goals=goals, notes=notes)
