"""The copy of a checkpoint's tensors that a save makes, because the next step changes them. Where it goes
depends on the free memory:

- `device`: on the GPU. The copy is queued like other work of the step, without a wait;
- `pinned`: in pinned host memory, which the GPU writes to; it is allocated once, and reused by
  later saves;
- `host`: in pageable host memory, as always for a model on the CPU;
- `none`: no copy. The live tensors are written at once, and the step waits for that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from drumline.base.processes import cgroup_values
from drumline.checkpoint import tensor_file
from drumline.checkpoint.shard_files import Files, PartFiles
from drumline.checkpoint.tensor_file import Staging, Tensors, make_event
from drumline.rank.torch_internals import copy_to_each

Kind = Literal["device", "pinned", "host", "none"]
_ALIGNMENT = 512

# Tensors are copied as integers of their size: so every type has a kernel, and there are few
# groups. float32, the most common type, needs no view.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED_AS = (torch.float32, *_INTEGERS.values())
_DEVICE_MARGIN = 1 << 29
_HOST_MARGIN = 1 << 28


# The next step must never run out of memory because of a copy. So the free memory of a GPU is what
# is left at the run's own peak, and on the host what the system and the limit of a container or a
# Slurm job leave.


def device_room(device: torch.device) -> int:
    """Bytes that a copy may take on a GPU. Cached memory of the allocator does not count: the next
    step may need it."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_stats(device)
    peak = held.get("allocated_bytes.all.peak", 0)
    reserved = held.get("reserved_bytes.all.current", 0)
    needed_at_peak = peak - reserved

    return int(free - needed_at_peak - _DEVICE_MARGIN)


def host_room() -> int:
    """Bytes that a copy may take in the host's memory."""
    memory_kb = _numbers(Path("/proc/meminfo").read_text(encoding="utf-8"))
    left = memory_kb["MemAvailable"] << 10

    with suppress(LookupError, ValueError):  # there is no limit, or it is `max`
        names = ("memory.max", "memory.current", "memory.stat")
        limit, used, kinds = (cgroup_values(name)[-1] for name in names)

        # The group's file cache can be reclaimed.
        left = min(left, int(limit) - int(used) + _numbers(kinds)["inactive_file"])

    return left - _HOST_MARGIN


def _numbers(text: str) -> dict[str, int]:
    """By name, from lines like `MemAvailable: 1234 kB`."""
    return {name: int(number) for name, number in re.findall(r"(?m)^(\w+):? +(\d+)", text)}


@dataclass(frozen=True)
class Copy:
    """The tensors to write, and where they are."""

    tensors: PartFiles
    """By file."""

    kind: Kind
    staging: Staging | None = None
    """Through which tensors go from a GPU to the host."""

    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """On the GPU, before and after the copy; None: there is nothing to wait for."""

    def wait(self) -> float:
        """Wait until the copy is complete, without holding the GIL; returns its seconds on the
        GPU."""
        if self.events is None:
            return 0.0

        began, ready = self.events
        ready.synchronize()
        return float(began.elapsed_time(ready)) / 1000

    def stream(self, tensors: Tensors) -> Iterator[bytes | memoryview]:
        """The bytes of one file; its memory is freed as soon as they are written."""
        yield from tensor_file.stream(tensors, self.staging)
        if self.kind != "none" and isinstance(tensors, dict):
            tensors.clear()


