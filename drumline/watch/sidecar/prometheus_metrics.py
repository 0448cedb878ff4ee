"""What a node's /metrics shows: each metric is declared here once, and read when it is scraped, from
what the sidecar already has. docs/metrics.md, the dashboard and the alert rules are made from the
declarations.

The run folder and the GPUs' driver may block for ever. They are read in threads, and what comes
late is shown in the next scrape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pynvml
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import generate_latest

from drumline.base.background import in_background
from drumline.base.processes import EXITED, STOPPED
from drumline.base.text import one_line
from drumline.runs import catalog, manifest
from drumline.runs.events import Tail
from drumline.runs.run_folder import RunFolder
from drumline.watch.cluster_state import NodeState, RankState
from drumline.watch.diagnosis.diagnosis import Alarm, Cause
from drumline.watch.heartbeat import Phase
from drumline.watch.sidecar.local_ranks import LocalRanks
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from drumline.watch.watch_folder import start_number

Sample = tuple[str, tuple[str, ...], float]
"""A name of METRICS without its prefix, the values of its labels, and its value."""

PREFIX = "drumline_"
EVERYWHERE = ("run", "host")
"""Labels of every metric: the name of the run folder, and of the node."""

LATE_S = 0.5
KEPT_S = 0.2
TAIL_BYTES = 1 << 18


@dataclass(frozen=True)
class MetricDeclaration:
    """A metric, without its name."""

    doc: str
    labels: tuple[str, ...] = ()
    """Besides those of every metric."""


RANK = ("rank",)
GPU = ("gpu",)
OF_NODE = {
    "step": MetricDeclaration("Optimizer steps that the rank has done; backward passes in a script.", RANK),
    "heartbeat_age_seconds": MetricDeclaration("How long the rank has shown no progress.", RANK),
    "rank_up": MetricDeclaration("0 if the rank has exited or is stopped by a signal.", RANK),
    "rank_phase": MetricDeclaration("1, for the phase that the rank is in.", (*RANK, "phase")),
    "phase_seconds_total": MetricDeclaration("Time that the rank has spent in each phase.", (*RANK, "phase")),
    "restarts_total": MetricDeclaration("How often this launch has restarted the ranks."),
}  # fmt: skip
OF_GPUS = {
    "gpu_utilization_ratio": MetricDeclaration("Share of the time in which a kernel ran, from 0 to 1.", GPU),
    "gpu_memory_used_bytes": MetricDeclaration("Memory in use, by all processes.", GPU),
    "gpu_memory_bytes": MetricDeclaration("Memory of the GPU.", GPU),
    "gpu_temperature_celsius": MetricDeclaration("Temperature of the GPU.", GPU),
    "gpu_ecc_errors_total": MetricDeclaration("Memory errors since the driver was loaded.", (*GPU, "kind")),
    "gpu_throttled": MetricDeclaration("1 while its clocks are lowered for this reason.", (*GPU, "reason")),
}  # fmt: skip
OF_TRAIN_EVENTS = {
    "loss": ("loss", "Mean loss since the log line before, over all ranks."),
    "lr": ("learning_rate", "Learning rate."),
    "samples_per_s": ("samples_per_second", "Samples a second, of all ranks."),
    "tokens_per_s": ("tokens_per_second", "Tokens a second, of all ranks."),
    "mfu": ("mfu_ratio", "Share of the devices' peak FLOP/s, from 0 to 1."),
    "data_share": ("data_wait_ratio", "Share of the time that ranks wait for data, from 0 to 1."),
    "communication_share": ("exposed_communication_ratio", "Share of the time in exposed communication, from 0 to 1."),
}  # fmt: skip
"""By field of the event: the metric, and its doc."""

OF_RUN = {
    **{name: MetricDeclaration(doc) for name, doc in OF_TRAIN_EVENTS.values()},
    "faults_total": MetricDeclaration("Diagnoses of the watchdog, over the whole run.", ("alarm", "cause")),
    "stragglers_total": MetricDeclaration("Stragglers that the watchdog has reported."),
    "checkpoints": MetricDeclaration("Checkpoints in the run folder."),
    "checkpoint_step": MetricDeclaration("Step of the newest one."),
    "checkpoint_age_seconds": MetricDeclaration("Time since the newest one was written."),
    "mirror_backlog": MetricDeclaration("Checkpoints that are newer than the newest one in the mirror."),
}  # fmt: skip
METRICS = {**OF_NODE, **OF_GPUS, **OF_RUN}
ECC_KINDS = {
    "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
}
THROTTLED_BY = {
    "thermal": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "power": pynvml.nvmlClocksThrottleReasonSwPowerCap
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}


def rank_samples(state: NodeState) -> Iterator[Sample]:
    """The local ranks, from their heartbeats."""
    activity = {rank.rank: rank for rank in state.activity}
    for rank in state.ranks:
        label = (str(rank.rank),)
        is_up = rank.state not in (*EXITED, *STOPPED)
        yield "heartbeat_age_seconds", label, rank.still_s
        yield "rank_up", label, is_up
        yield from _progress_samples(activity.get(rank.rank, rank), label)


def _progress_samples(rank: RankState, label: tuple[str, ...]) -> Iterator[Sample]:
    """How far it is, and where its time goes."""
    yield "step", label, rank.step
    yield "rank_phase", (*label, rank.phase.name.lower()), 1

    for phase, seconds in zip(Phase, rank.spent_s, strict=True):
        if phase is rank.phase:
            seconds += rank.age_s
        if seconds:
            yield "phase_seconds_total", (*label, phase.name.lower()), seconds


def gpu_samples() -> list[Sample]:
    """The GPUs of this host as its driver reports them (NVML), whose calls may block for ever when a
    GPU has failed. What a GPU does not report is left out, and nothing where there are none."""
    return [
        (f"gpu_{name}", (str(index), *labels), value)
        for index, handle in enumerate(_open_gpus())
        for name, labels, value in _samples_of(handle)
    ]


@cache
def _open_gpus() -> list[Any]:
    """NVML's handle of each; none where there is no driver."""
    try:
        pynvml.nvmlInit()
        numbers = range(pynvml.nvmlDeviceGetCount())
        return [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]
    except pynvml.NVMLError:
        return []


