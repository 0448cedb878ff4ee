"""What a dataset has to offer: whole batches (`BatchDataset`), samples by index (any map-style dataset), or samples
one after another (a stream).

The built-in datasets make whole batches, because a Python call for each sample is what limits a fast step. They make
them in two parts (`TwoPartDataset`), so that the second runs on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drumline.data.draws import Draws
from drumline.errors import DataError, UsageError

Split = Literal["train", "eval"]


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that makes a whole batch at once."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> Any:
        """The samples at these indices as collated tensors. Take randomness from `draws`; None: evaluation."""
        ...


class PartialBatch(NamedTuple):
    """The first part of a batch of a `TwoPartDataset`, on its way from the host to the device."""

    rows: Any
    choices: Any


class TwoPartDataset(ABC):
    """A BatchDataset whose batches are made in two parts: gathered on the host (in the training process or a worker),
    finished on the device. On the CPU it is the same code. With `--data.resident` all rows are gathered once, and stay
    on the device."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Any:
        """The samples at these indices as they are stored: tensors on the CPU, or a tuple, list or dict of them, with a
        row for each sample. `pinned`: preferably in page-locked memory."""

    def choose(self, draws: Draws | None) -> Any:
        """The random choices for these samples, as small tensors on the CPU. None: evaluation."""
        return None

    @abstractmethod
    def finish(self, rows: Any, choices: Any) -> Any:
        """The batch: torch operations on whatever device the rows and choices are, which do not wait for it."""

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> Any:
        """Both parts at once."""
        return self.finish(self.gather(indices), self.choose(draws))


def is_in_two_parts(dataset: object) -> bool:
    """Whether its batches may be gathered on the host and finished on the device. Not if a subclass overrides `batch`:
    that is what its batches are."""
    return isinstance(dataset, TwoPartDataset) and type(dataset).batch is TwoPartDataset.batch


def makes_batches(dataset: object) -> bool:
    """Whether it is a BatchDataset; an attribute `batch` that merely holds a value does not make it one."""
    return isinstance(dataset, BatchDataset) and callable(dataset.batch)


def checked_length(dataset: Any) -> int:
    """How many samples it has; an error if it cannot be used as a dataset at all."""
    missing = [] if hasattr(type(dataset), "__len__") else ["__len__"]
    if not makes_batches(dataset) and not _has_getitem(dataset):
        missing.append("__getitem__")
    name = type(dataset).__name__
    if missing:
        raise UsageError(
            f"{name} cannot be used as a dataset: it has no {' and no '.join(missing)}",
            next_step="give it __len__(self) and __getitem__(self, index), or __len__ and batch(self, indices, draws), "
            "or for a stream __iter__(self)",
        )
    length = len(dataset)
    if length == 0:
        raise DataError(f"the dataset {name} is empty", next_step="check the path and the split it reads")
    return length


def is_stream(dataset: object) -> bool:
    """Whether its samples can only be read one after another."""
    if isinstance(dataset, IterableDataset):
        return True
    return hasattr(type(dataset), "__iter__") and not (makes_batches(dataset) or _has_getitem(dataset))


def is_resumable(stream: object) -> bool:
    """Whether a stream keeps its own position, and can be set back to it."""
    return all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))


def check_stream(stream: object) -> None:
    """Refuse what looks like a stream of samples and is none."""
    name = type(stream).__name__
    if isinstance(stream, DataLoader):
        raise UsageError(
            f"{name} makes batches, but a stream of samples is needed",
            next_step="give the dataset that it reads: Drumline makes the batches and starts the workers",
        )
    if hasattr(type(stream), "__next__") and not is_resumable(stream):
        raise UsageError(
            f"the {name} can be read only once, but every epoch reads its stream from the beginning",
            next_step="give an object whose __iter__ starts anew each time, such as a torch IterableDataset",
        )


def _has_getitem(dataset: object) -> bool:
    # torch's Dataset has a __getitem__ that only raises, so that having one proves nothing.
    return getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__


def gather_rows(array: NDArray[Any], indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
    """The rows at these indices, in a single copy, whether the array is mapped or in memory. `pinned`: in page-locked
    memory, which torch uses again when the copy to the device that was made from it is done."""
    if not pinned:
        # Not array[indices], which may give an axis of size 1 another stride: kernels are chosen by strides.
        return _native(array.take(indices, axis=0))
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(array)):
        raise IndexError(f"rows from {indices.min()} to {indices.max()} of {len(array)}")
    kind = _native(np.empty(0, dtype=array.dtype)).dtype
    rows = torch.empty((len(indices), *array.shape[1:]), dtype=kind, pin_memory=True)
    # In any other mode numpy would make a second copy; the bounds it would check were checked above.
    np.take(array, indices, axis=0, out=rows.numpy(), mode="clip")
    return rows


def _native(rows: NDArray[Any]) -> Tensor:
    """As a tensor, in this machine's byte order."""
    return torch.from_numpy(rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("=")))
