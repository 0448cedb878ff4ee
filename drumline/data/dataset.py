"""The kinds of datasets, and how a batch is made from each.

A dataset gives whole batches (`BatchDataset`), samples by index (any map-style dataset), or samples
one after another (a stream). The built-in ones make whole batches, because a Python call per sample
would limit a fast step, and in two parts (`TwoPartDataset`), so that the second part runs on the
device.

A batch (`BatchMaker`) depends only on the request and the seed, so augmentation is the same on any
rank and in any worker. Whole batches take random numbers for each sample from `Draws`
(data/sharding.py). Samples by index: the global generators of torch, numpy and `random` are seeded
from (seed, epoch, index) before each. Streams are seeded in data/stream_readers.py.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from drumline.base.errors import DataError, UsageError
from drumline.data.sharding import Draws, permute
from drumline.rank.tensor_hash import as_bytes
from drumline.rank.torch_internals import shared_storage

Split = Literal["train", "eval"]
_SAMPLE_SEEDS = 0x5EED  # the `stream` of the draws that seed samples
_NUM_COMPARED = 4


@runtime_checkable
class BatchDataset(Protocol):
    """A dataset that makes a whole batch at once."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> Any:
        """The samples at these indices as collated tensors. Take randomness from `draws`; None:
        evaluation."""


class PartialBatch(NamedTuple):
    """The first part of a batch of a `TwoPartDataset`, before it is finished on the device."""

    rows: Any
    choices: Any


class TwoPartDataset(ABC):
    """A BatchDataset whose batches are made in two parts: gathered on the host (in the training
    process or a worker), and finished on the device. On the CPU the same code runs. With
    `--data.resident` all rows are gathered once, and stay on the device."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Any:
        """The samples at these indices as they are stored: tensors on the CPU, or a tuple, list or
        dict of them, with a row for each sample. `pinned`: preferably in page-locked memory."""

    def choose(self, draws: Draws | None) -> Any:
        """The random choices for these samples, as small tensors on the CPU. None: evaluation."""
        return None

    @abstractmethod
    def finish(self, rows: Any, choices: Any) -> Any:
        """The batch: torch operations on the device of the rows and choices, which must not wait
        for it."""

    def batch(self, indices: NDArray[np.int64], draws: Draws | None) -> Any:
        """Both parts at once."""
        return self.finish(self.gather(indices), self.choose(draws))


def is_in_two_parts(dataset: object) -> bool:
    """Whether its batches may be gathered on the host and finished on the device. Not if a subclass
    overrides `batch`, which then defines its batches."""
    return isinstance(dataset, TwoPartDataset) and type(dataset).batch is TwoPartDataset.batch


def makes_batches(dataset: object) -> bool:
    """Whether it is a BatchDataset: `batch` must be a method, not an attribute. That of Hugging
    Face's datasets, which takes a `batch_size`, makes another dataset."""
    if not isinstance(dataset, BatchDataset) or not callable(dataset.batch):
        return False
    return "batch_size" not in inspect.signature(dataset.batch).parameters


def checked_length(dataset: Any) -> int:
    """The number of samples; an error if it cannot be used as a dataset."""
    name = type(dataset).__name__
    missing = [] if hasattr(type(dataset), "__len__") else ["__len__"]
    if not makes_batches(dataset) and not _has_getitem(dataset):
        missing.append("__getitem__")

    if missing:
        raise UsageError(
            f"{name} cannot be used as a dataset: it has no {' and no '.join(missing)}",
            next_step="give it __len__(self) and __getitem__(self, index), or __len__ and batch(self, indices, draws), "
            "or for a stream __iter__(self)",
        )

    length = len(dataset)
    if length == 0:
        raise DataError(
            f"the dataset {name} is empty", next_step="check the path and the split it reads"
        )
    return length


def is_stream(dataset: object) -> bool:
    """Whether its samples can only be read one after another."""
    if isinstance(dataset, IterableDataset):
        return True

    has_indices = makes_batches(dataset) or _has_getitem(dataset)
    return hasattr(type(dataset), "__iter__") and not has_indices


def is_resumable(stream: object) -> bool:
    """Whether a stream keeps its own position, and can be set back to it."""
    return all(callable(getattr(stream, name, None)) for name in ("state_dict", "load_state_dict"))


def check_stream(stream: object) -> None:
    """Refuse objects that look like a stream of samples but are not."""
    name = type(stream).__name__
    if isinstance(stream, DataLoader):
        raise UsageError(
            f"{name} makes batches, but a stream of samples is needed",
            next_step="give the dataset that it reads: Drumline makes the batches and starts the workers",
        )
    if hasattr(type(stream), "__next__") and not is_resumable(stream):
        raise UsageError(
            f"the {name} can be read only once, but every epoch reads its stream from the beginning",
            next_step="give an object whose __iter__ starts over each time, such as a torch IterableDataset",
        )


def _has_getitem(dataset: object) -> bool:
    # torch's Dataset has a __getitem__ that only raises, so its existence proves nothing.
    return getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__


def gather_rows(array: NDArray[Any], indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
    """The rows at these indices, in a single copy, from an array in memory or mapped from a file.
    `pinned`: in page-locked memory, which torch reuses when the copy to the device is done."""
    if not (pinned or _sends_rows()):
        # Not array[indices], which may change the stride of an axis of size 1: kernels are chosen
        # by strides.
        return torch.from_numpy(array.take(indices, axis=0))
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(array)):
        raise IndexError(f"rows from {indices.min()} to {indices.max()} of {len(array)}")

    kind = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    rows = empty_rows((len(indices), *array.shape[1:]), kind, pinned=pinned)

    # In any other mode numpy would make a second copy; the bounds were checked above.
    np.take(array, indices, axis=0, out=rows.numpy(), mode="clip")
    return rows


