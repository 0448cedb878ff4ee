"""A short text that is the same on every rank if they have the same dataset; ranks compare it before step 1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from drumline.data.batch_maker import BatchMaker, BatchRequest
from drumline.data.dataset import is_resumable, is_stream

_NUM_SAMPLES = 4


def fingerprint(dataset: Any) -> str:
    """The number of samples, and a hash of a few of them. A stream is not read for this: only its kind counts."""
    if is_stream(dataset):
        return f"a {'resumable ' if is_resumable(dataset) else ''}stream, {type(dataset).__qualname__}"
    maker = BatchMaker(dataset, seed=0, collate=lambda samples: samples)
    spread = np.linspace(0, maker.length - 1, num=min(_NUM_SAMPLES, maker.length)).astype(np.int64)
    digest = hashlib.blake2b(digest_size=8)
    for index in spread.tolist():
        request = BatchRequest(0, index, index + 1, shuffled=False)
        first, second = (content_hash(maker[request]) for _ in range(2))
        # A sample that is not the same twice (a dataset with a generator of its own) does not count: ranks that have
        # the same such dataset must not be reported as different.
        digest.update(first if first == second else b"")
    return f"{maker.length} samples, {digest.hexdigest()}"


def content_hash(sample: Any) -> bytes:
    """The same for samples of the same content, in any process."""
    digest = hashlib.blake2b()
    for piece in _content(sample):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.digest()


def _content(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {list(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
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
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        yield repr(value).encode()
    else:
        # Not its repr, which may hold an address: that differs between processes.
        yield type(value).__qualname__.encode()
