"""Moving a batch to the device: every tensor in it, however the batch nests them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device. Copies from pinned memory do not wait for the device."""
    return _map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True), method="to")


def pin(batch: Any) -> Any:
    """The batch in page-locked memory."""
    return _map_leaves(batch, lambda leaf: leaf.pin_memory(), method="pin_memory")


def copied(batch: Any) -> Any:
    """The batch in memory of its own."""
    return _map_leaves(batch, lambda leaf: leaf.clone(), method="clone")


def _map_leaves(batch: Any, move: Callable[[Any], Any], *, method: str) -> Any:
    # Objects of the user's own, or of a library, that can move themselves are asked to.
    if isinstance(batch, torch.Tensor) or hasattr(batch, method):
        return move(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_leaves(value, move, method=method) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_map_leaves(value, move, method=method) for value in batch)
    if isinstance(batch, Mapping):
        return {name: _map_leaves(value, move, method=method) for name, value in batch.items()}
    return batch
