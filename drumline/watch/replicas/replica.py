"""What must be the same on every rank after a step: parameters, buffers and optimizer state, by name.

The names are those of a checkpoint: `fc.weight`, `bn.running_mean`, `fc.weight/exp_avg_sq`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.distributed.wrap import unwrap_model


def replica_tensors(model: nn.Module, optimizer: Optimizer, *, include_buffers: bool) -> dict[str, Tensor]:
    """The tensors themselves, not copies. To be asked for anew each time: an optimizer makes its state at the first
    step, and loading replaces it."""
    plain = unwrap_model(model)
    # DDP leaves these alone: they are each rank's own by choice.
    own = set(getattr(plain, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = {name: tensor for name, tensor in plain.named_parameters() if name not in own}
    buffers = {name: tensor for name, tensor in plain.named_buffers() if name not in own}
    return {**parameters, **(buffers if include_buffers else {}), **dict(_state(parameters, optimizer))}


def _state(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in parameters.items():
        yield from _tensors_in(optimizer.state.get(parameter), name)


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from _tensors_in(inner, f"{name}/{position}")
