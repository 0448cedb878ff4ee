"""How much memory is to spare for the copy that a save makes: on the GPU, and on the host.

A copy must never be what the next step runs out of memory for. So what counts as free on a GPU is what would be left
at the run's own peak, and on the host what the system and the process's own limit (a container's, a Slurm job's) leave.
"""

from __future__ import annotations

from pathlib import Path

import torch

_DEVICE_MARGIN = 1 << 29
_HOST_MARGIN = 1 << 28
_UNKNOWN = 1 << 62
_GROUPS = Path("/sys/fs/cgroup")


def device_room(device: torch.device) -> int:
    """Bytes that a copy may take on a GPU. What the allocator holds unused now, the next step may need again."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_stats(device)
    needed_at_peak = held.get("allocated_bytes.all.peak", 0) - held.get("reserved_bytes.all.current", 0)
    return int(free - needed_at_peak - _DEVICE_MARGIN)


def host_room() -> int:
    """Bytes that a copy may take in the host's memory."""
    return min(_left_in_system(), _left_in_group()) - _HOST_MARGIN


def _left_in_system() -> int:
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
    except (OSError, ValueError, IndexError, StopIteration):
        return _UNKNOWN


def _left_in_group() -> int:
    """What this process's control group leaves it; the file cache that it holds can be had back."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::/")[2].strip()
        group = next(path for path in (_GROUPS / own, _GROUPS) if (path / "memory.max").is_file())
        limit = (group / "memory.max").read_text(encoding="utf-8").strip()
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        lines = (line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        cache = next(int(count) for name, count in lines if name == "inactive_file")
    except (OSError, ValueError, StopIteration):
        return _UNKNOWN
    return _UNKNOWN if limit == "max" else int(limit) - used + cache
