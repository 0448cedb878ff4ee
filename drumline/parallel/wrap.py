"""Wraps a model for training with replicas: device, SyncBatchNorm, DDP, in that order."""

from __future__ import annotations

import inspect
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumline.base.errors import UsageError
from drumline.base.text import join_names
from drumline.parallel.comm_hook import rounding_hook
from drumline.rank.torch_internals import copy_to_each, is_batchnorm, live_buffers, uncompiled

SMALL_BATCH = 16
NAMED = 5
"""Parameters in a message."""

# What to do about parameters that not every batch uses.
_FOR_UNUSED = "use them in every batch, freeze them (requires_grad=False), {} (drumline doctor TASK tries several)"
FIND_UNUSED = _FOR_UNUSED.format("or set --dist.find_unused_parameters")
FIND_UNUSED_OR_STATIC = _FOR_UNUSED.format(
    "set --dist.find_unused_parameters, or --dist.static_graph if no batch uses them"
)
FIND_UNUSED_WITH_DDP = _FOR_UNUSED.format(
    "or use --dist.mode ddp with --dist.find_unused_parameters"
)
# torch 2.13 renamed this option, and warns about the old name, which earlier versions need.
_BUFFER_OPTION = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class SingleProcess(nn.Module):
    """A model without DDP, usually on one process, with DDP's interface: `.module`, `no_sync()`,
    `join()`, and a state_dict whose names begin with `module.`, so that the same script and file
    work in both cases."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The model itself."""
        return self.module(*inputs, **options)

    def no_sync(self) -> AbstractContextManager[None]:
        """There are no gradients to reduce."""
        return nullcontext()

    def join(self, **_: Any) -> AbstractContextManager[None]:
        """There is no rank that could have fewer inputs."""
        return nullcontext()


class Applied(nn.Module):
    """Passes a model to a function: `applied(function, *arguments)` is `function(model,
    *arguments)`.

    Under DDP that is one forward pass, however often the function calls the model, and whether it
    is compiled or not.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, *arguments)


def wrap_model(
    model: nn.Module,
    *,
    device: torch.device,
    sync_batchnorm: bool = False,
    broadcast_buffers: bool = True,
    comm: str = "none",
    group: dist.ProcessGroup | None = None,
    **ddp_options: Any,
) -> nn.Module:
    """Collective: move the model to its device and wrap it in DDP, or in `SingleProcess` if there
    is no group. `comm`: in which type gradients are sent. `group`: the ranks that reduce them, if
    not all. `ddp_options`: DDP's own."""
    hook = None if comm == "none" else rounding_hook(comm)
    unknown = ddp_options.keys() - inspect.signature(DistributedDataParallel).parameters.keys()
    if unknown:  # on one process too, where DDP would not say so
        raise TypeError(f"DistributedDataParallel has no argument {min(unknown)!r}")

    model = model.to(device)
    if not dist.is_initialized():
        return SingleProcess(model)

    if sync_batchnorm and device.type != "cuda":
        raise UsageError(
            "dist.sync_batchnorm needs GPUs: torch's SyncBatchNorm refuses CPU tensors",
            next_step="leave it off on the CPU, or use a model with GroupNorm or LayerNorm",
        )

    if sync_batchnorm:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]

    # DDP warns about weights with a dimension of size 1, which are harmless.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    options: dict[str, Any] = {
        _BUFFER_OPTION: broadcast_buffers,
        # Not torch's default, with which the first bucket is smaller.
        "bucket_cap_mb": 25.0,
        "gradient_as_bucket_view": True,
        **ddp_options,
    }

    wrapped = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        **options,
    )

    if hook is not None and dist.get_world_size() > 1:
        wrapped.register_comm_hook(None, hook)

    return wrapped


def unwrap_model(model: nn.Module) -> nn.Module:
    """The user's own model, without the wrappers of `wrap` and torch.compile, if there are any."""
    if isinstance(model, DistributedDataParallel | SingleProcess):
        return unwrap_model(model.module)
    if isinstance(model, Applied):
        return unwrap_model(model.model)

    inner = uncompiled(model)
    return model if inner is model else unwrap_model(inner)


