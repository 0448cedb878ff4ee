"""The copy of a save, which training pauses for; then the `writer` writes it in a thread.

The tensors that the next step changes are copied. Where the copy goes depends on the free memory:

- `device`: on the GPU. The copy is queued like other work of the step, without a wait;
- `pinned`: in pinned host memory, which the GPU writes to; torch keeps it for later saves;
- `host`: in pageable host memory, as always for a model on the CPU;
- `none`: no copy. The live tensors are written at once, and the step waits for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from drumline.checkpoint import tensor_file
from drumline.checkpoint.tensor_file import Staging, make_event
from drumline.rank.torch_internals import copy_to_each

Kind = Literal["device", "pinned", "host", "none"]
Files = Mapping[str, Mapping[str, Tensor]]
# Tensors are copied as integers of their size: so every type has a kernel, and there are few
# groups. float32, the most common type, needs no view.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COPIED_AS = (torch.float32, *_INTEGERS.values())
_DEVICE_MARGIN = 1 << 29
_HOST_MARGIN = 1 << 28
_UNKNOWN = 1 << 62
_GROUPS = Path("/sys/fs/cgroup")


# The next step must never run out of memory because of a copy. So the free memory of a GPU is what
# is left at the run's own peak, and on the host what the system and the limit of a container or a
# Slurm job leave.


def device_room(device: torch.device) -> int:
    """Bytes that a copy may take on a GPU. Cached memory of the allocator does not count: the next
    step may need it."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_stats(device)
    needed_at_peak = held.get("allocated_bytes.all.peak", 0) - held.get(
        "reserved_bytes.all.current", 0
    )
    return int(free - needed_at_peak - _DEVICE_MARGIN)


def host_room() -> int:
    """Bytes that a copy may take in the host's memory."""
    left = [_UNKNOWN]
    with suppress(OSError, ValueError, LookupError):
        left.append(_numbers(Path("/proc/meminfo"))["MemAvailable:"] << 10)
    with suppress(OSError, ValueError, LookupError):  # without a limit it is `max`, not a number
        name = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::/")[2].strip()
        group = _GROUPS / name
        if not (group / "memory.max").is_file():
            group = _GROUPS
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        # The group's file cache can be reclaimed.
        left.append(limit - used + _numbers(group / "memory.stat")["inactive_file"])
    return min(left) - _HOST_MARGIN


def _numbers(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {row[0]: int(row[1]) for row in rows}


@dataclass(frozen=True)
class Copy:
    """The tensors to write, and where they are."""

    tensors: dict[str, dict[str, Tensor]]
    kind: Kind
    staging: Staging | None = None
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def wait(self) -> float:
        """Wait until the copy is complete, without holding the GIL; returns its seconds on the
        GPU."""
        if self.events is None:
            return 0.0
        began, ready = self.events
        ready.synchronize()
        return float(began.elapsed_time(ready)) / 1000

    def stream(self, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
        """The bytes of one file; its memory is freed as soon as they are written."""
        yield from tensor_file.stream(tensors, self.staging)
        if self.kind != "none" and isinstance(tensors, dict):
            tensors.clear()


class Copier:
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

    def rehearse(self) -> None:
        """Copy a few bytes before the first step, so that the first save does not have to load
        kernels and pin buffers."""
        if self._staging is None:
            return
        small = {str(kind): torch.zeros(1, dtype=kind, device=self._device) for kind in _COPIED_AS}
        [copied] = _copied({"rehearsal": small}).values()
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

    def _on_host(self, live: Files) -> tuple[dict[str, dict[str, Tensor]], Kind]:
        if self._host_room() < _num_bytes(live):
            return _each(live, lambda tensor: tensor), "none"
        return _each(live, lambda tensor: tensor.detach().to("cpu", copy=True)), "host"

    def _from_gpu(self, live: Files) -> tuple[dict[str, dict[str, Tensor]], Kind]:
        if self._device_room(self._device) >= _num_bytes(live):
            try:
                return _copied(live), "device"
            except torch.OutOfMemoryError:
                pass  # free memory may be fragmented, or in the pool of a graph
        # torch rounds each piece of pinned memory up to a power of two.
        if self._host_room() >= 2 * _num_bytes(live):
            with suppress(RuntimeError):  # the system limits pinned memory
                return _each(live, _to_pinned), "pinned"
        return self._on_host(live)


def _copied(live: Files) -> dict[str, dict[str, Tensor]]:
    """A copy on the same device: a few calls for all tensors of a type, while training is paused."""
    copies = _each(live, _empty_copy)
    by_size = defaultdict(list)
    for file, group in live.items():
        for name, tensor in group.items():
            source = _as_bits(tensor.detach().resolve_conj().resolve_neg())
            by_size[source.dtype, source.device].append((_as_bits(copies[file][name]), source))
    for pairs in by_size.values():  # an optimizer counts its steps on the CPU
        copy_to_each([target for target, _ in pairs], [source for _, source in pairs])
    return copies


def _empty_copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach())


def _to_pinned(tensor: Tensor) -> Tensor:
    """The GPU makes this copy without a wait."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    target = torch.empty_like(tensor.detach(), device="cpu", pin_memory=True)
    return target.copy_(tensor.detach(), non_blocking=True)


def _each(files: Files, function: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Tensor]]:
    return {
        file: {name: function(tensor) for name, tensor in group.items()}
        for file, group in files.items()
    }


def _as_bits(tensor: Tensor) -> Tensor:
    return (
        tensor if tensor.dtype is torch.float32 else tensor.view(_INTEGERS[tensor.element_size()])
    )


def _num_bytes(files: Files) -> int:
    return sum(tensor.nbytes for group in files.values() for tensor in group.values())
