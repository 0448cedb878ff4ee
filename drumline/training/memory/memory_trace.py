"""What a training step holds in a GPU's memory, without a GPU: the model, the optimizer and a
micro-batch are torch's fake tensors, which have a device and a size but no data, and a mode adds up
the storages after each operation.

    FakeJob        the model and its optimizer, which takes a step, so that its state is there
    FakeJob.trace  a forward and a backward pass: a `MemoryMoment` after each operation
    StepMemory     these moments and the sizes of all parameters, from which memory_plan.py computes each mode
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer

from drumline.base.errors import UsageError
from drumline.config.schema import Config
from drumline.parallel.blocks import describe_blocks, find_blocks
from drumline.parallel.recompute import recompute_blocks, recomputed_blocks
from drumline.rank.torch_internals import (
    DispatchMode,
    efficient_attention,
    fake_tensors,
    flash_attention,
    flash_attention_backward,
    live_buffers,
    live_parameters,
    pytree,
)
from drumline.training.job.evaluation_job import make_autocast
from drumline.training.job.optimizer import optimizer_of
from drumline.training.steps.eager import loss_function
from drumline.training.tasks.base import Task

# Not a GPU: torch without CUDA has no gradients of fake tensors there. What a GPU does differently
# is in `_as_on_gpu`.
DEVICE = torch.device("cpu")

# Beside losses, where autocast on the CPU does the same.
IN_FP32 = ("layer_norm", "group_norm", "softmax", "log_softmax")


def rounded(num_bytes: int) -> int:
    """What torch's allocator takes for so many bytes."""
    return -(-num_bytes // 512) * 512


class MemoryMoment(NamedTuple):
    """The bytes on the device after one operation, besides parameters, buffers and optimizer state.
    A step has one for each operation of torch:

        MemoryMoment("forward", in_blocks=True, live=81920, gradients=0)
    """

    phase: str
    """forward, backward or optimizer."""

    in_blocks: bool
    """Whether a block of the model is computed, and not what comes before or after them."""

    live: int
    """Activations, the micro-batch and temporary tensors."""

    gradients: int
    """Of parameters whose gradient is complete."""


@dataclass(frozen=True, kw_only=True)
class TracedParameter:
    """The size of one parameter, and of its optimizer state."""

    num_bytes: int
    num_elements: int
    rows: int
    """Of its first dimension, by which it is sharded."""

    state_bytes: tuple[int, ...]
    """Of the tensors of its optimizer state that have its shape, and are sharded as it is."""

    is_trained: bool
    in_block: int | None
    """The number of its block; None: it is in none."""

    def part(self, num_bytes: int, num_shards: int) -> int:
        """The largest shard of a tensor of its shape, in bytes: whole rows, so that of 10 rows on 4
        ranks it is 3."""
        return num_bytes // max(1, self.rows) * -(-self.rows // num_shards)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """One step with one micro-batch on one rank that holds everything: from it follows the memory
    of every mode on any number of ranks."""

    parameters: tuple[TracedParameter, ...]
    buffer_bytes: int
    scalar_bytes: int
    """Of the optimizer state that has no parameter's shape, and is on every rank."""

    gathered: float
    """The size of a gathered parameter, relative to its own type."""

    batch_bytes: int
    """The micro-batch on the device."""

    moments: tuple[MemoryMoment, ...]
    """In the order of the step; the last is the optimizer's."""


class FakeJob:
    """A task's model and optimizer as fake tensors on a GPU. They are made once, and traced with
    micro-batches of several sizes."""

    def __init__(self, config: Config, task: Task, *, gathered: torch.dtype | None = None) -> None:
        """`gathered`: the type in which a sharded model has its parameters in a step, if not their
        own."""
        self._task = task
        self._precision = config.train.precision
        self._mode = fake_tensors().FakeTensorMode(allow_non_fake_inputs=True)
        self._model = _build(task)

        wrap = config.dist.wrap or ()
        if config.model.activation_checkpointing:
            recompute_blocks(self._model, config.model.activation_checkpointing, wrap)

        with self._faked():
            _give_fake_tensors(self._model)
            optimizer = optimizer_of(task, self._model, config.optim, lr=config.optim.lr)
            self._blocks = list(find_blocks(self._model, wrap).values())
            temporary = _take_steps(self._model, optimizer)

            self._parameters = tuple(_parameters(self._model, optimizer, self._blocks))
            self._buffers = sum(map(_on_device, self._model.buffers()))
            self._scalars = _scalar_bytes(optimizer)

            before = _parameter_bytes(self._model)
            _give_fake_tensors(self._model, gathered)
            self._gathered = _parameter_bytes(self._model) / before

        trained = sum(parameter.num_bytes for parameter in self._parameters if parameter.is_trained)
        self._update = MemoryMoment("optimizer", in_blocks=False, live=temporary, gradients=trained)

    def recomputed(self) -> str:
        """The blocks whose activations are computed again, for people."""
        return describe_blocks(recomputed_blocks(self._model))

    @property
    def num_parameters(self) -> int:
        """Of the whole model, trained or not."""
        return sum(parameter.num_elements for parameter in self._parameters)

    def trace(self, batch: Any) -> StepMemory:
        """A step with this micro-batch, which is on the CPU."""
        with self._faked(), _MemoryTrace() as trace, _watched(self._model, self._blocks, trace):
            data = pytree.tree_map_only(
                Tensor, lambda leaf: self._mode.from_tensor(leaf).clone(), batch
            )

            batch_bytes = trace.live
            with make_autocast(self._precision, DEVICE):
                loss = loss_function(self._task)(self._model, data)

            trace.phase = "backward"

            # On this thread: torch has threads for the GPUs of this machine only.
            with torch.autograd.set_multithreading_enabled(False):
                loss.total.backward()  # type: ignore[no-untyped-call]

            for parameter in self._model.parameters():
                parameter.grad = None

        return StepMemory(
            parameters=self._parameters,
            buffer_bytes=self._buffers,
            scalar_bytes=self._scalars,
            gathered=self._gathered,
            batch_bytes=batch_bytes,
            moments=(*trace.moments, self._update),
        )

    @contextmanager
    def _faked(self) -> Iterator[None]:
        """In it new tensors are fake, and functions keep what they keep on a GPU."""
        fake = fake_tensors()
        try:
            with self._mode, _as_on_gpu():
                yield
        except (fake.DataDependentOutputException, fake.DynamicOutputShapeException) as error:
            raise UsageError(
                f"{type(self._task).__name__} cannot be planned: {error.func} needs the values of a tensor, and a plan "
                "has only sizes",
                next_step="measure it on a GPU: drumline find-batch TASK",
            ) from error


def _build(task: Task) -> nn.Module:
    """The task's model without memory; with memory if it reads values while it is built, which the
    meta device does not have."""
    try:
        with torch.device("meta"):
            return task.model()
    except (RuntimeError, NotImplementedError):
        return task.model()


def _parameter_bytes(model: nn.Module) -> int:
    """The bytes of all parameters of a model."""
    return sum(parameter.nbytes for parameter in model.parameters())


def _give_fake_tensors(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace all parameters and buffers. `dtype`: of the parameters, if not their own."""

    def fake(old: Tensor) -> Tensor:
        """A tensor of the same size without data."""
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=DEVICE)
        if isinstance(old, nn.Parameter):
            return nn.Parameter(new.to(dtype or old.dtype), old.requires_grad)
        return new

    # Once for each tensor, which may be in several modules.
    fakes = {tensor: fake(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for tensors in (live_parameters(module), live_buffers(module)):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = fakes[old]  # type: ignore[assignment]


def _take_steps(model: nn.Module, optimizer: Optimizer) -> int:
    """Let the optimizer make its state, and return what another step needs beside it; fused kernels
    need nothing."""
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        if not group.get("fused"):
            # torch's own choice on a GPU
            group["foreach"] = group.get("foreach") is not False
        elif not isinstance(optimizer, Adam):
            # These fused kernels do not exist for fake tensors; the state is the same without them.
            group.update(fused=False, foreach=False)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)

    optimizer.step()
    with _MemoryTrace() as trace:
        optimizer.step()

    optimizer.zero_grad(set_to_none=True)
    return 0 if is_fused else max((moment.live for moment in trace.moments), default=0)


def _parameters(
    model: nn.Module, optimizer: Optimizer, blocks: Iterable[nn.Module]
) -> Iterator[TracedParameter]:
    """The sizes that a plan needs of each parameter, and in which block it is."""
    block_of = {
        parameter: number for number, block in enumerate(blocks) for parameter in block.parameters()
    }

    for parameter in model.parameters():
        states = optimizer.state.get(parameter, {}).values()
        yield TracedParameter(
            num_bytes=parameter.nbytes,
            num_elements=parameter.numel(),
            rows=parameter.shape[0] if parameter.dim() else 1,
            state_bytes=tuple(state.nbytes for state in states if _is_like(state, parameter)),
            is_trained=parameter.requires_grad,
            in_block=block_of.get(parameter),
        )


def _scalar_bytes(optimizer: Optimizer) -> int:
    """The bytes of the optimizer state that has no parameter's shape, such as counts of steps."""
    num_bytes = 0
    for parameter, state in optimizer.state.items():
        num_bytes += sum(
            _on_device(value) for value in state.values() if not _is_like(value, parameter)
        )

    return num_bytes


def _is_like(state: Any, parameter: Tensor) -> bool:
    """Whether a tensor of the optimizer's state has the shape of its parameter."""
    return _on_device(state) > 0 and state.shape == parameter.shape


def _on_device(value: Any) -> int:
    """The bytes that it takes there."""
    is_there = isinstance(value, Tensor) and value.device.type == DEVICE.type
    return rounded(value.nbytes) if is_there else 0


class _MemoryTrace(DispatchMode):  # type: ignore[no-untyped-call]
    """Records the bytes of storages on the device that were made under it and are still in use.

    A storage counts from the operation that makes it until Python frees it. The gradient of a
    parameter is counted apart from the operation on that completes it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[MemoryMoment] = []
        self.phase = "forward"
        self.in_blocks = False
        self.live = 0
        self._gradients = 0
        self._sizes: dict[int, int] = {}
        """Of each storage that is in use, by its address in torch."""

        self._gradient_sizes: dict[int, int] = {}
        """The same of complete gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages_before = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in storages_before:  # a view of what was there before
                self._add(storage)

        inside = 0
        if func is flash_attention_backward:
            # its gradient is added up in fp32, and there is a sum for each row
            query = args[1]
            inside = 4 * (query.numel() + query.shape[:-1].numel())

        self.moments.append(
            MemoryMoment(self.phase, self.in_blocks, self.live + inside, self._gradients)
        )

        return result

    def keep_gradient(self, parameter: Tensor) -> None:
        """The gradient of this parameter is complete."""
        key = None if parameter.grad is None else parameter.grad.untyped_storage()._cdata
        if key in self._sizes:
            size = self._sizes.pop(key)
            self._gradient_sizes[key] = size
            self.live -= size
            self._gradients += size

    def _add(self, storage: torch.UntypedStorage) -> None:
        """A new storage: it counts from now on, until it is freed."""
        key = storage._cdata
        if key not in self._sizes and key not in self._gradient_sizes:
            self._sizes[key] = rounded(storage.nbytes())
            self.live += self._sizes[key]
            weakref.finalize(storage, self._remove, key).atexit = False

    def _remove(self, key: int) -> None:
        """A storage is freed."""
        self.live -= self._sizes.pop(key, 0)
        self._gradients -= self._gradient_sizes.pop(key, 0)


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors on the device in these values; views of one tensor share it."""
    return (leaf.untyped_storage() for leaf in pytree.tree_leaves(values) if _on_device(leaf))


@contextmanager
def _watched(model: nn.Module, blocks: Iterable[nn.Module], trace: _MemoryTrace) -> Iterator[None]:
    """Let the trace know of complete gradients, and when blocks are computed: plans of sharded
    models need to know when a block is gathered."""

    def begin(*_: Any) -> None:
        """A block begins, in the forward pass or in the backward pass."""
        trace.in_blocks = True

    def end(module: nn.Module, inputs: Any, outputs: Any) -> None:
        """A block ends in the forward pass; its backward pass will begin with the gradients of its
        outputs."""
        if trace.phase == "forward":  # not where a block is computed again
            trace.in_blocks = False
            for leaf in pytree.tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(begin)  # type: ignore[no-untyped-call]

    handles: list[Any] = [
        parameter.register_post_accumulate_grad_hook(trace.keep_gradient)  # type: ignore[no-untyped-call]
        for parameter in model.parameters()
        if parameter.requires_grad
    ]

    for block in blocks:
        handles += [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]

    yield
    for handle in handles:
        handle.remove()


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Let functions keep for the backward pass what they keep on a GPU: attention no scores,
    dropout a mask of bytes; and some compute in fp32 under autocast.

    Not by a mode of torch: a dispatch mode is below autograd, which has then kept its tensors, and
    a function mode does not see what `multi_head_attention_forward` calls."""
    changed: dict[str, Any] = {"scaled_dot_product_attention": _attention, "dropout": _dropout}
    changed |= {name: _in_fp32(getattr(functional, name)) for name in IN_FP32}
    originals = {name: getattr(functional, name) for name in changed}
    vars(functional).update(changed)

    try:
        yield
    finally:
        vars(functional).update(originals)


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, which computes in fp32 under autocast."""

    def computed(inputs: Tensor, *args: Any, **options: Any) -> Tensor:
        """The function of a wider input, if autocast would do that on a GPU."""
        is_wider = torch.is_autocast_enabled(DEVICE.type) and inputs.dtype.itemsize < 4
        return function(inputs.float() if is_wider else inputs, *args, **options)

    return computed


def _dropout(
    inputs: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Dropout as a GPU computes it: with a mask of bytes."""
    return torch.native_dropout(inputs, p, True)[0] if training and p > 0 else inputs


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attention as a GPU computes it: by a kernel that keeps no scores."""
    inputs = (query, key, value)
    if torch.is_autocast_enabled(DEVICE.type):
        dtype = torch.get_autocast_dtype(DEVICE.type)
        inputs = (query.to(dtype), key.to(dtype), value.to(dtype))

    # The other option, enable_gqa, changes no size.
    scale = options.get("scale")
    if inputs[0].dtype.itemsize == 2 and attn_mask is None:
        return flash_attention(*inputs, dropout_p, is_causal, False, scale=scale)[0]

    return efficient_attention(*inputs, None, True, dropout_p, is_causal, scale=scale)[0]
