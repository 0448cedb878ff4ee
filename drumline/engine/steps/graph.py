"""`--train.step graph`: whole steps captured as CUDA graphs and replayed, which leaves the host next to nothing to do.

Forward, backward, all-reduce, clipping, optimizer and loss scaling of all micro-batches are one graph for each shape
of a step. The first steps of a shape run operation by operation, as steps of the run like any other; the last of them
is watched for what a graph would get wrong. What stays live: batches are copied in; the learning rate, the loss scale,
the optimizer's state and the sums of the meters are tensors that the graph reads and writes; random numbers go on where
the generator stands. So a captured step has the bits of an eager one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from drumline.data.steps import MicroBatch, Step
from drumline.engine.job import Job
from drumline.engine.steps.capturable import hooked, not_fixed, observed, place_of
from drumline.engine.steps.captured import CapturedStep, Shape, repair
from drumline.engine.steps.half_a_step import forget_half_a_step
from drumline.engine.steps.kind import AnyStep
from drumline.engine.steps.shapes_seen import STEPS_OF_A_SHAPE, ShapesSeen
from drumline.log import log
from drumline.watch.beats.phase import FORWARD, OPTIMIZER

# Every graph holds on to the memory of its inputs; data of more shapes than this has no usual one.
_MOST_SHAPES = 8


class _Known(NamedTuple):
    """A shape that has its graph."""

    captured: CapturedStep
    host_weight: float
    """What a step of it adds to the meter on the host."""
    grad_norm: Tensor | None


class GraphStep:
    """Takes the steps of `inner`, captured where that can be. `tell` is given sentences for the log."""

    def __init__(self, inner: AnyStep, job: Job, *, tell: Callable[[str], None]) -> None:
        self._inner = inner
        self._job = job
        self._tell = tell
        self._beat = job.ddp.beat
        self._pool = torch.cuda.graph_pool_handle()
        self._seen = ShapesSeen()
        self._has_too_many = False
        self._known: dict[Hashable, _Known] = {}
        self._is_off = False
        self.grad_norm: Tensor | None = None
        """Of the latest step, before clipping; on the device."""
        if isinstance(job.applied, DistributedDataParallel):
            # What DDP times later on, now and then, cannot be captured either.
            job.applied._set_ddp_runtime_logging_sample_rate(2**30)  # type: ignore[no-untyped-call]
        if reason := hooked(job.model, job.optimizer):
            self._give_up(reason)

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        if self._is_off:
            self._take(step)
            return
        micro_batches = list(step.micro_batches)
        step = step._replace(micro_batches=iter(micro_batches))
        shape = Shape(step, micro_batches)
        known = self._known.get(shape.key)
        if known is None:
            known = self._come_to_know(shape, step, micro_batches)
        if known is not None:
            self._replay(known, shape)

    def _replay(self, known: _Known, shape: Shape) -> None:
        self._beat.next_micro()
        self._beat.mark(FORWARD)
        known.captured.replay(shape)
        self._beat.mark(OPTIMIZER)
        self._job.meter.host_weight += known.host_weight
        self.grad_norm = known.grad_norm

    def _take(self, step: Step) -> None:
        self._inner(step)
        self.grad_norm = self._inner.grad_norm

    def _come_to_know(self, shape: Shape, step: Step, micro_batches: list[MicroBatch]) -> _Known | None:
        """The graph of a shape that has been seen often enough; else the step is taken, and there is none."""
        if shape.key not in self._seen and not self._welcome(shape):
            self._take(step)
            return None
        stage = self._seen.next_stage(shape.key)
        if stage == "capture":
            return self._capture(shape, step, micro_batches)
        if stage == "take":
            self._take(step)
            return None
        with observed(self._job.model, self._job.task) as reasons:
            self._take(step)
        if reasons:
            self._give_up(reasons[0])
        return None

    def _welcome(self, shape: Shape) -> bool:
        """Whether a shape that comes for the first time may get a graph of its own."""
        if reason := not_fixed(shape.leaves, self._job.ddp.device):
            self._give_up(reason)
            return False
        if len(self._seen) == _MOST_SHAPES:
            if not self._has_too_many:
                self._has_too_many = True
                self._tell(
                    f"batches come in more than {_MOST_SHAPES} shapes: steps of any other run operation by operation"
                )
            return False
        if len(self._seen) > 0:
            self._tell(
                f"a step of another shape ({shape}) runs operation by operation until it has come "
                f"{STEPS_OF_A_SHAPE} times"
            )
        return True

    def _capture(self, shape: Shape, step: Step, micro_batches: list[MicroBatch]) -> _Known | None:
        device, meter = self._job.ddp.device, self._job.meter
        rng, weight = torch.cuda.get_rng_state(device), meter.host_weight
        try:
            captured = CapturedStep(self._inner, step, micro_batches, shape, self._pool)
        except RuntimeError as error:
            repair(device, self._pool, rng)
            forget_half_a_step(self._job.applied, self._job.optimizer, self._job.scaler)
            meter.host_weight = weight
            self._give_up(f"CUDA refuses to capture it{place_of(error)}: {_first_line(error)}")
            self._take(step._replace(micro_batches=iter(micro_batches)))
            return None
        self._job.captured_steps.add(captured)
        self._known[shape.key] = _Known(captured, meter.host_weight - weight, self._inner.grad_norm)
        meter.host_weight = weight
        return self._known[shape.key]

    def _give_up(self, reason: str) -> None:
        self._is_off = True
        self._known.clear()
        log.warning(f"steps are not captured as a graph but run operation by operation, because {reason}")


def _first_line(error: BaseException) -> str:
    # The end of a capture that has failed is an error of its own, which says nothing.
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    return str(first).partition("\n")[0]