def _samples_of(gpu: Any) -> Iterator[Sample]:
    """What one GPU reports, without its index and the beginning of the names."""
    if rates := _ask(pynvml.nvmlDeviceGetUtilizationRates, gpu):
        yield "utilization_ratio", (), rates.gpu / 100

    if memory := _ask(pynvml.nvmlDeviceGetMemoryInfo, gpu):
        yield "memory_used_bytes", (), memory.used
        yield "memory_bytes", (), memory.total

    temperature = _ask(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU)
    if temperature is not None:
        yield "temperature_celsius", (), temperature

    for kind, number in ECC_KINDS.items():
        errors = _ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, number, pynvml.NVML_VOLATILE_ECC)
        if errors is not None:
            yield "ecc_errors_total", (kind,), errors

    reasons = _ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    if reasons is not None:
        for reason, bits in THROTTLED_BY.items():
            yield "throttled", (reason,), bool(reasons & bits)


def _ask(call: Callable[..., Any], *arguments: Any) -> Any:
    """None: the GPU does not have it, or is lost."""
    try:
        return call(*arguments)
    except pynvml.NVMLError:
        return None


class RunFigures:
    """What the run folder shows, on the node of rank 0."""

    def __init__(self, run: Path) -> None:
        folder = RunFolder(run)
        self._checkpoints = folder.checkpoints
        self._events = Tail(folder.event_file(0), last_bytes=TAIL_BYTES)
        self._diagnoses = Tail(folder.events / "watch.jsonl", last_bytes=TAIL_BYTES)
        self._train: Mapping[str, Any] = {}
        """The newest log line."""

        self._mirrored: object = None
        """The step of the newest checkpoint in the mirror, -1: none; None: no mirror."""

        self._faults = {(str(alarm), str(cause)): 0 for alarm in Alarm for cause in Cause}
        self._num_stragglers = 0

    def read(self) -> list[Sample]:
        """With the events since the last call."""
        for event in (*self._events.new(), *self._diagnoses.new()):
            self._note(event)
        return [*self._event_samples(), *self._checkpoint_samples()]

    def _note(self, event: Mapping[str, Any]) -> None:
        """One event of the run or of its watchdog."""
        kind = str(event.get("kind"))
        fault = (kind, str(event.get("cause")))
        if fault in self._faults:
            self._faults[fault] += 1

        match kind:
            case "train":
                self._train = event
            case "mirrored":
                self._mirrored = event.get("newest")
            case "straggler":
                self._num_stragglers += 1

    def _event_samples(self) -> Iterator[Sample]:
        """The figures of the newest log line, and counts."""
        for field, (name, _) in OF_TRAIN_EVENTS.items():
            value = self._train.get(field)
            if isinstance(value, int | float | str):
                with suppress(ValueError):
                    yield name, (), float(value)  # a NaN is text in JSON

        for fault, count in self._faults.items():
            yield "faults_total", fault, count
        yield "stragglers_total", (), self._num_stragglers

    def _checkpoint_samples(self) -> Iterator[Sample]:
        """The checkpoints, and how far the mirror is behind."""
        steps = catalog.list_steps(self._checkpoints)
        yield "checkpoints", (), len(steps)

        if isinstance(self._mirrored, int):
            yield "mirror_backlog", (), sum(step > self._mirrored for step in steps)
        if not steps:
            return

        newest = self._checkpoints / catalog.folder_name(steps[-1]) / manifest.FILE_NAME
        yield "checkpoint_step", (), steps[-1]
        yield "checkpoint_age_seconds", (), time.time() - newest.stat().st_mtime


