"""Advice about loading: a rank waits for its batch, has too many workers, or starts them in every
epoch. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from drumline.base.text import latency, plural
from drumline.report.profile.bottleneck import (
    MIN_GAIN,
    USUAL_CORES,
    Advice,
    Savings,
    at_line,
    by_setting,
    first_line,
    for_cores_s,
    is_gpu,
    is_waiting,
    mostly_at,
    of_step,
    removable,
)
from drumline.runs.profile_files import SAMPLER, WORKERS
from drumline.runs.profile_result import ProfileResult

MAX_WORKERS = 16
WORKERS_PER_CORE = 4


def _only_loading(result: ProfileResult) -> ProfileResult:
    """The start of workers with the wait for their first batch, and the sampler, have advice of
    their own."""
    data_s = result.parts_s["data"]
    starts = result.worker_starts
    other_s = result.phases_s.get(SAMPLER, 0.0) + (starts.seconds if starts else 0.0)
    other_s = min(data_s, other_s)
    parts_s = {**result.parts_s, "data": data_s - other_s}
    return replace(result, step_s=result.step_s - other_s, parts_s=parts_s)


def _data(result: ProfileResult) -> Iterator[Advice]:
    """Several processes make several batches at once, as far as there are cores for what loading
    computes; the rest of the step remains."""
    running = _only_loading(result)
    waited = running.parts_s["data"]
    if waited < MIN_GAIN * result.step_s:
        return

    loading = Loading(running)
    text = f"a rank waits {of_step(result, waited)} for its batch"
    if loading.workers:
        text += (
            f", which {plural(loading.workers, 'worker')} load{'s' if loading.workers == 1 else ''}"
        )
    line = first_line(result, "data")
    if line is not None:
        text += f"; it {'waits' if is_waiting(line) else 'computes'} mostly at {at_line(line)}"
    likely = loading.saved_s(1.0 if loading.load is None else min(1.0, loading.load))
    if loading.more_workers <= loading.workers or likely < MIN_GAIN * result.step_s:
        on = f"{loading.cores:.3g} core{'' if loading.cores == 1 else 's'} a rank"
        remedy = f"more workers bring nothing on {on}: store samples decoded, resized, tokenized"
        yield removable("data", text, remedy, waited, what="the wait")
        return

    most_s = loading.saved_s(0.0)
    if loading.load is not None:
        most_s = likely + 0.1 * (result.step_s - likely)
    yield Advice(
        bottleneck="data",
        text=text,
        **more_workers(result, loading.more_workers),
        cost_s=waited,
        saved_s=Savings(likely, most_s, 0.8 * likely),
        derivation=f"a batch takes {latency(loading.batch_s)} to load; workers load {loading.more_workers} at once; "
        f"the rest takes {latency(loading.working_s)}",
    )


def _sampler(result: ProfileResult) -> Iterator[Advice]:
    """It draws samples in the training process, whatever the number of workers."""
    cost_s = result.phases_s.get(SAMPLER, 0.0)
    yield removable(
        "sampler",
        f"the sampler takes {of_step(result, cost_s)}{mostly_at(first_line(result, SAMPLER))}",
        "draw the samples of an epoch in one operation (torch.randperm, torch.multinomial), and once an epoch (each "
        "iter() of a DataLoader draws all of them); workers do not take this over",
        cost_s,
    )


class Loading:
    """How a rank loads its batches, and how many workers would."""

    def __init__(self, result: ProfileResult) -> None:
        waited = result.parts_s["data"]
        self.working_s = result.step_s - waited
        """The step without the wait."""
        self.workers = int(result.settings.get("data.workers", "0"))
        self.load = result.loading_cores
        """How much of a core loads a batch; None: not known."""
        line = first_line(result, "data")
        if result.workers is not None:
            self.workers = result.workers.number
            self.load = result.workers.cores / self.workers
        elif line is not None and line.own_s > waited / 2:
            # With the time in the queue for a core, which `loading_cores` leaves out.
            self.load = line.cpu_s / max(line.own_s, 1e-9)

        self.batch_s = self.workers * result.step_s if self.workers else waited
        """How long one process takes for a batch."""
        self.computes_s = 0.0 if is_gpu(result) else self.working_s
        """The part of the step that needs a core."""
        self.cores = result.cores_per_rank or USUAL_CORES
        is_storage = self.load is not None and self.load < 0.5
        most = self.cores * WORKERS_PER_CORE if is_storage else self.cores
        most = max(1, min(MAX_WORKERS, int(most)))
        if self.cores <= 1 and self.load is not None and not is_storage and not is_gpu(result):
            most = 0  # the training needs the core
        hiding = math.ceil(1.2 * self.batch_s / max(self.working_s, 1e-9))
        self.more_workers = min(most, hiding)

    def saved_s(self, load: float) -> float:
        """By more workers that each keep so much of a core busy."""
        if self.more_workers <= self.workers:
            return 0.0

        all_cores_s = (self.computes_s + load * self.batch_s) / self.cores
        waited_s = (
            self.batch_s if not self.workers else self.batch_s / self.workers - self.working_s
        )
        step_s = self.working_s + waited_s
        return step_s - max(self.working_s, self.batch_s / self.more_workers, all_cores_s)


def _workers(result: ProfileResult) -> Iterator[Advice]:
    """More workers than cores take time from the training, which waits for a core."""
    workers = result.workers
    cores = result.cores_per_rank or USUAL_CORES
    if workers is None or workers.number <= cores:
        return

    cost_s = for_cores_s(result, 0.5)
    num_workers = max(1, min(int(cores), math.ceil(1.2 * workers.cores)))
    if num_workers >= workers.number:
        return

    yield Advice(
        bottleneck="workers",
        text=f"there are too many workers: a rank with {cores:.3g} core{'' if cores == 1 else 's'} has "
        f"{workers.number} of them, and waits {of_step(result, cost_s)} for a core",
        **more_workers(result, num_workers),
        cost_s=cost_s,
        saved_s=Savings(cost_s / 2, cost_s, 0.0),
        derivation=f"they need {workers.cores:.2g} cores for their batches",
    )


def more_workers(result: ProfileResult, num_workers: int) -> dict[str, Any]:
    """The remedy that changes their number."""
    return by_setting(
        result,
        {"data.workers": str(num_workers)},
        script=f"num_workers={num_workers} of the DataLoader",
    )


def _worker_starts(result: ProfileResult) -> Iterator[Advice]:
    """Of each short epoch."""
    starts = result.worker_starts
    if starts is None:
        return

    yield Advice(
        bottleneck="worker_starts",
        text=f"the workers start again in {starts.num_steps} of {plural(result.num_steps, 'step')}, as in every epoch: "
        f"{of_step(result, starts.seconds)} goes to that and to the wait for their first batch"
        f"{mostly_at(first_line(result, WORKERS))}",
        **by_setting(
            result,
            {"data.persistent_workers": "true"},
            script="persistent_workers=True of the DataLoader, which is made once and not in each epoch",
        ),
        cost_s=starts.seconds,
        saved_s=Savings(0.8 * starts.seconds, starts.seconds, 0.3 * starts.seconds),
        derivation="the workers of the first epoch stay",
    )


DATA_RULES = (_data, _sampler, _workers, _worker_starts)
