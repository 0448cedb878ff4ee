"""The model's part of a checkpoint: its parameters and buffers, under names no wrapper changes.

Tensors that share memory, such as tied embeddings, are stored once; their other names are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from drumline.distributed.wrap import unwrap_model
from drumline.errors import CheckpointError, CheckpointMismatchError, as_list


def model_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors by name, sharing memory with the model, and the aliases: other name -> stored name."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    stored_at: dict[object, str] = {}
    for name, tensor in _entries(model).items():
        place = _memory(tensor)
        if place in stored_at:
            aliases[name] = stored_at[place]
        else:
            tensors[name] = tensor
            stored_at[place or name] = name
    return tensors, aliases


def load_model_state(model: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Copy the tensors into the model, wherever it is; every name and shape must match, or nothing is copied."""
    saved = {**tensors, **{name: tensors[stored] for name, stored in aliases.items() if stored in tensors}}
    if problems := list(_differences(saved, model)):
        raise CheckpointMismatchError(
            as_list("the checkpoint is of another model:", problems),
            next_step="set the model up as it was when the checkpoint was made (see config.toml in the run folder)",
        )
    unwrap_model(model).load_state_dict(saved)


def _entries(model: nn.Module) -> dict[str, Tensor]:
    entries = unwrap_model(model).state_dict()
    for name, entry in entries.items():
        if not isinstance(entry, Tensor):
            raise CheckpointError(
                f"the model's {name} cannot be saved: it is a {type(entry).__name__}, not a tensor",
                next_step="let get_extra_state return a tensor",
            )
    return dict(entries)


def _memory(tensor: Tensor) -> tuple[object, ...] | None:
    """What two names of the same tensor have in common; None for a tensor without memory."""
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _differences(saved: Mapping[str, Tensor], model: nn.Module) -> Iterator[str]:
    wanted = _entries(model)
    yield from (f"{name} is missing in the checkpoint" for name in wanted if name not in saved)
    yield from (f"{name} is not in the model" for name in saved if name not in wanted)
    for name, ours in wanted.items():
        if (theirs := saved.get(name)) is None:
            continue
        if ours.shape != theirs.shape:
            yield f"{name} is {list(theirs.shape)} in the checkpoint and {list(ours.shape)} in the model"
        elif ours.dtype != theirs.dtype and not (ours.is_floating_point() and theirs.is_floating_point()):
            yield f"{name} is {theirs.dtype} in the checkpoint and {ours.dtype} in the model"
    for name, stored in model_state(model)[1].items():
        one, other = saved.get(name), saved.get(stored)
        # The same tensor is not compared with itself: NaN differs from NaN.
        if one is not None and other is not None and one is not other and not torch.equal(one, other):
            yield f"{name} and {stored} differ in the checkpoint and are one tensor in the model"
