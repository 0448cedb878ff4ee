"""Batches from the host to the device; on a GPU ahead of the step that needs them.

On a GPU two batches are kept ahead: their copies and their second part (`finish`) run on a CUDA stream of their own,
beside the step. There is no thread: the next batch is made when one is handed out, while the device is still busy with
the step before. On the CPU nothing is made ahead and nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import numpy as np
import torch

NUM_AHEAD = 2


class Delivery:
    """Copies batches to one device, and finishes them there."""

    def __init__(self, device: torch.device, finish: Callable[[Any], Any]) -> None:
        self._device = device
        self._finish = finish
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, made: Iterator[Any]) -> Iterator[Any]:
        """Each batch on the device, in order. An error is raised in place of the batch that it belongs to."""
        if self._stream is None:
            return map(self.deliver, made)
        return map(self._receive, prefetch(made, self._send, count=NUM_AHEAD))

    def deliver(self, batch: Any) -> Any:
        """One batch, on the current stream."""
        return self._finish(to_device(batch, self._device))

    def _send(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """The batch, and when it has arrived. None: it stays on the host until the stream that uses it delivers it."""
        if self._stream is not None and can_change_streams(batch):
            with torch.cuda.stream(self._stream):
                delivered = self.deliver(batch)
                if can_change_streams(delivered):
                    return delivered, self._stream.record_event()
        return batch, None

    def _receive(self, sent: tuple[Any, torch.cuda.Event | None]) -> Any:
        batch, arrived = sent
        if arrived is None:
            return self.deliver(batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        # The memory belongs to the other stream, which must not reuse it before this one is done with it.
        for leaf in leaves(batch):
            if not isinstance(leaf, torch.Tensor) or leaf.is_cuda:
                leaf.record_stream(current)
        return batch


def prefetch(made: Iterator[Any], send: Callable[[Any], Any], *, count: int) -> Iterator[Any]:
    """`send(batch)` for each batch, called while the `count` before it are still to be handed out. An error ends the
    sequence, and is raised when its own turn comes."""
    waiting: deque[Any] = deque()
    error: Exception | None = None
    try:
        for sent in map(send, made):
            waiting.append(sent)
            if len(waiting) > count:
                yield waiting.popleft()
    except Exception as caught:
        error = caught
    while waiting:
        yield waiting.popleft()
    if error is not None:
        raise error


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch on the device. Copies from pinned memory do not wait for the device."""
    return map_leaves(batch, lambda leaf: leaf.to(device, non_blocking=True), method="to")


def pin(batch: Any) -> Any:
    """The batch in page-locked memory; what is there already stays where it is."""
    return map_leaves(batch, lambda leaf: leaf.pin_memory(), method="pin_memory")


def clone(batch: Any) -> Any:
    """The batch in memory of its own."""
    return map_leaves(batch, lambda leaf: leaf.clone(), method="clone")


def can_change_streams(batch: Any) -> bool:
    """Whether every tensor in it has `record_stream`: an object of the user's own may not, or may hide a tensor."""
    if hasattr(batch, "to"):
        return hasattr(batch, "record_stream")
    if isinstance(batch, tuple | list | Mapping):
        return all(map(can_change_streams, batch.values() if isinstance(batch, Mapping) else batch))
    return batch is None or isinstance(batch, str | bytes | Number | np.generic | np.ndarray)


def leaves(batch: Any) -> list[Any]:
    """What can be moved: tensors, and objects that have `to`."""
    found: list[Any] = []
    map_leaves(batch, found.append, method="to")
    return found


def map_leaves(batch: Any, move: Callable[[Any], Any], *, method: str) -> Any:
    """The same batch with `move` applied to every tensor, and to every other object that has the `method`."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, method):
        return move(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(value, move, method=method) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_leaves(value, move, method=method) for value in batch)
    if isinstance(batch, Mapping):
        return {name: map_leaves(value, move, method=method) for name, value in batch.items()}
    return batch