def empty_rows(shape: tuple[int, ...], kind: torch.dtype, *, pinned: bool) -> Tensor:
    """Memory for a batch that is not copied again on the host before it is sent to the device. In a
    worker for a GPU it is shared memory, which the training process maps; `pinned`: page-locked
    memory."""
    num_bytes = math.prod(shape) * kind.itemsize
    if not _sends_rows() or not num_bytes:
        return torch.empty(shape, dtype=kind, pin_memory=pinned)

    memory = torch.empty(0, dtype=torch.uint8).set_(shared_storage(num_bytes))
    return memory.view(kind).view(shape)


def _sends_rows() -> bool:
    """Whether this is a worker that sends rows as they are; on the CPU it makes the whole batch of
    them first."""
    worker = get_worker_info()
    maker = None if worker is None else worker.dataset
    return isinstance(maker, BatchMaker) and maker.defers_finish


class BatchRequest(NamedTuple):
    """Positions [low, high) of an epoch: shuffled and augmented for training, in order for
    evaluation."""

    epoch: int
    low: int
    high: int
    shuffled: bool


class BatchMaker(Dataset[Any]):
    """`maker[request]` is a batch. For a `TwoPartDataset` and with `defer_finish` it is only the
    first part, from which `finish` makes the batch; `pinned`: whether that part is in page-locked
    memory."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
        defer_finish: bool = False,
        pinned: bool = False,
    ) -> None:
        self.dataset = dataset
        self.length = checked_length(dataset)
        self._seed = seed
        self._collate = collate or default_collate
        self._makes_batches = makes_batches(dataset)
        self._has_tensors = type(dataset) is TensorDataset and collate is None
        self.defers_finish = defer_finish and is_in_two_parts(dataset)
        self._pinned = pinned

    def __getitem__(self, request: BatchRequest) -> Any:
        indices = np.arange(request.low, request.high, dtype=np.int64)
        if request.shuffled:
            indices = permute(indices, length=self.length, seed=self._seed, epoch=request.epoch)

        draws = Draws(self._seed, request.epoch, indices)
        draws_of_batch = draws if request.shuffled else None

        if self.defers_finish:
            choices = self.dataset.choose(draws_of_batch)
            return PartialBatch(self.dataset.gather(indices, pinned=self._pinned), choices)
        if self._makes_batches:
            return self.dataset.batch(indices, draws_of_batch)
        if self._has_tensors:  # what reading and collating its samples would give
            return [tensor[torch.from_numpy(indices)] for tensor in self.dataset.tensors]

        with restored_generators():
            seeds = draws.bits(1, stream=_SAMPLE_SEEDS)[:, 0].tolist()
            pairs = zip(indices.tolist(), seeds, strict=True)
            return self._collate([self._sample(index, seed) for index, seed in pairs])

    def finish(self, made: Any) -> Any:
        """The batch, from what `maker[request]` returned, on the device where that is now."""
        return self.dataset.finish(*made) if isinstance(made, PartialBatch) else made

    def _sample(self, index: int, seed: int) -> Any:
        seed_generators(seed)
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"while reading sample {index} of {type(self.dataset).__name__}")
            raise


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and `random`."""
    # Not torch.manual_seed, which would also reset the GPUs' generators, which the model uses.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restores the global generators of torch, numpy and `random` afterwards."""
    torch_state = torch.default_generator.get_state()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def fingerprint(dataset: Any) -> str:
    """The same text on every rank that has the same dataset; ranks compare it before the first
    step.

    It has the number of samples, and a hash of a few of them. A stream is not read for this: it has
    only its type.
    """
    if is_stream(dataset):
        kind = "resumable stream" if is_resumable(dataset) else "stream"
        return f"a {kind}, {type(dataset).__qualname__}"

    maker = BatchMaker(dataset, seed=0, collate=lambda samples: samples)
    spread = np.linspace(0, maker.length - 1, num=min(_NUM_COMPARED, maker.length)).astype(np.int64)

    digest = hashlib.blake2b(digest_size=8)
    for index in spread.tolist():
        request = BatchRequest(0, index, index + 1, shuffled=False)
        first = content_hash(maker[request])
        second = content_hash(maker[request])

        # A sample that is not the same twice (from a generator that the dataset keeps) is left out:
        # ranks with the same dataset must not be reported as different.
        digest.update(first if first == second else b"")

    return f"{maker.length} samples, {digest.hexdigest()}"


def content_hash(sample: Any) -> bytes:
    """The same hash for samples of the same content, in any process."""
    digest = hashlib.blake2b()
    for piece in _content(sample):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.digest()


def _content(value: Any) -> Iterator[bytes]:
    """The parts that are hashed, in order."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {list(value.shape)}".encode()
        yield as_bytes(value.cpu()).numpy().tobytes()
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        yield f"{value.dtype.str} {list(value.shape)}".encode()
        yield value.tobytes()
    elif isinstance(value, Mapping):
        yield b"mapping"
        for name, item in value.items():
            yield repr(name).encode()
            yield from _content(item)
    elif isinstance(value, tuple | list):
        yield f"sequence of {len(value)}".encode()
        for item in value:
            yield from _content(item)
    elif isinstance(value, set | frozenset):  # in no order
        yield b"set"
        yield from sorted(map(content_hash, value))
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        yield repr(value).encode()
    else:
        # Not its repr, which may contain an address that differs between processes.
        yield type(value).__qualname__.encode()
