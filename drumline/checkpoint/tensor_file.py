"""Tensors as one safetensors file: written as a stream, so that saving needs no second copy of the
model.

The safetensors package serializes into memory, or hides the system's error; this writer streams the
tensors' own memory. Files are read with the package itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import open_regular
from drumline.checkpoint.staging import Staging
from drumline.rank.tensor_hash import as_bytes
from drumline.runs.manifest import CorruptCheckpointError

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_TYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """How many bytes these tensors take in a file, without its header; raises if one cannot be
    saved."""
    for name, tensor in tensors.items():
        _type_code(name, tensor)
    return sum(tensor.nbytes for tensor in tensors.values())


def stream(
    tensors: Mapping[str, Tensor], staging: Staging | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of the file, piece by piece; tensors on a GPU are copied one after another, through
    `staging` while the one before is written."""
    yield _header(tensors)
    ordered = [tensors[name] for name in _order(tensors)]
    if staging is not None and any(tensor.is_cuda for tensor in ordered):
        yield from staging.drain(ordered)
        return
    for tensor in ordered:
        yield as_bytes(tensor).cpu().numpy().data


def read(path: Path, *, follow_links: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, mapped from it: copy those that you keep. `follow_links`: for a file
    that the user named."""
    try:
        open_regular(path, follow_links=follow_links).close()  # the package would wait for a FIFO
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpointError(path.parent, f"{path.name} cannot be read: {error}") from error
    return tensors


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in _order(tensors):
        tensor = tensors[name]
        entry = {"dtype": _type_code(name, tensor), "shape": list(tensor.shape)}
        entries[name] = {**entry, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    # The widest types first: every tensor then starts at a multiple of its own item size.
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _type_code(name: str, tensor: Tensor) -> str:
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype not in _TYPE_CODES:
        raise CheckpointError(
            f"the tensor {name} cannot be saved: {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            next_step="make it a dense tensor of a common type, or a buffer with persistent=False",
        )
    return _TYPE_CODES[tensor.dtype]
