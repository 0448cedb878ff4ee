"""Moving a batch to the device: every tensor in it, however the batch nests them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device. Copies from pinned memory do not wait for the device."""
    return map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True), method="to")


def pin(batch: Any) -> Any:
    """The batch in page-locked memory; what is there already stays where it is."""
    return map_leaves(batch, lambda leaf: leaf.pin_memory(), method="pin_memory")


def copied(batch: Any) -> Any:
    """The batch in memory of its own."""
    return map_leaves(batch, lambda leaf: leaf.clone(), method="clone")


def record_stream(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tell whose memory it is that another stream uses the batch too."""
    for leaf in leaves(batch):
        if not isinstance(leaf, torch.Tensor) or leaf.is_cuda:
            leaf.record_stream(stream)


def can_change_streams(batch: Any) -> bool:
    """Whether every tensor in it can be told so: an object of somebody's own may not know how, or hide one."""
    if hasattr(batch, "to"):
        return hasattr(batch, "record_stream")
    if isinstance(batch, tuple | list | Mapping):
        return all(map(can_change_streams, batch.values() if isinstance(batch, Mapping) else batch))
    return batch is None or isinstance(batch, str | bytes | Number | np.generic | np.ndarray)


def leaves(batch: Any) -> Iterator[Any]:
    """What moves: tensors, and objects that move themselves."""
    found: list[Any] = []
    map_leaves(batch, found.append, method="to")
    return iter(found)


def map_leaves(batch: Any, move: Callable[[Any], Any], *, method: str) -> Any:
    """The same batch with every tensor moved. Objects of the user's own, or of a library, that have the `method` are
    asked to move themselves."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, method):
        return move(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(value, move, method=method) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_leaves(value, move, method=method) for value in batch)
    if isinstance(batch, Mapping):
        return {name: map_leaves(value, move, method=method) for name, value in batch.items()}
    return batch
