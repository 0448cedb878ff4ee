"""The facts of one machine as plain JSON, for `machine_checks.py` and `host_differences.py`.

Nothing is changed. Slow parts run in parallel, each with a time limit. In a container the limits of
the container are used if they are smaller than the machine's. Versions of packages are read from
their metadata: importing torch would take seconds.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline.base.background import in_background, resolve_ipv4
from drumline.base.processes import cgroup_values, cpu_quota
from drumline.net.interfaces import GLOO_VARIABLE, gloo_interface, interfaces, nccl_interface
from drumline.tools.doctor.machine.folder_hashes import code_facts, data_facts
from drumline.tools.doctor.machine.gpus import NvidiaSmi, file_text
from drumline.tools.doctor.machine.known_variables import VISIBLE_GPUS, shown_variables
from drumline.tools.doctor.machine.network_cards import card_facts

# The limit of the slowest part, so that all of it takes under two seconds.
TIME_LIMIT_S = 1.8
NAME_TIMEOUT_S = 1.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - inspected, not written to
TIME_ERROR = 5
TIMEX_BYTES = 512
NCCL_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
)
NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")
# `cuda: Optional[str] = '13.0'`
TEXT_CONSTANT = re.compile(r"""^(\w+)(?:\s*:[^=]*)?\s*=\s*['"]([^'"]*)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class HostSettings:
    environment: Mapping[str, str]
    run_folder: str = "."
    code: str | None = None
    data: str | None = None


def host_facts(settings: HostSettings) -> dict[str, Any]:
    """Everything about this machine, and about the folders of the run on it."""
    deadline = time.monotonic() + TIME_LIMIT_S
    environment = settings.environment
    run_folder = Path(settings.run_folder)
    code = settings.code
    data = settings.data
    gpus = NvidiaSmi(environment)
    host = socket.gethostname()
    addresses = in_background(lambda: resolve_ipv4(host))
    disk = in_background(lambda: disk_facts(run_folder))
    skip = [run_folder] if data is None else [run_folder, Path(data)]
    code_found = in_background(lambda: None if code is None else code_facts(Path(code), skip=skip))
    data_found = in_background(lambda: None if data is None else data_facts(Path(data)))
    packages = installed_packages()
    return {
        "host": host,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "executable": sys.executable,
        **torch_facts(packages),
        **_process_facts(),
        "threads": environment.get("OMP_NUM_THREADS"),
        "visible_gpus": environment.get(VISIBLE_GPUS),
        "variables": shown_variables(environment),
        "packages": packages,
        **_network_facts(addresses, environment),
        "cards": card_facts(environment),
        **gpus.facts(_left(deadline)),
        "disk": _folder_facts(disk, settings.run_folder, deadline),
        "code": _folder_facts(code_found, code, deadline),
        "data": _folder_facts(data_found, data, deadline),
        "clock": {"time": time.time(), "synchronised": _is_clock_synchronized()},
    }


def _left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())


# Resources of a process


def _process_facts() -> dict[str, Any]:
    """`memory` with the container's `limit_bytes`, if that is lower than the machine's memory;
    `cpus`, with the container's `quota`; `shm`, or None; `open_files`, with the hard limit."""
    meminfo = (
        line.partition(":")
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    )
    memory = {name: int(value.split()[0]) * 1024 for name, _, value in meminfo}
    total = memory["MemTotal"]
    limit = min(
        (int(text) for text in cgroup_values("memory.max") if text.isdigit()), default=total
    )
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (
        None if limit_value == resource.RLIM_INFINITY else limit_value for limit_value in limits
    )
    return {
        "memory": {
            "bytes": total,
            "available_bytes": memory.get("MemAvailable"),
            "limit_bytes": limit if limit < total else None,
        },
        "cpus": {
            "count": os.cpu_count() or 1,
            "usable": len(os.sched_getaffinity(0)),
            "quota": cpu_quota(),
        },
        "shm": _space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        "open_files": {"soft": soft, "hard": hard},
    }


def _space(folder: Path) -> dict[str, int]:
    status = os.statvfs(folder)
    return {
        "bytes": status.f_frsize * status.f_blocks,
        "free_bytes": status.f_frsize * status.f_bavail,
    }


