"""`--train.step graph`: whole steps captured as CUDA graphs and replayed, with almost no work for
the host.

There is one graph for each shape of a step. The first steps of a shape run eagerly; the last of
them is checked for what a graph would get wrong. Batches are copied in; the learning rate, the loss
scale, the optimizer's state and the sums of the meters are tensors that the graph reads and writes.
So a captured step gives the same bits as an eager one.

For each shape of a step (`ShapesSeen`):

    run      the first steps are eager, while libraries choose their kernels
    observe  one more eager step: does it wait for the device, draw on the host, or change Python's state?
    capture  the same step is recorded, without computing it, and then replayed
    replay   all further steps: their batches are copied into the memory that the graph reads
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from drumline.base.errors import log
from drumline.base.user_code import is_users_file
from drumline.data.loader import MicroBatch, Step
from drumline.rank.torch_internals import (
    clear_cublas_workspaces,
    copy_to_each,
    end_allocation_to_pool,
    pytree,
)
from drumline.training.job.job import Job
from drumline.training.job.optimizer import set_capturable
from drumline.training.steps.eager import AnyStep
from drumline.watch.heartbeat import FORWARD, OPTIMIZER

# Every graph keeps the memory of its inputs, so their number is limited.
_MOST_SHAPES = 8
# DDP times its first ten backward passes with events, which cannot be captured.
STEPS_BEFORE = 11
# Steps of one shape before its capture: libraries choose their kernels, the compiler compiles.
STEPS_OF_A_SHAPE = 3


class ShapesSeen:
    """The stage of each shape: it runs some times, is observed once, and is then captured."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_seen: Counter[Hashable] = Counter()
        self._observed: set[Hashable] = set()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._num_seen

    def __len__(self) -> int:
        return len(self._num_seen)

    def next_stage(self, key: Hashable) -> Literal["run", "observe", "capture"]:
        """What to do with a step of this shape. A shape is observed before it is captured."""
        if key in self._observed:
            return "capture"

        self._num_steps += 1
        self._num_seen[key] += 1
        if self._num_seen[key] < STEPS_OF_A_SHAPE or self._num_steps < STEPS_BEFORE:
            return "run"

        self._observed.add(key)
        return "observe"


class GraphStep:
    """Takes the steps of `inner`, captured if possible. With the first step that cannot be
    captured, all further ones are eager."""

    def __init__(self, inner: AnyStep, job: Job) -> None:
        self._inner = inner
        self._job = job
        self._heartbeat = job.heartbeat

        self._pool = torch.cuda.graph_pool_handle()
        self._seen = ShapesSeen()
        self._graphs: dict[Hashable, CapturedStep] = {}
        self._is_off = False
        set_capturable(job.optimizer, job.group_settings, is_on=True)

        if isinstance(job.applied, DistributedDataParallel):
            # DDP's occasional timings of later steps cannot be captured either.
            job.applied._set_ddp_runtime_logging_sample_rate(2**30)  # type: ignore[no-untyped-call]

        if reason := find_hook(job.model, job.optimizer):
            self._turn_off(reason)

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        if self._is_off:
            self._inner(step)
            return

        micro_batches = list(step.micro_batches)
        step = step._replace(micro_batches=iter(micro_batches))

        shape = Shape(step, micro_batches)
        graph = self._graphs.get(shape.key)
        if graph is None:
            graph = self._run_or_capture(shape, step, micro_batches)

        if graph is not None:
            self._heartbeat.next_micro()
            self._heartbeat.mark(FORWARD)
            graph.replay(shape)
            self._heartbeat.mark(OPTIMIZER)

            self._job.meter.host_weight += graph.host_weight
            self._job.finite.grad_norm = graph.grad_norm

    def _run_or_capture(
        self,
        shape: Shape,
        step: Step,
        micro_batches: list[MicroBatch],
    ) -> CapturedStep | None:
        """The graph, if the shape was seen often enough; otherwise None, and the step has run."""
        if shape.key not in self._seen:
            if reason := find_uncopyable(shape.leaves, self._job.ddp.device):
                self._turn_off(reason)
            if reason or len(self._seen) == _MOST_SHAPES:
                self._inner(step)
                return None

        stage = self._seen.next_stage(shape.key)
        if stage == "capture":
            return self._capture(shape, step, micro_batches)

        if stage == "run":
            self._inner(step)
            return None

        with observed(self._job.model, self._job.task) as reasons:
            self._inner(step)

        if reasons:
            self._turn_off(reasons[0])

        return None

    def _capture(
        self,
        shape: Shape,
        step: Step,
        micro_batches: list[MicroBatch],
    ) -> CapturedStep | None:
        """Capture the step, and return its graph; None: that is impossible, and the step has run
        eagerly. A capture computes nothing, so what it has counted on the host is taken back."""
        # registered since the start
        if reason := find_hook(self._job.model, self._job.optimizer):
            self._turn_off(reason)
            self._inner(step)
            return None

        device = self._job.ddp.device
        meter = self._job.meter
        rng = torch.cuda.get_rng_state(device)

        weight = meter.host_weight
        try:
            captured = CapturedStep(self._inner, step, micro_batches, shape, self._pool)
        except RuntimeError as error:
            end_failed_capture(device, self._pool, rng)
            undo_partial_step(self._job.applied, self._job.optimizer, self._job.scaler)
            meter.host_weight = weight

            # Ending a failed capture raises another error, which does not show the cause.
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            message = str(first).partition("\n")[0]

            self._turn_off(f"CUDA cannot capture it{user_line(error)}: {message}")
            self._inner(step._replace(micro_batches=iter(micro_batches)))

            return None

        self._job.captured_steps.add(captured)
        self._graphs[shape.key] = captured

        captured.host_weight = meter.host_weight - weight
        captured.grad_norm = self._job.finite.grad_norm
        meter.host_weight = weight

        return captured

    def _turn_off(self, reason: str) -> None:
        """All further steps run eagerly, for this reason."""
        self._is_off = True
        self._graphs.clear()
        log.warning(f"steps run eagerly, not captured as a CUDA graph, because {reason}")


