"""Data that stays on the device (`--data.resident`): all rows are gathered once, before the first step. A batch is then
picked from them there, and only indices and random choices are copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.data.dataset import TwoPartDataset, checked_length, is_in_two_parts, is_stream
from drumline.data.delivery import leaves, map_leaves
from drumline.data.draws import Draws
from drumline.errors import UsageError, log

_FIRST = np.zeros(1, dtype=np.int64)
_CHUNK_BYTES = 1 << 26
_MOST = 0.9  # of the free memory: the model and its activations need room too


def make_resident(dataset: Any, device: torch.device, *, workers: int, warns: bool) -> tuple[Any, int]:
    """The dataset with its rows on the device, and how many workers it still needs. On the CPU it stays as it is: its
    arrays are in memory."""
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
    check_fits(name, needed, torch.cuda.mem_get_info(device)[0], device)
    if workers and warns:
        log.warning(f"the data stays on {device}, so its {workers} workers are not started")
    resident = ResidentDataset(dataset, device)
    torch.cuda.synchronize(device)  # other streams read it
    return resident, 0


class ResidentDataset(TwoPartDataset):
    """The same batches, of rows that are on the device."""

    def __init__(self, dataset: TwoPartDataset, device: torch.device) -> None:
        self._dataset = dataset
        first, length = dataset.gather(_FIRST), len(dataset)
        held = [torch.empty((length, *leaf.shape[1:]), dtype=leaf.dtype, device=device) for leaf in leaves(first)]
        step = max(1, _CHUNK_BYTES // max(1, _num_bytes(first)))  # the host holds a part of the rows at a time
        for start in range(0, length, step):
            part = dataset.gather(np.arange(start, min(start + step, length), dtype=np.int64))
            for whole, rows in zip(held, leaves(part), strict=True):
                whole[start : start + step].copy_(rows)
        in_order = iter(held)
        self._rows = map_leaves(first, lambda _: next(in_order), method="to")

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
        return torch.from_numpy(indices)

    def choose(self, draws: Draws | None) -> Any:
        return self._dataset.choose(draws)

    def finish(self, rows: Tensor, choices: Any) -> Any:
        picked = map_leaves(self._rows, lambda leaf: leaf.index_select(0, rows), method="index_select")
        return self._dataset.finish(picked, choices)


def check_fits(name: str, needed: int, free: int, device: torch.device) -> None:
    """Refuse data that would leave no room for the model."""
    if needed > _MOST * free:
        raise UsageError(
            f"{name} takes {needed / 1e9:,.2f} GB, but {device} has {free / 1e9:,.2f} GB free, of which the data may "
            f"use {_MOST:.0%}",
            next_step="leave --data.resident out: batches are copied to the device ahead of the step in any case",
        )


def _num_bytes(rows: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves(rows))
