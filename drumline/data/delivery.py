"""Copies batches to the device ahead of the step that needs them, or picks them from data that
stays there.

On a GPU two batches are kept ahead: their copies and their second part (`finish`) run on a separate
CUDA stream, in parallel with the step. There is no thread: the next batch is made when one is
taken, while the device is still busy with the previous step. On the CPU nothing is made ahead and
nothing is copied.

With `--data.resident` all rows are gathered once, before the first step. A batch is then picked
from them on the device, and only indices and random choices are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.base.errors import UsageError, log
from drumline.data.dataset import TwoPartDataset, checked_length, is_in_two_parts, is_stream
from drumline.data.sharding import Draws

NUM_AHEAD = 2
_FIRST = np.zeros(1, dtype=np.int64)
_CHUNK_BYTES = 1 << 26
MOST_OF_FREE = 0.9  # of the free memory: the model and its activations need room too


class _SentBatch(NamedTuple):
    batch: Any
    arrival: torch.cuda.Event | None
    """None: the batch stays on the host until the consuming stream copies it."""


class Delivery:
    """Copies batches to one device, and finishes them there."""

    def __init__(self, device: torch.device, finish: Callable[[Any], Any]) -> None:
        self._device = device
        self._finish = finish
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def batches(self, made: Iterator[Any]) -> Iterator[Any]:
        """Each batch on the device, in order. An error is raised when its own batch is due."""
        if self._stream is None:
            return map(self.deliver, made)
        return map(self._receive, prefetch(made, self._send, count=NUM_AHEAD))

    def deliver(self, batch: Any) -> Any:
        """One batch, on the current stream."""
        return self._finish(to_device(batch, self._device))

    def _send(self, batch: Any) -> _SentBatch:
        if self._stream is not None and can_change_streams(batch):
            with torch.cuda.stream(self._stream):
                delivered = self.deliver(batch)
                if can_change_streams(delivered):
                    return _SentBatch(delivered, self._stream.record_event())
        return _SentBatch(batch, None)

    def _receive(self, sent: _SentBatch) -> Any:
        if sent.arrival is None:
            return self.deliver(sent.batch)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(sent.arrival)
        # The memory belongs to the other stream, which must not reuse it while this one reads it.
        for leaf in leaves(sent.batch):
            if not isinstance(leaf, torch.Tensor) or leaf.is_cuda:
                leaf.record_stream(current)
        return sent.batch


def prefetch(made: Iterator[Any], send: Callable[[Any], Any], *, count: int) -> Iterator[Any]:
    """`send(batch)` for each batch, `count` batches ahead of the one that is taken. An error ends
    the sequence, and is raised when its own batch is due."""
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
    """The batch in page-locked memory; tensors that are already there are not copied."""
    return map_leaves(batch, lambda leaf: leaf.pin_memory(), method="pin_memory")


def clone(batch: Any) -> Any:
    """A copy of the batch in new memory."""
    return map_leaves(batch, lambda leaf: leaf.clone(), method="clone")


def can_change_streams(batch: Any) -> bool:
    """Whether every tensor in it has `record_stream`: a user's object may not, or may hide a
    tensor."""
    if hasattr(batch, "to"):
        return hasattr(batch, "record_stream")
    if isinstance(batch, tuple | list | Mapping):
        return all(map(can_change_streams, batch.values() if isinstance(batch, Mapping) else batch))
    return batch is None or isinstance(batch, str | bytes | Number | np.generic | np.ndarray)


def leaves(batch: Any) -> list[Any]:
    """What can be moved: tensors, and objects that have `to`."""
    movable: list[Any] = []
    map_leaves(batch, movable.append, method="to")
    return movable


def map_leaves(batch: Any, move: Callable[[Any], Any], *, method: str) -> Any:
    """The same batch with `move` applied to every tensor, and to every other object that has the
    `method`."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, method):
        return move(batch)
    if isinstance(batch, tuple | list):
        values = (map_leaves(value, move, method=method) for value in batch)
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if isinstance(batch, Mapping):
        return {name: map_leaves(value, move, method=method) for name, value in batch.items()}
    return batch


def make_resident(
    dataset: Any, device: torch.device, *, workers: int, warns: bool
) -> tuple[Any, int]:
    """The dataset with its rows on the device, and how many workers it still needs. On the CPU it
    is not changed: its arrays are in memory."""
    if device.type == "cpu":
        return dataset, workers
    name = type(dataset).__name__
    if not is_in_two_parts(dataset):
        reason = "is a stream" if is_stream(dataset) else "is not a drumline.TwoPartDataset"
        raise UsageError(
            f"the data cannot stay on {device}: {name} {reason}",
            next_step="leave --data.resident out, or derive the dataset from drumline.TwoPartDataset",
        )
    needed = checked_length(dataset) * _num_bytes(dataset.gather(_FIRST))
    free = torch.cuda.mem_get_info(device)[0]
    if needed > MOST_OF_FREE * free:
        raise UsageError(
            f"{name} takes {needed / 1e9:,.2f} GB, but {device} has {free / 1e9:,.2f} GB free, of which the data may "
            f"use {MOST_OF_FREE:.0%}",
            next_step="leave --data.resident out: batches are copied to the device ahead of the step anyway",
        )
    if workers and warns:
        log.warning(f"the data stays on {device}, so its {workers} workers are not started")
    resident = ResidentDataset(dataset, device)
    torch.cuda.synchronize(device)  # other streams read it
    return resident, 0


class ResidentDataset(TwoPartDataset):
    """The same batches, from rows that are on the device."""

    def __init__(self, dataset: TwoPartDataset, device: torch.device) -> None:
        self._dataset = dataset
        first = dataset.gather(_FIRST)
        length = len(dataset)
        wholes = [
            torch.empty((length, *leaf.shape[1:]), dtype=leaf.dtype, device=device)
            for leaf in leaves(first)
        ]
        # The host holds a part of the rows at a time.
        chunk = max(1, _CHUNK_BYTES // max(1, _num_bytes(first)))
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            part = dataset.gather(np.arange(start, stop, dtype=np.int64))
            for whole, rows in zip(wholes, leaves(part), strict=True):
                whole[start:stop].copy_(rows)
        in_order = iter(wholes)
        self._rows = map_leaves(first, lambda _: next(in_order), method="to")

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
        return torch.from_numpy(indices)

    def choose(self, draws: Draws | None) -> Any:
        return self._dataset.choose(draws)

    def finish(self, rows: Tensor, choices: Any) -> Any:
        picked = map_leaves(
            self._rows, lambda leaf: leaf.index_select(0, rows), method="index_select"
        )
        return self._dataset.finish(picked, choices)


def _num_bytes(rows: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves(rows))