class Copier:
    """Copies where there is room; it keeps its buffers from one save to the next."""

    def __init__(
        self,
        device: torch.device,
        *,
        device_room: Callable[[torch.device], int] = device_room,
        host_room: Callable[[], int] = host_room,
    ) -> None:
        self._device = device
        self._device_room = device_room
        self._host_room = host_room
        self._staging = Staging(device) if device.type == "cuda" else None
        """Through which tensors go from a GPU to the host."""

        self._pinned: Tensor | None = None
        """The buffer of earlier saves."""

    def rehearse(self) -> None:
        """Copy a few bytes of a GPU, which loads kernels and pins buffers."""
        assert self._staging is not None, "only a GPU has something to load"
        small = {
            str(dtype): torch.zeros(1, dtype=dtype, device=self._device) for dtype in _COPIED_AS
        }
        [copied] = _beside({"rehearsal": small}, self._device).values()
        torch.cuda.current_stream(self._device).synchronize()

        for _ in self._staging.drain(copied.values()):
            pass

    @torch.no_grad()
    def take(self, live: Files) -> Copy:
        """Copy these tensors. On a GPU the copy may still be running: `wait` for it before it is
        read."""
        if self._device.type != "cuda":
            return Copy(*self._on_host(live))

        began, ready = (make_event(is_timed=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        began.record(stream)
        tensors, kind = self._from_gpu(live)
        ready.record(stream)

        return Copy(tensors, kind, self._staging, (began, ready))

    def as_they_are(self, live: Files) -> Copy:
        """No copy: the live tensors, which must be written at once."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return Copy(_each(live, lambda tensor: tensor), "none", self._staging)

    def _on_host(self, live: Files) -> tuple[PartFiles, Kind]:
        """A copy in pageable memory, or none if there is no room."""
        if self._host_room() < _num_bytes(live):
            return _each(live, lambda tensor: tensor), "none"

        copies = _each(live, lambda tensor: tensor.detach().to("cpu", copy=True))
        return copies, "host"

    def _from_gpu(self, live: Files) -> tuple[PartFiles, Kind]:
        """A copy on the GPU, in pinned memory, or on the host: the first that has room."""
        if self._device_room(self._device) >= _num_bytes(live):
            try:
                return _beside(live, self._device), "device"
            except torch.OutOfMemoryError:
                pass  # free memory may be fragmented, or in the pool of a graph

        buffer = self._pinned_memory(live)
        if buffer is not None:
            return _into(buffer, live), "pinned"
        return self._on_host(live)

    def _pinned_memory(self, live: Files) -> Tensor | None:
        """The buffer of earlier saves, or a larger one; None: there is no room."""
        size = _room_for(tensor for group in live.values() for tensor in group.values())
        if self._pinned is not None and self._pinned.numel() >= size:
            return self._pinned

        self._pinned = None  # before the larger one is allocated
        rounded = 1 << size.bit_length()  # as torch does for pinned memory
        if self._host_room() >= rounded:
            with suppress(RuntimeError):  # the system limits pinned memory
                self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._pinned


def _beside(live: Files, device: torch.device) -> PartFiles:
    """A copy on the same device: one allocation for each file, and a few calls for all its
    tensors."""
    copied = {}
    for file, group in live.items():
        sources = {name: _resolved(tensor) for name, tensor in group.items()}
        here = {name: source for name, source in sources.items() if source.device == device}
        memory = torch.empty(_room_for(here.values()), dtype=torch.uint8, device=device)
        targets = dict(zip(here, _carve(memory, here.values()), strict=True))
        _copy_all(here, targets)

        # An optimizer counts its steps on the CPU.
        copied[file] = {
            name: targets[name] if name in here else sources[name].clone() for name in group
        }

    return copied


def _copy_all(sources: Tensors, targets: Tensors) -> None:
    """One call for all tensors of a type."""
    by_type = defaultdict(list)
    for name, source in sources.items():
        bits = _as_bits(source)
        by_type[bits.dtype].append((_as_bits(targets[name]), bits))

    for pairs in by_type.values():
        copy_to, copy_from = zip(*pairs, strict=True)
        copy_to_each(list(copy_to), list(copy_from))


def _into(buffer: Tensor, live: Files) -> PartFiles:
    """A copy in one buffer of pinned memory, made by the GPU without a wait."""
    sources = [_resolved(tensor) for group in live.values() for tensor in group.values()]
    pairs = zip(_carve(buffer, sources), sources, strict=True)
    copies = iter([target.copy_(source, non_blocking=True) for target, source in pairs])

    return _each(live, lambda tensor: next(copies))


def _carve(memory: Tensor, sources: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors in this memory with the strides of the sources, so that dense memory is copied in one
    piece."""
    # One call per tensor: there are hundreds, and training is paused.
    start = 0
    by_type = {torch.uint8: memory}
    for source in sources:
        if source.dtype not in by_type:
            by_type[source.dtype] = memory.view(source.dtype)

        typed = by_type[source.dtype]
        dense = source if source.is_contiguous() else torch.empty_like(source, device="meta")
        yield typed.as_strided(source.shape, dense.stride(), start // source.element_size())
        start += _aligned(source.nbytes)


def _resolved(tensor: Tensor) -> Tensor:
    """Without pending conjugations and negations, which raw memory does not have."""
    return tensor.detach().resolve_conj().resolve_neg()


def _room_for(tensors: Iterable[Tensor]) -> int:
    """Bytes for these tensors side by side."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _each(files: Files, function: Callable[[Tensor], Tensor]) -> PartFiles:
    """The same files with other tensors."""
    return {
        file: {name: function(tensor) for name, tensor in group.items()}
        for file, group in files.items()
    }


def _as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    if tensor.dtype is torch.float32:
        return tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


def _num_bytes(files: Files) -> int:
    return sum(tensor.nbytes for group in files.values() for tensor in group.values())


def _aligned(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
