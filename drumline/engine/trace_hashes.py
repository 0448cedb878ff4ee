"""The hashes in a trace: of tensors, and of the samples of a collated batch one by one.

They look into objects of the user's own too, which the fingerprint of a dataset (data/fingerprint.py) must not do:
ranks may hold the same data under different paths, while a trace is compared with another of the same job.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

NUM_BYTES = 8


def hash_tensor(tensor: Tensor) -> str:
    """Of a tensor's type, shape and bits, wherever it is."""
    return _digest(_describe(tensor), _bits(tensor))


def hash_json(document: Any) -> str:
    """Of a document that JSON can hold."""
    return _digest(json.dumps(document, sort_keys=True).encode())


def hash_samples(batch: Any, size: int) -> tuple[list[str], str]:
    """One hash for each sample, of its row in every tensor whose first dimension is the batch's size; and one hash of
    all the rest of the batch."""
    samples, rest = [blake3() for _ in range(size)], blake3()
    for place, leaf in _leaves(batch, ""):
        tensor = torch.tensor(leaf) if _is_numbers(leaf) else leaf
        if not isinstance(tensor, Tensor):
            rest.update(f"{place}={leaf!r};".encode())
        elif tensor.dim() and tensor.shape[0] == size and tensor.layout is torch.strided:
            for sample, row in zip(samples, tensor.detach().cpu(), strict=True):
                sample.update(place.encode() + _describe(row))
                sample.update(_bits(row))
        else:
            rest.update(place.encode() + _describe(tensor))
            rest.update(_bits(tensor))
    return [sample.hexdigest(NUM_BYTES) for sample in samples], rest.hexdigest(NUM_BYTES)


def _leaves(value: Any, place: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every leaf of a batch, and where in it it stands. An object of somebody's own is what its attributes are: how it
    prints itself may hold an address, which no two runs share."""
    if id(value) in above:
        return
    if isinstance(value, np.ndarray) and not _is_numbers(value):
        value = value.tolist()
    above = (*above, id(value))
    if isinstance(value, Mapping):
        items = ((f"{place}[{name!r}]", item) for name, item in value.items())
    elif isinstance(value, tuple | list):
        items = ((f"{place}[{number}]", item) for number, item in enumerate(value))
    elif isinstance(value, Set):
        items = ((place, text) for text in sorted(map(repr, value)))
    elif is_dataclass(value):
        items = ((f"{place}.{field.name}", getattr(value, field.name)) for field in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor | type):
        items = ((f"{place}.{name}", item) for name, item in vars(value).items())
    else:
        is_plain = isinstance(value, Tensor | np.ndarray | np.generic | str | bytes | int | float | complex)
        yield place, value if is_plain or value is None else type(value).__name__
        return
    for inner, item in items:
        yield from _leaves(item, inner, above)


def _is_numbers(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"


def _describe(tensor: Tensor) -> bytes:
    return f"{tensor.dtype}{list(tensor.shape)}:".encode()


def _bits(tensor: Tensor) -> memoryview:
    dense = tensor.detach().cpu()
    if dense.layout is not torch.strided:
        dense = dense.to_dense()
    plain = dense.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _digest(*parts: bytes | memoryview) -> str:
    digest = blake3()
    for part in parts:
        digest.update(part)
    return digest.hexdigest(NUM_BYTES)
