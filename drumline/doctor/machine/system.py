"""What a process has here: memory, processors, shared memory, open files, disk, clock and installed packages.

In a container that may be less than the machine has, and the smaller number counts. Packages are read from their files:
importing torch alone would take seconds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CGROUPS = Path("/sys/fs/cgroup")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - inspected, not written to
TIME_ERROR = 5
TIMEX_BYTES = 512
NCCL_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")
NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")
# `cuda: Optional[str] = '13.0'`
TEXT_CONSTANT = re.compile(r"""^(\w+)(?:\s*:[^=]*)?\s*=\s*['"]([^'"]*)['"]""", re.MULTILINE)


def memory_facts() -> dict[str, int | None]:
    """`limit_bytes` is the container's limit, where it is lower than the machine's memory."""
    numbers = {}
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        numbers[name] = int(value.split()[0]) * 1024
    texts = _cgroup("memory", "memory.max", "memory.limit_in_bytes")
    total = numbers["MemTotal"]
    limit = min((int(text) for text in texts if text.isdigit()), default=total)
    limited = limit if limit < total else None
    return {"bytes": total, "available_bytes": numbers.get("MemAvailable"), "limit_bytes": limited}


def cpu_facts() -> dict[str, Any]:
    """`count` of the machine, `usable` by this process, and the container's `quota`, if it has one."""
    quotas = [float(a) / float(b) for a, b in map(str.split, _cgroup("cpu", "cpu.max")) if a != "max"]
    whole, period = _cgroup("cpu", "cpu.cfs_quota_us"), _cgroup("cpu", "cpu.cfs_period_us")
    quotas += [int(a) / int(b) for a, b in zip(whole, period, strict=False) if int(a) > 0]
    usable = len(os.sched_getaffinity(0))
    return {"count": os.cpu_count() or 1, "usable": usable, "quota": min(quotas, default=None)}


def shared_memory_facts() -> dict[str, int] | None:
    """Of /dev/shm, through which DataLoader workers and NCCL pass tensors; None where there is none."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return {"bytes": status.f_frsize * status.f_blocks, "free_bytes": status.f_frsize * status.f_bavail}


def open_file_facts() -> dict[str, int | None]:
    """The limit of a process, and how far it may raise it; None: no limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    return {"soft": soft, "hard": hard}


def disk_facts(folder: Path) -> dict[str, Any]:
    """Of the folder, or of where it will be created."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    status = os.statvfs(parent)
    return {
        "folder": str(folder),
        "parent": str(parent),
        "bytes": status.f_frsize * status.f_blocks,
        "free_bytes": status.f_frsize * status.f_bavail,
        "free_files": status.f_favail if status.f_files else None,
        "error": _write_error(parent),
        "file_system": file_system_of(parent, Path("/proc/self/mounts").read_text(encoding="utf-8")),
    }


def file_system_of(folder: Path, mounts: str) -> str:
    """`ext4`, `nfs4`, ...: the type of the nearest mount above the folder."""
    resolved = folder.resolve()
    above = {str(path) for path in (resolved, *resolved.parents)}
    nearest, kind = "", "?"
    for line in mounts.splitlines():
        _, place, found, *_ = line.split()
        place = place.replace("\\040", " ")
        if place in above and len(place) >= len(nearest):
            nearest, kind = place, found
    return kind


def clock_facts() -> dict[str, Any]:
    """The time, and whether the kernel reports the clock as synchronized; None: it does not say."""
    # Zeros: nothing is set, only read.
    buffer = ctypes.create_string_buffer(TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        state = -1
    return {"time": time.time(), "synchronised": None if state < 0 else state != TIME_ERROR}


def _write_error(folder: Path) -> str:
    """Why nothing can be written there, or ""; the file has no name and is deleted at once."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"drumline doctor")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _cgroup(controller: str, *names: str) -> list[str]:
    """The contents of these files, for this process's group and the root it sees, in cgroup versions 1 and 2."""
    folders = {CGROUPS, CGROUPS / controller}
    for line in read_file(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            folders.add(CGROUPS / (controller if controllers else "") / path.lstrip("/"))
    texts = (read_file(folder / name).strip() for folder in sorted(folders) for name in names)
    return [text for text in texts if text]


def installed_packages(path: Iterable[str] | None = None) -> dict[str, str]:
    """Versions by name; of two with one name, the one that would be imported."""
    versions: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for name, version in _packages_in(Path(folder or ".")):
            versions.setdefault(name, version)
    return dict(sorted(versions.items()))


def torch_facts(packages: dict[str, str]) -> dict[str, str | None]:
    """`torch`, and the `cuda` and `nccl` that come with it; None for what is missing."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return {"torch": None, "cuda": None, "nccl": None}
    # torch's own version.py says more than the name of its package: `2.13.0+cu128`.
    values = dict(TEXT_CONSTANT.findall(read_file(Path(spec.origin).with_name("version.py"))))
    cuda = values.get("cuda")
    bundled = [packages[name] for name in packages if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name)]
    nccl = bundled[0] if bundled else _system_nccl() if cuda else None
    return {"torch": values.get("__version__") or packages.get("torch", "?"), "cuda": cuda, "nccl": nccl}


def _packages_in(folder: Path) -> Iterator[tuple[str, str]]:
    try:
        names = [entry.name for entry in folder.iterdir() if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return
    for file in sorted(names):
        name, _, version = file.rpartition(".")[0].partition("-")
        version = re.sub(r"-py\d.*$", "", version)
        if not version:  # an editable install has only the name in its folder's name
            noted = re.search(r"^Version: (.*)$", read_file(folder / file / "PKG-INFO"), re.MULTILINE)
            version = noted[1].strip() if noted else "?"
        yield name.lower().replace("_", "-").replace(".", "-"), version


def _system_nccl() -> str | None:
    """For a torch that was built against the system's NCCL: the version in the library's file name."""
    files = (file for folder in NCCL_FOLDERS for file in sorted(Path(folder).glob("libnccl.so.*.*.*")))
    return next((found[1] for file in files if (found := NCCL_FILE.search(file.name))), None)


def read_file(path: Path) -> str:
    """Its text; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""
