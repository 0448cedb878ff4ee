"""Copies tensors from a GPU to the host through two pinned buffers, on a separate stream: one is
filled while the other is read. Small tensors share a buffer, a large one is copied in several
parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from drumline.rank.tensor_hash import as_bytes

BUFFER_BYTES = 32 << 20


class Staging:
    """Created once for a run; its buffers and its stream are created when first needed."""

    def __init__(self, device: torch.device, *, size: int = BUFFER_BYTES) -> None:
        self._device = device
        self._size = size
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[Tensor] = []

    def drain(self, tensors: Iterable[Tensor]) -> Iterator[memoryview]:
        """The bytes of tensors that no other stream is writing to. Each piece is valid until the
        next one."""
        if self._stream is None:
            # In a new thread the current device is the first GPU, which may be another rank's.
            with torch.cuda.device(self._device):
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                self._buffers = [_buffer(self._size) for _ in range(2)]
        source = _Source(tensors)
        turn = 0
        started: deque[tuple[int, int, torch.cuda.Event]] = deque()
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
        self, buffer: Tensor, source: _Source, stream: torch.cuda.Stream
    ) -> tuple[int, torch.cuda.Event]:
        """Start to copy as much as fits. The stream is current only in this method, not while bytes
        are read."""
        filled = 0
        done = make_event()
        with torch.cuda.stream(stream):
            while filled < self._size and (piece := source.next(self._size - filled)) is not None:
                buffer[filled : filled + len(piece)].copy_(piece, non_blocking=True)
                filled += len(piece)
            done.record(stream)
        return filled, done


class _Source:
    """The bytes of tensors, a limited number at a time."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = iter(tensors)
        self._current: Tensor | None = None
        self._read = 0

    def next(self, most: int) -> Tensor | None:
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
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # pageable memory is slower, but works
        return torch.empty(size, dtype=torch.uint8)
