"""Tensors that ranks hold in shards (torch's DTensor, as `fully_shard` makes them): each rank has
some rows of the first dimension, split as `torch.chunk` does it. The last ranks may have fewer rows
than the first, or none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drumline.rank.torch_internals import sharding_spec


class Rows(NamedTuple):
    """Rows of the first dimension, without `stop`."""

    start: int
    stop: int


def is_shard(tensor: Any) -> bool:
    """Whether it is a DTensor. That class is not imported, which takes long, where nothing is
    sharded."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory; of one that is not sharded, all."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of these tensors, without those of which it holds nothing."""
    return [part for part in map(own_part, tensors) if part.numel()]


def split_rows(length: int, index: int, count: int) -> Rows:
    """The rows of shard `index` of `count`: 7 rows on 3 ranks are [0, 3), [3, 6) and [6, 7), 4 rows
    [0, 2), [2, 4) and none."""
    size = -(-length // count)
    start = min(index * size, length)
    return Rows(start, min(start + size, length))


def place_of(tensor: Any) -> tuple[int, int]:
    """Which shard this rank holds, and of how many; (0, 1) for a tensor that every rank has
    whole."""
    for dim, placement in enumerate(tensor.placements if is_shard(tensor) else ()):
        if placement.is_shard(0):
            return tensor.device_mesh.get_local_rank(dim), tensor.device_mesh.size(dim)
        if not placement.is_replicate():
            raise ValueError(f"it is sharded in an unknown way: {placement}")
    return 0, 1


def like_shard(model_tensor: Any, part: Tensor) -> Tensor:
    """A tensor that is sharded as another one, of which this rank holds `part`, on the device where
    that is."""
    from torch.distributed.tensor import DTensor

    # Not with DTensor.from_local, which moves the part to the mesh's device: all parts of a
    # checkpoint, mapped from its files, would be on the GPU at a time.
    spec: Any = sharding_spec(model_tensor)

    meta = spec.tensor_meta._replace(dtype=part.dtype)
    new_spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    dtensor: Any = DTensor  # its types have no constructor
    shard: Tensor = dtensor(part.detach(), new_spec, requires_grad=False)

    return shard


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Collective for a sharded tensor: all of it, on every rank."""
    gathered: Tensor = tensor.full_tensor() if is_shard(tensor) else tensor  # type: ignore[attr-defined]
    return gathered


def sharded_parameters(model: nn.Module) -> dict[str, Tensor]:
    """By name, as shards; a parameter with several names has all of them."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if is_shard(parameter)}
