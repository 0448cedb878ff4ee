"""How fast a run trains: samples, tokens and FLOPs a second, and where the time goes beside computing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from drumline.engine.gpu_table import peak_tflop_per_s
from drumline.engine.job import Job
from drumline.engine.model_flops import ModelFlops


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a part of a run, over all ranks; the fields of a `train` or `end` event. None: unknown."""

    samples_per_s: float
    tokens_per_s: float | None
    tflop_per_s: float | None
    mfu: float | None
    data_share: float
    communication_share: float | None


class _Totals(NamedTuple):
    """Since the start of this process."""

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: float = 0.0
    waited_s: float = 0.0
    exposed_s: float = 0.0
    measured_s: float = 0.0
    """Of the seconds, those for which `exposed_s` is known."""


class Throughput:
    """Measures a run, without the time for evaluations and saves."""

    def __init__(self) -> None:
        self.created = time.perf_counter()
        self.seconds = 0.0
        self.num_pauses = 0
        self.checkpoint_pause_s = 0.0
        """How long saves have paused the loop."""
        self.model_flops: ModelFlops | None = None
        self.peak_tflop_per_s: float | None = None
        """Of all devices together; None: unknown."""
        self._steps = self._samples = 0
        self._started: float | None = None
        self._last = _Totals()

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.num_pauses += 1
        self.stop()
        yield
        self.start()

    def count(self, num_samples: int) -> None:
        """One more optimizer step was launched."""
        self._steps += 1
        self._samples += num_samples

    def lap(self, *, waited_s: float, tokens: float = 0.0, exposed_s: float | None = None) -> Speed:
        """The speed since the last lap. Call it when the device has finished its work. `waited_s`: how long the run has
        waited for data so far. `tokens`: of all ranks so far. `exposed_s`: exposed communication in a step."""
        self.stop()
        self.start()
        before = self._last
        steps, seconds = self._steps - before.steps, self.seconds - before.seconds
        exposed = (0.0, 0.0) if exposed_s is None else (min(exposed_s * steps, seconds), seconds)
        self._last = _Totals(
            self.seconds,
            self._steps,
            self._samples,
            tokens,
            waited_s,
            before.exposed_s + exposed[0],
            before.measured_s + exposed[1],
        )
        return self._speed(before, self._last)

    def whole(self, *, waited_s: float) -> Speed:
        """The speed of the whole run, after its last lap."""
        now = self._last._replace(seconds=self.seconds, samples=self._samples, waited_s=waited_s)
        return self._speed(_Totals(), now)

    def _speed(self, begin: _Totals, end: _Totals) -> Speed:
        seconds = max(end.seconds - begin.seconds, 1e-9)
        samples, tokens = end.samples - begin.samples, end.tokens - begin.tokens
        tflop_per_s = mfu = None
        if self.model_flops is not None and samples:
            flops = self.model_flops.of(samples=samples, tokens=tokens or None)
            tflop_per_s = flops / seconds / 1e12
            mfu = tflop_per_s / self.peak_tflop_per_s if self.peak_tflop_per_s else None
        measured_s = end.measured_s - begin.measured_s
        return Speed(
            samples_per_s=samples / seconds,
            tokens_per_s=tokens / seconds if tokens else None,
            tflop_per_s=tflop_per_s,
            mfu=mfu,
            data_share=min(1.0, (end.waited_s - begin.waited_s) / seconds),
            communication_share=(end.exposed_s - begin.exposed_s) / measured_s if measured_s else None,
        )

    def seconds_for(self, num_steps: int) -> float:
        """How long this many more steps will take, at the speed so far."""
        return num_steps * self.seconds / max(self._steps, 1)


def total_peak(ranks: Iterable[Mapping[str, Any]], arithmetic: str) -> float | None:
    """The peak of the GPUs of all ranks, in TFLOP/s; one that several ranks share counts once. None: unknown."""
    gpus = {(rank["host"], rank["gpu"]): str(rank["device"]) for rank in ranks}
    peaks = [peak_tflop_per_s(name, arithmetic) for name in gpus.values()]
    return None if None in peaks else sum(filter(None, peaks))


class ExposedCommunication:
    """How long this rank's steps wait in DDP's all-reduce when their backward pass has ended, for the network or for a
    slower rank, as DDP measures it in some steps anyway. On the CPU that is in every tenth step; on a GPU, where it has
    to wait for the device, in one of a hundred, as torch does by default. The first ten steps are all measured."""

    EVERY, LONGEST = 10, 200

    def __init__(self, job: Job) -> None:
        self._job, self._applied = job, job.applied
        self._newest = (0, 0)
        if isinstance(self._applied, DistributedDataParallel) and job.ddp.device.type == "cpu":
            self._applied._set_ddp_runtime_logging_sample_rate(self.EVERY)  # type: ignore[no-untyped-call]

    def seconds_per_step(self, step: int) -> float:
        """Of the step that was measured last; NaN: unknown. A captured step is not measured."""
        if not isinstance(self._applied, DistributedDataParallel) or self._job.captured_steps:
            return math.nan
        measured = self._applied._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        iteration, sent_ns = int(measured.get("iteration", 0)), measured.get("backward_comm_time", 0)
        if iteration != self._newest[0]:
            self._newest = iteration, step
        # The first passes are those of the warm-up.
        is_recent = iteration > 2 and step - self._newest[1] <= self.LONGEST
        if not is_recent or not sent_ns or self._job.ddp.world_size == 1:
            return math.nan
        return max(0.0, float(sent_ns - measured["backward_compute_comm_overlap_time"]) / 1e9)
