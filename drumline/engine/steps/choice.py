"""Which kind of step a run takes, by its settings and its device. With `auto` the first steps of the run try each kind
in turn, the same on every rank, and the fastest is kept, by the total time of all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drumline.config.schema import Config
from drumline.data.loader import Step
from drumline.distributed.collectives import all_sum
from drumline.engine.job import Job
from drumline.engine.steps.eager import AnyStep, LossFunction, LossParts, TrainStep, loss_function
from drumline.engine.steps.elastic import ElasticStep
from drumline.engine.steps.graph import GraphStep
from drumline.errors import UsageError, log

# Enough steps to compile and to capture, so that a kind reaches its full speed.
WARM_UP_STEPS = 20
TIMED_STEPS = 12


def _ignore(_: str) -> None: ...


def make_step(
    job: Job,
    config: Config,
    *,
    chosen: str | None = None,
    on_choice: Callable[[str], None] = _ignore,
    note: Callable[[str], None] = _ignore,
) -> AnyStep:
    """`chosen`: the earlier choice of `auto` in this run; `on_choice` gets a new one. `note` logs a message."""
    if config.train.exact == "elastic":
        return ElasticStep(
            job,
            seed=config.train.seed,
            clip_norm=config.optim.clip_norm,
            bucket_bytes=int(config.dist.bucket_cap_mb * 2**20),
            find_unused=config.dist.find_unused_parameters,
        )
    settings: dict[str, Any] = {"clip_norm": config.optim.clip_norm, "sends_buffers": config.dist.broadcast_buffers}
    kinds: dict[str, Callable[[], AnyStep]] = {
        "eager": lambda: TrainStep(job, **settings),
        "compile": lambda: CompiledStep(job, **settings),
    }
    if job.ddp.device.type == "cuda" and job.uncapturable is None:
        kinds["graph"] = lambda: GraphStep(kinds["eager"](), job, note=note)
        kinds["compiled_graph"] = lambda: GraphStep(kinds["compile"](), job, note=note)
    if config.train.step == "auto" and chosen not in kinds:
        if job.uncapturable is not None:
            note(f"captured steps are left out: {job.uncapturable}")
        return AutoStep(kinds, device=job.ddp.device, on_choice=on_choice, note=note)
    wanted = chosen if chosen and config.train.step == "auto" else config.train.step
    if wanted not in kinds and job.uncapturable is not None:
        raise UsageError(
            f"--train.step {wanted} cannot capture the steps of this optimizer: {job.uncapturable}",
            next_step=f"choose one of {', '.join(kinds)}, or another optimizer",
        )
    if wanted not in kinds:
        raise UsageError(
            f"--train.step {wanted} needs a GPU, and this rank computes on {job.ddp.device}",
            next_step=f"choose one of {', '.join(kinds)}",
        )
    return kinds[wanted]()


class AutoStep:
    """Takes steps of each kind in turn, then of the fastest."""

    def __init__(
        self,
        kinds: Mapping[str, Callable[[], AnyStep]],
        *,
        device: torch.device,
        on_choice: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self._left = list(kinds.items())
        self._device, self._on_choice, self._note = device, on_choice, note
        self._steps: dict[str, AnyStep] = {}
        self._seconds: dict[str, float] = {}
        self._is_settled = False
        self.grad_norm: Tensor | None = None
        self._try_next()

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        begin = None if self._is_settled else _time_point(self._device)
        self._step(step)
        self.grad_norm = self._step.grad_norm
        if begin is not None:
            self._count(step, begin)

    def _try_next(self) -> None:
        self._name, make = self._left.pop(0)
        self._step = self._steps[self._name] = make()
        self._num_taken = self._num_samples = 0
        self._times: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []

    def _count(self, step: Step, begin: float | torch.cuda.Event) -> None:
        """Collective at the last step of the trial."""
        self._num_taken += 1
        if self._num_taken <= WARM_UP_STEPS:
            return
        self._times.append((begin, _time_point(self._device)))
        self._num_samples += step.plan.global_size
        if len(self._times) < TIMED_STEPS:
            return
        self._seconds[self._name] = sum(_seconds_between(*pair) for pair in self._times) / self._num_samples
        if self._left:
            self._try_next()
            return
        mine = torch.tensor(list(self._seconds.values()), device=self._device)
        times = dict(zip(self._seconds, all_sum(mine).tolist(), strict=True))
        choice = min(times, key=times.__getitem__)
        self._is_settled = True
        self._step = self._steps[choice]
        self._steps = {}  # frees the memory of their graphs
        others = ", ".join(f"{name} {seconds / times[choice]:.2f}" for name, seconds in times.items())
        self._on_choice(choice)
        self._note(f"steps run as {choice}, the fastest here; time per step relative to it: {others}")


def _time_point(device: torch.device) -> float | torch.cuda.Event:
    """The current time; on a GPU an event in its queue, so that nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds_between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Waits until the device has reached the second."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert not isinstance(begin, float)
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


class CompiledStep:
    """`--train.step compile`: the task's loss, with the model's forward and backward pass, compiled by torch. The short
    batch at the end of an epoch is not compiled: that would cost more than it gains."""

    def __init__(self, job: Job, **settings: Any) -> None:
        self._batch_size = job.batch.size
        self._full = TrainStep(job, compute_loss=compiled(loss_function(job.task)), **settings)
        self._short = TrainStep(job, **settings)
        self.grad_norm: Tensor | None = None

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        inner = self._full if step.plan.global_size == self._batch_size else self._short
        inner(step)
        self.grad_norm = inner.grad_norm


def compiled(function: LossFunction) -> LossFunction:
    """The function, compiled when it is first called; if that fails, it runs uncompiled, with a warning."""
    from torch._functorch import config as functorch_config  # a slow import that few runs need

    # The backward pass too: otherwise torch compiles it in the first backward pass, too late to fall back.
    early = "force_non_lazy_backward_lowering"
    if hasattr(functorch_config, early):
        setattr(functorch_config, early, True)
    compiled_function = torch.compile(function)
    is_off = False

    def parts(model: nn.Module, batch: Any) -> LossParts:
        nonlocal is_off
        if not is_off:
            try:
                return compiled_function(model, batch)
            except torch._dynamo.exc.TorchDynamoException as error:
                is_off = True
                lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
                reason = next((line for line in lines if "Error" in line or "compiler" in line), lines[0])
                log.warning(
                    f"steps are not compiled but run operation by operation, because torch.compile failed: {reason}"
                )
        return function(model, batch)

    return parts