def names_without_gradient(error: BaseException) -> list[str] | None:
    """The parameters that an error of DDP is about: it is raised in the step after one that did not
    use them all, and has their numbers. Empty: unknown. None: it is another error."""
    if "Expected to have finished reduction in the prior iteration" not in str(error):
        return None

    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    models = [owner for owner in owners if isinstance(owner, DistributedDataParallel)]
    numbers = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    if not models or numbers is None:
        return []

    parameters = unwrap_model(models[0]).named_parameters()
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    return [trained[int(number)] for number in numbers[1].split()]


def explain_unused(error: BaseException) -> str | None:
    """The same in a sentence, for a loop that is not ours; None: it is another error, or the names
    are unknown."""
    names = names_without_gradient(error)
    if not names:
        return None

    return (
        f"the step before did not use {join_names(names)}: use them in every step, freeze them (requires_grad=False), "
        "or give DDP find_unused_parameters=True"
    )


def gains_from_channels_last(model: nn.Module) -> bool:
    """Whether it has 2D convolutions, and none in 3D, which do not have this layout."""
    convolves = any(
        isinstance(module, nn.Conv2d | nn.ConvTranspose2d) for module in model.modules()
    )
    return convolves and all(parameter.ndim < 5 for parameter in model.parameters())


def has_batchnorm(model: nn.Module) -> bool:
    """Whether a module of the model computes with statistics of the batch."""
    return any(is_batchnorm(module) for module in model.modules())


def small_batch_warning(model: nn.Module, *, batch_size: int, in_shards: bool) -> str | None:
    """The warning, if BatchNorm sees too few samples at once."""
    layers = [
        name
        for name, module in model.named_modules()
        if is_batchnorm(module) and not isinstance(module, nn.SyncBatchNorm)
    ]

    if not layers or batch_size >= SMALL_BATCH:
        return None

    advice = "fewer shards" if in_shards else "--dist.sync_batchnorm on GPUs"
    return (
        f"BatchNorm ({join_names(layers, most=1)}) sees {batch_size} samples at a time "
        f"{'in each shard' if in_shards else 'on each rank'}, fewer than {SMALL_BATCH}: its statistics will be noisy. "
        f"Use {advice}, a larger batch, or fewer micro-batches"
    )


class LiveBuffers:
    """A model's current buffers (BatchNorm's statistics, for example): a forward pass may replace a
    tensor. All ranks use rank 0's values."""

    def __init__(self, model: nn.Module) -> None:
        # Collected once, not in every step.
        self._places = [
            (live_buffers(module), name)
            for module in model.modules()
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def now(self) -> list[Tensor]:
        """The tensors that the model has at this moment."""
        return [buffer for places, name in self._places if (buffer := places[name]) is not None]

    def __bool__(self) -> bool:
        return bool(self._places)

    def keep(self, memory: list[Tensor] | None = None) -> list[Tensor]:
        """A copy of all buffers, in the memory of an earlier copy if it fits: a step that keeps
        them allocates nothing."""
        now = self.now()
        if memory is None or [copy.shape for copy in memory] != [buffer.shape for buffer in now]:
            memory = [torch.empty_like(buffer) for buffer in now]

        _copy_all(memory, now)
        return memory

    def put_back(self, copies: list[Tensor]) -> None:
        """Restore the values of `keep`; a buffer whose shape has changed is a cache, and is not
        restored."""
        targets = []
        sources = []
        for buffer, copy in zip(self.now(), copies, strict=True):
            if buffer.shape == copy.shape:
                targets.append(buffer)
                sources.append(copy)

        _copy_all(targets, sources)

    def broadcast(self, group: dist.ProcessGroup | None = None, source: int = 0) -> None:
        """Collective: copy rank 0's buffers to every rank, or those of `source` inside a group; one
        message for each type."""
        if not self._places or not dist.is_initialized() or dist.get_world_size() == 1:
            return

        by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self.now():
            by_type[buffer.dtype].append(buffer)

        for buffers in by_type.values():
            message = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            # As bytes: no backend supports every type.
            dist.broadcast(message.view(torch.uint8), source, group)
            if dist.get_rank() != source:
                pieces = torch.split(message, [buffer.numel() for buffer in buffers])
                pairs = zip(pieces, buffers, strict=True)
                _copy_all(buffers, [piece.view_as(buffer) for piece, buffer in pairs])


@torch.no_grad()
def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """The values of each source, into the target beside it, with one kernel for many tensors."""
    if targets:
        copy_to_each(targets, sources)
