"""How fast a run trains, the time for evaluations and saves apart."""

from __future__ import annotations

import time


class Pace:
    """Counts steps and samples against a clock that can be stopped."""

    def __init__(self) -> None:
        self._made = time.perf_counter()
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

    def count(self, num_samples: int) -> None:
        """One more optimizer step has been handed to the device."""
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
        """The share of the lap just ended that went into waiting for data. `waited_s`: how long that was in all."""
        waited, self._waited = waited_s - self._waited, waited_s
        return min(1.0, waited / max(self._lap_seconds, 1e-9))

    def seconds_since_start(self) -> float:
        """All of it, evaluations and saves included."""
        return time.perf_counter() - self._made

    @property
    def samples_per_s(self) -> float:
        """Over the whole run."""
        return self._samples / max(self.seconds, 1e-9)

    def seconds_for(self, num_steps: int) -> float:
        """How long so many more steps will take, at the pace so far."""
        return num_steps * self.seconds / max(self._steps, 1)