class Shape:
    """What a graph depends on in a step, and its tensors, in order. Steps with the same `key` can
    replay the same graph."""

    def __init__(self, step: Step, micro_batches: Sequence[MicroBatch]) -> None:
        self.leaves, self.nesting = pytree.tree_flatten([micro.data for micro in micro_batches])
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.key: Hashable = (
            step.plan.global_size,
            tuple((micro.size, micro.is_last) for micro in micro_batches),
            repr(self.nesting),
            tuple(map(_kind_of, self.leaves)),
        )


def _kind_of(leaf: Any) -> Hashable:
    """What a graph depends on in a leaf of a batch."""
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad
    return repr(leaf)


class CapturedStep:
    """A graph that can be replayed on other batches of the same shape."""

    def __init__(
        self,
        run: Callable[[Step], None],
        step: Step,
        micro_batches: Sequence[MicroBatch],
        shape: Shape,
        pool: Any,
    ) -> None:
        """Capture what `run` does with such a step, without computing it. Raises CUDA's error if
        that is impossible."""
        self.host_weight = 0.0
        """What a step adds to the meter on the host."""

        self.grad_norm: Tensor | None = None
        """That of each replay."""

        self._inputs = [tensor.clone() for tensor in shape.tensors]
        inputs = iter(self._inputs)
        leaves = [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in shape.leaves]
        batches = pytree.tree_unflatten(leaves, shape.nesting)

        pairs = zip(micro_batches, batches, strict=True)
        fixed = [micro._replace(data=data) for micro, data in pairs]

        clear_cublas_workspaces()
        self._graph = torch.cuda.CUDAGraph()

        # Other threads (the writer of checkpoints, NCCL's watchdog) may use CUDA during the
        # capture.
        with torch.cuda.graph(
            self._graph,
            pool=pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",
        ):
            run(step._replace(micro_batches=iter(fixed)))

    def replay(self, shape: Shape) -> None:
        """Run the graph on this step's batches, without waiting for the device."""
        copy_to_each(self._inputs, shape.tensors)
        self._graph.replay()

    def release(self) -> None:
        """Wait for the last replay, then destroy the graph, even if other references exist. The
        process group cannot be destroyed before: NCCL waits forever for every graph with a
        collective."""
        torch.cuda.synchronize()
        self._graph.reset()


def end_failed_capture(device: torch.device, pool: Any, rng: Tensor) -> None:
    """After a failed capture torch is still in capture mode: it would refuse random numbers, and
    never free memory that other streams have used. `rng`: the generator's state before."""
    fresh = torch.Generator(device)
    fresh.set_state(rng)
    torch.cuda.default_generators[device.index].graphsafe_set_state(fresh.graphsafe_get_state())

    try:
        end_allocation_to_pool(device, pool)
    except RuntimeError:
        return  # the capture had already ended


def undo_partial_step(applied: nn.Module, optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """After a step that failed half-way: reset gradients, DDP's reducer and the scaler, so that it
    can run again. torch has no public names for the last two."""
    optimizer.zero_grad(set_to_none=True)
    if isinstance(applied, DistributedDataParallel):
        # Only if the backward pass had begun: after a reset DDP rebuilds its buckets, which all
        # ranks must do together. So this is only for errors on every rank, such as an operation
        # that cannot be captured.
        try:
            applied.reducer._check_reducer_finalized()
        except RuntimeError:
            applied.reducer._reset_state()

    if scaler is not None:
        scaler._per_optimizer_states.clear()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, set, dict, deque)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_SYNCHRONISING = "called a synchronizing CUDA operation"


