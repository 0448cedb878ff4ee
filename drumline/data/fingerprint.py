"""A short text that is the same on every rank if they have the same dataset; ranks compare it before step
1."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from drumline.data.dataset import is_resumable, is_stream
from drumline.data.fetch import Fetch, Request

_NUM_SAMPLES = 4


def fingerprint(dataset: Any) -> str:
    """The number of samples, and a hash of a few of them. A stream is not read for this: only what it is."""
    if is_stream(dataset):
        return f"a {'resumable ' if is_resumable(dataset) else ''}stream, {type(dataset).__qualname__}"
    fetch = Fetch(dataset, seed=0, collate=_as_it_is)
    spread = np.linspace(0, fetch.length - 1, num=min(_NUM_SAMPLES, fetch.length)).astype(np.int64)
    digest = hashlib.blake2b(digest_size=8)
    for index in spread.tolist():
        digest.update(_sample_hash(fetch, index))
    return f"{fetch.length} samples, {digest.hexdigest()}"


def _sample_hash(fetch: Fetch, index: int) -> bytes:
    """Of what is in the sample; or nothing, if it is not the same twice (a dataset with a generator of its
    own): ranks that have the same such dataset must not be told that it differs."""
    first, second = (content_hash(fetch[Request(0, index, index + 1, shuffled=False)]) for _ in range(2))
    return first if first == second else b""


def content_hash(sample: Any) -> bytes:
    """The same for samples of the same content, in any process."""
    digest = hashlib.blake2b()
    for piece in _pieces(sample):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.digest()


def _pieces(value: Any) -> Iterator[bytes]:
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
            yield from _pieces(item)
    elif isinstance(value, tuple | list):
        yield f"sequence of {len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        yield repr(value).encode()
    else:
        yield type(
            value
        ).__qualname__.encode()  # its repr may hold an address, which differs between processes


def _as_it_is(samples: list[Any]) -> list[Any]:
    return samples
