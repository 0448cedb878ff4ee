"""Tensors as one safetensors file: written as a stream, so that saving needs no second copy of the
model.

The safetensors package serializes into memory, or hides the system's error; this writer streams the
tensors' own memory, that of a GPU through two pinned buffers (`Staging`). Files are read with the
package itself.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import open_regular
from drumline.rank.tensor_hash import as_bytes
from drumline.runs.manifest import CorruptCheckpointError

Tensors = Mapping[str, Tensor]
"""Tensors by name."""

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


def num_bytes(tensors: Tensors) -> int:
    """How many bytes these tensors take in a file, without its header; raises if one cannot be
    saved."""
    for name, tensor in tensors.items():
        _type_code(name, tensor)
    return sum(tensor.nbytes for tensor in tensors.values())


def stream(tensors: Tensors, staging: Staging | None = None) -> Iterator[bytes | memoryview]:
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
        # the package would wait for a FIFO
        open_regular(path, follow_links=follow_links).close()
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpointError(path.parent, f"{path.name} cannot be read: {error}") from error

    return tensors


def _header(tensors: Tensors) -> bytes:
    """The length of the JSON text, and the text, padded."""
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


def _order(tensors: Tensors) -> list[str]:
    """In which a file holds them."""
    # The widest types first: every tensor then starts at a multiple of its own item size.
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _type_code(name: str, tensor: Tensor) -> str:
    """The format's name for its type; an error if the format has none."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta
    if not is_plain or tensor.dtype not in _TYPE_CODES:
        raise CheckpointError(
            f"the tensor {name} cannot be saved: {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            next_step="make it a dense tensor of a common type, or a buffer with persistent=False",
        )

    return _TYPE_CODES[tensor.dtype]


BUFFER_BYTES = 32 << 20


class Staging:
    """Copies tensors from a GPU to the host through two pinned buffers, on a separate stream: one is
    filled while the other is read. Small tensors share a buffer, a large one is copied in several
    parts. Created once for a run; its buffers and its stream are created when first needed."""

    def __init__(self, device: torch.device, *, size: int = BUFFER_BYTES) -> None:
        self._device = device
        self._size = size
        """Of each buffer, in bytes."""

        self._stream: torch.cuda.Stream | None = None
        """Made when it is first needed."""

        self._buffers: list[Tensor] = []
        """Two, once they are needed."""

    def drain(self, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
        """The bytes of tensors that no other stream is writing to. Each piece is valid until the
        next one."""
        if self._stream is None:
            # In a new thread the current device is the first GPU, which may be another rank's.
            with torch.cuda.device(self._device):
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                self._buffers = [_buffer(self._size) for _ in range(2)]

        source = _Source(tensors)
        started: deque[tuple[int, int, torch.cuda.Event]] = deque()
        turn = 0

        while True:
            while len(started) < 2:
                count, done = self._fill(self._buffers[turn], source, self._stream)
                if not count:
                    break

                started.append((turn, count, done))
                turn = 1 - turn

            if not started:
                return

            number, count, done = started.popleft()
            done.synchronize()
            yield self._buffers[number][:count].numpy().data

    def _fill(
        self,
        buffer: Tensor,
        source: _Source,
        stream: torch.cuda.Stream,
    ) -> tuple[int, torch.cuda.Event]:
        """Start to copy as much as fits. The stream is current only in this method, not while bytes
        are read."""
        filled = 0
        done = make_event()
        with torch.cuda.stream(stream):
            while filled < self._size:
                piece = source.next(self._size - filled)
                if piece is None:
                    break

                buffer[filled : filled + len(piece)].copy_(piece, non_blocking=True)
                filled += len(piece)

            done.record(stream)

        return filled, done


class _Source:
    """The bytes of tensors, a limited number at a time."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = iter(tensors)
        self._current: Tensor | None = None
        """As bytes."""

        self._read = 0
        """How many bytes of the current tensor have been taken."""

    def next(self, most: int) -> Tensor | None:
        """At most so many, all of one tensor; None: there are no more."""
        while self._current is None or self._read >= len(self._current):
            tensor = next(self._tensors, None)
            if tensor is None:
                return None

            self._current = as_bytes(tensor)
            self._read = 0

        piece = self._current[self._read : self._read + most]
        self._read += len(piece)
        return piece


def make_event(*, is_timed: bool = False) -> torch.cuda.Event:
    """An event on which a thread waits without spinning."""
    return torch.cuda.Event(enable_timing=is_timed, blocking=True)  # type: ignore[no-untyped-call]


def _buffer(size: int) -> Tensor:
    """Pinned memory, if the system allows it."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # pageable memory is slower, but works
        return torch.empty(size, dtype=torch.uint8)