def find_hook(model: nn.Module, optimizer: Optimizer) -> str | None:
    """A hook is Python that a replay would not call. The answer names what has one: `layers.0 has a
    hook, which a replayed step would not call`."""
    for text, holder, names in _holders_of_hooks(model, optimizer):
        if any(getattr(holder, name, None) for name in names):
            return f"{text}, which a replayed step would not call"
    return None


def _holders_of_hooks(
    model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[str, object, Sequence[str]]]:
    """What may have a hook: how to say so, the holder, and its attributes for hooks."""
    for name, module in model.named_modules():
        yield f"{name or type(model).__name__} has a hook", module, _HOOKS

    yield "there is a hook on all modules", module_hooks, _GLOBAL_HOOKS
    yield "the optimizer has a hook", optimizer, _OPTIMIZER_HOOKS
    for name, parameter in model.named_parameters():
        yield f"the gradient of {name} has a hook", parameter, _GRADIENT_HOOKS


def find_uncopyable(leaves: Iterable[Any], device: torch.device) -> str | None:
    """A batch is copied into the captured memory: it must consist of tensors on the device, and
    plain values."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.device != device:
                return f"a batch holds a tensor that is not a plain one on {device} ({leaf.layout}, {leaf.device})"
        elif not isinstance(leaf, _PLAIN):
            return f"a batch holds a {type(leaf).__name__}, which cannot be copied into captured memory"
    return None


@contextmanager
def observed(model: nn.Module, task: object) -> Iterator[list[str]]:
    """Take one eager step inside; afterwards the list holds the reasons against a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught, host_changes(model, task) as reasons:
        # torch warns that it does not detect every synchronization
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")

        try:
            yield reasons
        finally:
            torch.cuda.set_sync_debug_mode(before)

    waits = []
    for warning in caught:
        file = warning.filename
        line = warning.lineno
        if _SYNCHRONISING in str(warning.message):
            waits.append(f"it waits for the device at {Path(file).name}:{line}")
        else:
            warnings.warn_explicit(warning.message, warning.category, file, line)

    reasons[:0] = waits


_REASONS = {
    "generator": "it draws random numbers on the host ({}), and a replayed step would repeat the same ones",
    "value": "{} changes from step to step ({}, then {})",
    "tensor": "{} is replaced by another tensor in every step",
}


@contextmanager
def host_changes(model: nn.Module, task: object) -> Iterator[list[str]]:
    """Afterwards the list names what Python drew, counted or replaced in the block."""
    reasons: list[str] = []
    before = dict(_host_state(model, task))
    yield reasons

    now = dict(_host_state(model, task))
    for key in before | now:
        if before.get(key) != now.get(key):
            kind, name = key
            reasons.append(_REASONS[kind].format(name, before.get(key), now.get(key)))


def _host_state(model: nn.Module, task: object) -> Iterator[tuple[tuple[str, str], Any]]:
    """By its kind and name: the state of each generator; plain values and containers as text; the
    addresses of buffers, and the ids of other tensors, except those with a graph: no later step
    reads them.

        ("value", "MyTask.num_calls"): "3"    ("tensor", "the buffer bn.running_mean"): 140352...
    """
    yield ("generator", "random"), random.getstate()
    yield ("generator", "numpy"), [*map(str, np.random.get_state())]
    yield ("generator", "torch's CPU generator"), torch.default_generator.get_state().tolist()

    attributes = list(_attributes(model, task))
    for name, value in attributes:
        if isinstance(value, _PLAIN + _CONTAINERS):
            yield ("value", name), _as_text(value)

    for name, buffer in model.named_buffers():
        yield ("tensor", f"the buffer {name}"), buffer.data_ptr()

    for name, value in attributes:
        if isinstance(value, Tensor) and value.grad_fn is None:
            yield ("tensor", f"the tensor {name}"), id(value)


def _attributes(model: nn.Module, task: object) -> Iterator[tuple[str, Any]]:
    """The attributes of modules and the task, by name: `MyTask.num_calls`, `layers.0.scale`."""
    modules = {name or type(model).__name__: module for name, module in model.named_modules()}
    for owner, holder in {type(task).__name__: task, **modules}.items():
        for name, value in vars(holder).items():
            if name not in _OF_TORCH:
                yield f"{owner}.{name}", value


def _as_text(value: Any) -> str:
    """A value as text, to be compared with a later one. Not the value itself: NaN differs from
    itself, and a container that grows is still the same object."""
    if isinstance(value, _PLAIN):
        return repr(value)

    inner = value.values() if isinstance(value, dict) else value
    is_short = len(value) <= 8 and all(isinstance(entry, _PLAIN) for entry in inner)
    return repr(value) if is_short else f"a {type(value).__name__} of {len(value)}"


def user_line(error: BaseException) -> str:
    """` at FILE:LINE`, where in the user's code an error came from, or nothing."""
    first = error.__context__ or error
    frames = traceback.extract_tb(first.__traceback__)
    for frame in reversed(frames):
        if is_users_file(frame.filename):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""