def _is_clock_synchronized() -> bool | None:
    """Whether the kernel reports the clock as synchronized; None: unknown."""
    # Zeros mean that nothing is set, only read.
    buffer = ctypes.create_string_buffer(TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != TIME_ERROR


# Packages


def installed_packages() -> dict[str, str]:
    """Versions by name; if there are two of the same name, the one that would be imported."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        folder = getattr(distribution, "_path", Path()).name
        metadata = distribution.metadata
        is_broken = "Name" not in metadata or "Version" not in metadata
        if is_broken or folder.startswith("~"):  # pip renames to ~ what it has not deleted yet
            continue
        name = re.sub(r"[_.]", "-", metadata["Name"].lower())
        versions.setdefault(name, metadata["Version"])
    return dict(sorted(versions.items()))


def torch_facts(packages: Mapping[str, str]) -> dict[str, str | None]:
    """`torch`, and the `cuda` and `nccl` that come with it; None for what is missing."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return {"torch": None, "cuda": None, "nccl": None}
    # torch's own version.py has more than the package's metadata: `2.13.0+cu128`.
    values = dict(TEXT_CONSTANT.findall(file_text(Path(spec.origin).with_name("version.py"))))
    cuda = values.get("cuda")
    nccl = [packages[name] for name in packages if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name)]
    if (
        cuda and not nccl
    ):  # built against the system's NCCL, whose version is in the name of its file
        files = (
            file
            for folder in NCCL_FOLDERS
            for file in sorted(Path(folder).glob("libnccl.so.*.*.*"))
        )
        nccl = [match[1] for file in files if (match := NCCL_FILE.search(file.name))]
    version = values.get("__version__") or packages.get("torch", "?")
    return {"torch": version, "cuda": cuda, "nccl": nccl[0] if nccl else None}


# Network and folders


def _network_facts(resolving: Future[list[str]], environment: Mapping[str, str]) -> dict[str, Any]:
    """`addresses` of the host's own name, or a `name_error`; its interfaces, and which gloo and
    NCCL would use."""
    addresses: list[str] = []
    error = ""
    timed_out = False
    try:
        addresses = resolving.result(NAME_TIMEOUT_S)
    except TimeoutError:
        error = f"no answer within {NAME_TIMEOUT_S:g} s"
        timed_out = True
    except OSError as refusal:
        error = refusal.strerror or str(refusal)
    host_interfaces = interfaces()
    # gloo resolves the name as well, and would also block.
    is_known = not timed_out or environment.get(GLOO_VARIABLE)
    gloo = gloo_interface(host_interfaces, environment) if is_known else None
    nccl = nccl_interface(host_interfaces, environment)
    return {
        "addresses": addresses,
        "name_error": error,
        "interfaces": [
            {**asdict(interface), "ipv6": list(interface.ipv6)} for interface in host_interfaces
        ],
        "gloo_interface": gloo.name if gloo else None,
        "nccl_interface": nccl.name if nccl else None,
    }


def _folder_facts(facts: Future[Any], folder: str | None, deadline: float) -> Any:
    """The facts, or why they are missing: a call to a file server that is down never returns."""
    left = _left(deadline)
    try:
        return facts.result(left)
    except TimeoutError:
        reason = f"no answer within {left:.2g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    return {"folder": folder, "unreachable": reason}


def disk_facts(folder: Path) -> dict[str, Any]:
    """The disk of the folder, or of where it will be created; `error`: why nothing can be written
    there."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    status = os.statvfs(parent)
    refusal = ""
    try:
        with tempfile.TemporaryFile(dir=parent) as file:  # it has no name, and is deleted at once
            file.write(b"drumline doctor")
    except OSError as error:
        refusal = error.strerror or str(error)
    return {
        "folder": str(folder),
        "parent": str(parent),
        **_space(parent),
        "free_files": status.f_favail if status.f_files else None,
        "error": refusal,
        "file_system": file_system_of(
            parent, Path("/proc/self/mounts").read_text(encoding="utf-8")
        ),
    }


def file_system_of(folder: Path, mounts: str) -> str:
    """`ext4`, `nfs4`, ...: the type of the nearest mount above the folder."""
    resolved = folder.resolve()
    above = {str(path) for path in (resolved, *resolved.parents)}
    nearest = ""
    kind = "?"
    for line in mounts.splitlines():
        _, place, mount_kind, *_ = line.split()
        place = place.replace("\\040", " ")
        if place in above and len(place) >= len(nearest):
            nearest = place
            kind = mount_kind
    return kind
