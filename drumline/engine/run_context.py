"""What everything around the steps of a run works with."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from drumline.config.schema import Config
from drumline.engine.job import Job, Progress
from drumline.engine.run_folder import RunFolder
from drumline.engine.run_settings import RunRequest
from drumline.metrics.events import Reporter


class Throughput:
    """How fast a run trains, the time for evaluations and saves apart."""

    def __init__(self) -> None:
        self._created = time.perf_counter()
        self.seconds = 0.0
        self._steps = self._samples = 0
        self._started: float | None = None
        self._last = (0.0, 0)
        self._lap_seconds = self._waited = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        yield
        self.start()

    def count(self, num_samples: int) -> None:
        """One more optimizer step was launched."""
        self._steps += 1
        self._samples += num_samples

    def lap(self) -> float:
        """Samples per second since the lap before; call it when the device has caught up."""
        self.stop()
        self.start()
        seconds, samples = self._last
        self._last = (self.seconds, self._samples)
        self._lap_seconds = max(self.seconds - seconds, 1e-9)
        return (self._samples - samples) / self._lap_seconds

    def data_share(self, waited_s: float) -> float:
        """The share of the last lap that went into waiting for data. `waited_s`: how long the run has waited in all."""
        waited, self._waited = waited_s - self._waited, waited_s
        return min(1.0, waited / max(self._lap_seconds, 1e-9))

    def seconds_since_start(self) -> float:
        """Evaluations and saves included."""
        return time.perf_counter() - self._created

    @property
    def samples_per_s(self) -> float:
        """Over the whole run."""
        return self._samples / max(self.seconds, 1e-9)

    def seconds_for(self, num_steps: int) -> float:
        """How long so many more steps will take, at the speed so far."""
        return num_steps * self.seconds / max(self._steps, 1)


@dataclass(frozen=True)
class RunContext:
    """One object for the whole run; only `progress`, `throughput` and `metrics` change."""

    request: RunRequest
    job: Job
    progress: Progress
    reporter: Reporter
    total_steps: int
    throughput: Throughput = field(default_factory=Throughput)
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the latest evaluation."""

    @property
    def config(self) -> Config:
        return self.request.config

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.request.run)

    @property
    def epoch(self) -> int:
        """The epoch of the latest step, counted from 1."""
        cursor = self.progress.cursor
        return max(1, cursor.epoch if cursor.position == 0 else cursor.epoch + 1)

    def note(self, message: str) -> None:
        """Log a sentence."""
        self.reporter.report("note", step=self.progress.step, message=message)

    def warn(self, message: str) -> None:
        self.reporter.report("warning", step=self.progress.step, message=message)
