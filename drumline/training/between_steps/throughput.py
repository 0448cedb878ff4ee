"""How fast a run trains: samples, tokens and FLOPs a second, and where the time goes beside
computing.

FLOPs are counted once, from the model's own operations: matrix products, convolutions and
attention, forward and backward. They are what the model needs, not what the device does. What the
backward pass computes again is not counted, be it by activation checkpointing or inside an
attention kernel; attention with a mask counts in full. torchtitan and the PaLM paper count in the
same way.

Gradients come from `torch.autograd.grad`, which calls no hook of DDP. Attention counts twice as
much in the backward pass, whichever kernel computes it; torch's own formulas, which count all other
operations, add what GPU kernels compute again, and do not know the CPU's kernel.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import flop_registry

from drumline.rank.torch_internals import DispatchMode, ddp_measurements, measure_ddp_every
from drumline.training.job.job import Job
from drumline.training.memory.gpu_table import peak_tflop_per_s

# The FLOPs of a model


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """The FLOPs of one forward and backward pass over some samples."""

    total: int
    """FLOPs of a forward and a backward pass of what was counted."""

    num_samples: int
    num_tokens: int | None
    arithmetic: str
    """In which most of them are done: `bfloat16`, `float16`, `tf32`, `float32`, ..."""

    def of(self, *, samples: float, tokens: float | None) -> float:
        """The FLOPs of that much data: by its tokens if they are known, since samples may have
        different lengths."""
        if tokens is not None and self.num_tokens:
            return self.total / self.num_tokens * tokens
        return self.total / self.num_samples * samples


def count_flops(
    compute_loss: Callable[[], Tensor],
    parameters: Iterable[nn.Parameter] | None,
    *,
    num_samples: int,
    num_tokens: int | None,
) -> ModelFlops | None:
    """Count one pass; None: it has operations whose FLOPs are unknown, or none. No `.grad` is
    touched and no gradient hook of DDP is called, unless `parameters` is None: then the backward
    pass is a usual one. The caller restores what `compute_loss` changes. Raises if the pass fails,
    or if a part of the backward pass is out of reach (reentrant checkpointing)."""
    searches = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # no search for kernels for so small a batch
    try:
        with _FlopCounter() as counter:
            total = compute_loss()
            counter.is_backward = True
            gradients: Sequence[Tensor | None] = ()

            if parameters is None:
                total.backward()  # type: ignore[no-untyped-call]
            else:
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                gradients = torch.autograd.grad(total, trained, allow_unused=True)
    finally:
        torch.backends.cudnn.benchmark = searches

    leaves_out = any(gradient is None for gradient in gradients)
    if leaves_out and any(issubclass(type(node), BackwardCFunction) for node in graph(total)):
        raise RuntimeError("a backward pass in Python may reach more parameters")
    if counter.has_unknown or not (flops := counter.flops):
        return None

    (dtype, is_convolution), _ = flops.most_common(1)[0]
    if dtype == torch.float32 and torch.cuda.is_available():
        allowed = torch.backends.cudnn if is_convolution else torch.backends.cuda.matmul
        arithmetic = "tf32" if allowed.allow_tf32 else "float32"
    else:
        arithmetic = str(dtype).removeprefix("torch.")

    return ModelFlops(
        total=flops.total(), num_samples=num_samples, num_tokens=num_tokens, arithmetic=arithmetic
    )


def graph(total: Tensor) -> Iterator[Node]:
    """Every node of the backward pass from `total`."""
    visited = set()
    waiting = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


class _FlopCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of the operations that run under it, by type, convolutions by
    themselves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[tuple[torch.dtype, bool]] = Counter()
        self.has_unknown = False
        self.is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        name = func._schema.name.removeprefix("aten::")
        self.has_unknown |= name in _UNKNOWN

        # In a backward pass gradients are only on where a part of the forward pass is repeated.
        if self.is_backward and torch.is_grad_enabled():
            return result

        is_convolution = name.startswith("convolution")
        if name.startswith("_scaled_dot_product_"):
            # its first argument is a gradient
            factor = 2 if name.endswith("_backward") else 1
            query, key, value = args[factor - 1 : factor + 2]
            self.flops[query.dtype, is_convolution] += factor * _attention(query, key, value)
        elif func._overloadpacket in flop_registry:
            formula = flop_registry[func._overloadpacket]
            self.flops[args[0].dtype, is_convolution] += formula(*args, **options, out_val=result)

        return result


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The FLOPs of one: queries by keys, then weights by values."""
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