class LateSamples:
    """Samples that are read in a thread, which may block: then the ones before are shown."""

    def __init__(self, read: Callable[[], list[Sample]], name: str) -> None:
        self._read = read
        self._name = name
        self._reading: Future[list[Sample]] | None = None
        """None: no thread reads."""

        self._newest: list[Sample] = []

    async def newest(self) -> list[Sample]:
        """What is read now, if that is not late."""
        # Of two scrapes at once the second waits for what the first reads.
        reading = self._reading or in_background(self._read, name=self._name)
        self._reading = reading
        await asyncio.wait([asyncio.wrap_future(reading)], timeout=LATE_S)

        if reading.done() and reading is self._reading:
            self._reading = None
            if reading.exception() is None:  # else the ones before are shown
                self._newest = reading.result()

        return self._newest


class NodeMetrics:
    """All metrics of a node, as the text that Prometheus reads."""

    def __init__(self, options: SidecarOptions, ranks: LocalRanks) -> None:
        self._ranks = ranks
        self._late = [LateSamples(gpu_samples, "gpus")]
        """The sources that may block."""

        if options.run is not None and 0 in options.ranks:
            self._late.append(LateSamples(RunFigures(Path(options.run)).read, "run-figures"))

        self._num_restarts = start_number(Path(options.folder))
        self._everywhere = (one_line(Path(options.run or "").name), one_line(options.host))
        self._samples: list[Sample] = []
        """What `collect` returns."""

        self._text = b""
        self._rendered_s = 0.0

    async def text(self) -> bytes:
        """At most five times a second a new one."""
        if time.monotonic() - self._rendered_s < KEPT_S:
            return self._text

        late = await asyncio.gather(*(late.newest() for late in self._late))
        restarts: Sample = ("restarts_total", (), self._num_restarts)
        now = [restarts, *rank_samples(self._ranks.state)]

        self._samples = [*now, *chain.from_iterable(late)]
        self._text = generate_latest(self)
        self._rendered_s = time.monotonic()
        return self._text

    def collect(self) -> Iterator[MetricFamily]:
        """As prometheus_client calls it."""
        for name, declaration in METRICS.items():
            make = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            all_labels = [*EVERYWHERE, *declaration.labels]
            family = make(PREFIX + name, declaration.doc, labels=all_labels)

            for sample, labels, value in self._samples:
                if sample == name:
                    family.add_metric([*self._everywhere, *labels], value)

            if family.samples:
                yield family