_UNKNOWN = {"_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer"}


# The speed of a run


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a part of a run, over all ranks; the fields of a `train` or `end` event. None: unknown."""

    samples_per_s: float
    tokens_per_s: float | None
    tflop_per_s: float | None
    mfu: float | None
    """Model FLOPs utilization: the part of the devices' peak; None: unknown."""

    data_share: float
    """The part of the time that ranks waited for data."""

    communication_share: float | None
    """The part of the time that ranks waited for each other; None: not measured."""


class DdpStepTimes(NamedTuple):
    """A step that DDP has measured. NaN: it has not."""

    exposed_s: float = math.nan
    """How long it waited in communication that nothing overlapped."""

    computing_s: float = math.nan
    """Its forward and backward pass, without what is exposed; of several micro-batches, the last
    one's."""


NOT_MEASURED = DdpStepTimes()


class _Interval(NamedTuple):
    """A part of a run, or all since the start of this process. Its time is that of waiting for data
    and that of steps, which has the exposed communication."""

    seconds: float = 0.0
    steps: int = 0
    samples: int = 0
    tokens: float = 0.0
    waited_s: float = 0.0
    exposed_s: float = 0.0
    measured_s: float = 0.0
    """Of the time of steps, that for which `exposed_s` is known."""

    def since(self, begin: _Interval, measured: DdpStepTimes) -> _Interval:
        """What has come since `begin`, of which one step was measured."""
        part = _Interval(*map(operator.sub, self, begin))

        # Ranks leave the reduction of the log line at slightly different times.
        part = part._replace(waited_s=min(part.waited_s, part.seconds))
        if math.isnan(measured.exposed_s) or not part.steps:
            return part

        measured_s = part.seconds - part.waited_s
        # The measured step may have taken much longer than the others: its parts are fractions of
        # its own time.
        step_s = max(measured_s / part.steps, measured.exposed_s + measured.computing_s)

        exposed_s = measured_s * (measured.exposed_s / step_s) if step_s else 0.0
        return part._replace(exposed_s=exposed_s, measured_s=measured_s)

    def plus(self, following: _Interval) -> _Interval:
        """Both parts together."""
        return _Interval(*map(operator.add, self, following))


class Throughput:
    """Measures a run, without the time for evaluations and saves."""

    def __init__(self) -> None:
        self.created = time.perf_counter()
        self.seconds = 0.0
        self.lap_s = 0.0
        """The seconds of the latest lap."""

        self.on_pause: Callable[[str, int, int], None] | None = None
        """Called after each pause with its reason, its begin and its end, in ns of Unix time."""

        self.checkpoint_pause_s = 0.0
        """How long saves have paused the loop."""

        self.start_s: float | None = None
        """From the creation to the end of the first step; None: no step has ended."""

        self.model_flops: ModelFlops | None = None
        self.peak_tflop_per_s: float | None = None
        """Of all devices together; None: unknown."""

        self.num_steps = 0
        self._samples = 0
        self._started: float | None = None
        self._last = _Interval()
        self._whole = _Interval()
        self._steady = _Interval()

    def start(self) -> None:
        """Time counts from now on."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Time does not count until `start`."""
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None

    @contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """`reason`: `evaluation` or `save`."""
        began_ns = time.time_ns()
        self.stop()
        yield
        self.start()
        if self.on_pause is not None:
            self.on_pause(reason, began_ns, time.time_ns())

    def count(self, num_samples: int) -> None:
        """One more optimizer step was launched."""
        self.num_steps += 1
        self._samples += num_samples

    def end_start(self, *, waited_s: float = 0.0, tokens: float = 0.0) -> None:
        """The device has finished the first step, which may have compiled: the first lap begins now.
        `waited_s`, `tokens`: as for `lap`."""
        self._last = self._so_far(tokens, waited_s)
        self.start_s = time.perf_counter() - self.created

    def _so_far(self, tokens: float, waited_s: float) -> _Interval:
        """From the creation to now."""
        self.stop()
        self.start()
        return _Interval(self.seconds, self.num_steps, self._samples, tokens, waited_s)

    def lap(
        self,
        *,
        waited_s: float,
        tokens: float = 0.0,
        measured: DdpStepTimes = NOT_MEASURED,
        has_compiled: bool = False,
    ) -> Speed:
        """The speed since the last lap; if there is no step since, with the first step. Call it when
        the device has finished its work. `waited_s`: how long the run has waited for data so far,
        the mean of all ranks. `tokens`: of all ranks so far. `has_compiled`: in this lap."""
        begin = self._last
        self._last = self._so_far(tokens, waited_s)
        has_steps = begin.steps < self.num_steps
        lap = self._last.since(begin if has_steps else _Interval(), measured)
        self.lap_s = lap.seconds
        self._whole = self._whole.plus(lap)
        if has_steps and not has_compiled:
            self._steady = self._steady.plus(lap)

        return self._speed(lap)

    def steady(self) -> Speed:
        """The speed of all laps, without the first step and without laps in which something was
        compiled. If nothing else is left: with them."""
        return self._speed(self._usual)

    @property
    def _usual(self) -> _Interval:
        """The steady laps, if there are any."""
        return self._steady if self._steady.steps else self._whole

    def _speed(self, interval: _Interval) -> Speed:
        """The rates in this interval."""
        seconds = max(interval.seconds, 1e-9)
        samples = interval.samples
        tokens = interval.tokens
        tflop_per_s = None
        mfu = None

        if self.model_flops is not None and samples:
            flops = self.model_flops.of(samples=samples, tokens=tokens or None)
            tflop_per_s = flops / seconds / 1e12
            mfu = tflop_per_s / self.peak_tflop_per_s if self.peak_tflop_per_s else None

        data_share = interval.waited_s / seconds
        communication_share = None
        if interval.measured_s:
            communication_share = (1.0 - data_share) * (interval.exposed_s / interval.measured_s)

        return Speed(
            samples_per_s=samples / seconds,
            tokens_per_s=tokens / seconds if tokens else None,
            tflop_per_s=tflop_per_s,
            mfu=mfu,
            data_share=data_share,
            communication_share=communication_share,
        )

    def seconds_for(self, num_steps: int) -> float:
        """How long this many more steps will take, at the speed so far."""
        return num_steps * self._usual.seconds / max(self._usual.steps, 1)


def total_peak(ranks: Iterable[Mapping[str, Any]], arithmetic: str) -> float | None:
    """The peak of the GPUs of all ranks, in TFLOP/s; one that several ranks share counts once.
    None: unknown."""
    gpus = {(rank["host"], rank["gpu"]): str(rank["device"]) for rank in ranks}
    peaks = [peak_tflop_per_s(name, arithmetic) for name in gpus.values()]
    return None if None in peaks else sum(filter(None, peaks))


class ExposedCommunication:
    """How long this rank's steps wait in DDP's all-reduce when their backward pass has ended, for
    the network or for a slower rank, as DDP measures it in some steps anyway. On the CPU that is in
    every tenth step; on a GPU, where it has to wait for the device, in one of a hundred, as torch
    does by default. The first ten steps are all measured."""

    EVERY = 10
    LONGEST = 200

    def __init__(self, job: Job) -> None:
        self._job = job
        self._applied = job.applied
        self._newest_iteration = 0
        self._newest_step = 0
        if isinstance(self._applied, DistributedDataParallel) and job.ddp.device.type == "cpu":
            measure_ddp_every(self._applied, self.EVERY)

    def newest(self, step: int) -> DdpStepTimes:
        """The parts of the step that was measured last, on this rank. A captured step is not
        measured."""
        if not isinstance(self._applied, DistributedDataParallel) or self._job.captured_steps:
            return NOT_MEASURED

        measured = ddp_measurements(self._applied)
        iteration = int(measured.get("iteration", 0))
        sent_ns = measured.get("backward_comm_time", 0)

        if iteration != self._newest_iteration:
            self._newest_iteration = iteration
            self._newest_step = step

        # The first passes are those of the warm-up.
        is_recent = iteration > 2 and step - self._newest_step <= self.LONGEST
        if not is_recent or not sent_ns or self._job.ddp.world_size == 1:
            return NOT_MEASURED

        exposed_ns = max(0, sent_ns - measured["backward_compute_comm_overlap_time"])
        computing_ns = measured["forward_compute_time"] + measured["backward_compute_time"]
        return DdpStepTimes(exposed_s=exposed_ns / 1e9, computing_s=computing_ns / 1e9)
