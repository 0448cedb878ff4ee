"""The facts of one machine as plain JSON, for `machine_checks.py` and `cluster.py`.

Nothing is changed. Slow parts run in parallel, each with a time limit. In a container the limits of
the container are used if they are smaller than the machine's. Versions of packages are read from
their metadata: importing torch would take seconds.
"""

from __future__ import annotations

import csv
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from drumline.base.background import in_background, resolve_ipv4
from drumline.base.processes import cgroup_values, cpu_quota
from drumline.base.rank_environment import Environment
from drumline.base.text import MIB
from drumline.net.interfaces import GLOO_VARIABLE, gloo_interface, interfaces, nccl_interface
from drumline.tools.doctor.machine.folder_hashes import code_facts, data_facts
from drumline.tools.doctor.machine.known_variables import VISIBLE_GPUS, shown_variables

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
GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name")
DRIVER_FOLDER = Path("/proc/driver/nvidia")
SYSTEM_CLASSES = Path("/sys/class")
CARD_KINDS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}
EFA_DRIVER = "efa"
NCCL_PLUGINS = ("libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so")
PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib64",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/aws-ofi-nccl/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/lib",
)
NCCL_FILE = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)$")
# `cuda: Optional[str] = '13.0'`
TEXT_CONSTANT = re.compile(r"""^(\w+)(?:\s*:[^=]*)?\s*=\s*['"]([^'"]*)['"]""", re.MULTILINE)


Facts = Mapping[str, Any]
HostFacts = Mapping[str, Facts]
"""Of several hosts, by name."""


@dataclass(frozen=True)
class HostSettings:
    """What of the run is inspected: its environment and its folders."""

    environment: Environment
    run_folder: str = "."
    code: str | None = None
    data: str | None = None


def host_facts(settings: HostSettings) -> dict[str, Any]:
    """Everything about this machine, and about the folders of the run on it.

    Slow parts run in threads meanwhile, each with the time that is left.
    """
    deadline = time.monotonic() + TIME_LIMIT_S
    environment = settings.environment
    code = settings.code
    data = settings.data
    host = socket.gethostname()
    folders = [Path(folder) for folder in (settings.run_folder, data) if folder is not None]

    gpus = in_background(lambda: gpu_facts(environment))
    addresses = in_background(lambda: resolve_ipv4(host))
    disk = in_background(lambda: disk_facts(folders[0]))
    reading_code = in_background(lambda: code and code_facts(Path(code), skip=folders))
    reading_data = in_background(lambda: data and data_facts(Path(data)))
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
        **gpus.result(),
        "disk": _folder_facts(disk, settings.run_folder, deadline),
        "code": _folder_facts(reading_code, code, deadline),
        "data": _folder_facts(reading_data, data, deadline),
        "clock": {"synchronised": _is_clock_synchronized()},
    }


# Resources of a process


def _process_facts() -> Facts:
    """`memory` with the container's `limit_bytes`, if that is lower than the machine's memory;
    `cpus`, with the container's `quota`; `shm`, or None; `open_files`, with the hard limit."""
    meminfo = dict(re.findall(r"(?m)^(\w+): +(\d+) kB", file_text(Path("/proc/meminfo"))))
    total = int(meminfo["MemTotal"]) * 1024
    limits = [int(text) for text in cgroup_values("memory.max") if text.isdigit()]
    limit = min(limits, default=total)
    soft, hard = (
        None if most == resource.RLIM_INFINITY else most
        for most in resource.getrlimit(resource.RLIMIT_NOFILE)
    )

    return {
        "memory": {
            "bytes": total,
            "available_bytes": int(meminfo["MemAvailable"]) * 1024,
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
    """Of the file system of a folder."""
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


# GPUs, driver and the processes on the GPUs


def gpu_facts(environment: Environment) -> Facts:
    """`driver`, `gpus`, and a `gpu_error` where nvidia-smi failed."""
    from_kernel = _known_to_kernel()
    program = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if program is None:
        error = "nvidia-smi is not on the PATH" if from_kernel["driver"] else ""
        return {**from_kernel, "gpu_error": error}

    def query(flag: str) -> subprocess.CompletedProcess[str]:
        """One question to nvidia-smi, whose answer is CSV without a header."""
        return subprocess.run(
            [program, flag, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=TIME_LIMIT_S,
        )

    # Without persistence mode the driver takes seconds to start. A process may hang in it, where no
    # signal reaches it: its thread is left alone.
    listing = in_background(lambda: query(f"--query-gpu={','.join(GPU_FIELDS)}"))
    processes = in_background(lambda: query(f"--query-compute-apps={','.join(PROCESS_FIELDS)}"))

    try:
        listed = listing.result(TIME_LIMIT_S)
        apps = processes.result(TIME_LIMIT_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        error = f"nvidia-smi did not answer within {TIME_LIMIT_S:.1f} s"
        return {**from_kernel, "gpu_error": error}

    if listed.returncode == 0:
        return read_nvidia_smi(listed.stdout, apps.stdout)
    if "No devices" in listed.stdout:
        return {**from_kernel, "gpu_error": ""}

    first_line = (listed.stdout.strip() or "no output").splitlines()[0]
    return {**from_kernel, "gpu_error": f"nvidia-smi failed: {first_line}"}


def _known_to_kernel() -> Facts:
    """In nvidia-smi's place, which without persistence mode may be too slow: no memory and no
    processes. The driver's folder in /proc has a file for each GPU."""
    driver = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", file_text(DRIVER_FOLDER / "version"))

    gpus = []
    for index, file in enumerate(sorted(DRIVER_FOLDER.glob("gpus/*/information"))):
        details = dict(re.findall(r"(?m)^(Model|GPU UUID):\s*(.*)$", file_text(file)))
        gpus.append(
            {
                "index": index,
                "uuid": details.get("GPU UUID", "?"),
                "name": details.get("Model", "?"),
                "memory_bytes": None,
                "used_bytes": None,
                "processes": [],
            }
        )

    return {"driver": driver[1] if driver else None, "gpus": gpus}


def read_nvidia_smi(gpus: str, processes: str) -> Facts:
    """From its two outputs, in CSV without a header and units:

    0, GPU-5a1f..., NVIDIA H100 80GB HBM3, 81559, 1024, 550.54.15
    GPU-5a1f..., 4711, /usr/bin/python3
    """
    rows = _rows(gpus, GPU_FIELDS)
    apps = _rows(processes, PROCESS_FIELDS)
    listed = [
        {
            "index": _number(row["index"]),
            "uuid": row["uuid"],
            "name": row["name"],
            "memory_bytes": _mib(row["memory.total"]),
            "used_bytes": _mib(row["memory.used"]),
            "processes": [_process(app) for app in apps if app["gpu_uuid"] == row["uuid"]],
        }
        for row in rows
    ]
    driver = min((row["driver_version"] for row in rows), default=None)

    return {
        "driver": driver,
        "gpus": listed,
        "gpu_error": "",
    }


def _process(row: Mapping[str, str]) -> Facts:
    """A process on a GPU, as nvidia-smi lists it."""
    # Only the program's name: arguments may contain secrets.
    words = row["process_name"].split()
    name = PurePath(words[0]).name if words and not words[0].startswith("[") else "?"
    return {"pid": _number(row["pid"]), "name": name}


def _rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """The lines of nvidia-smi that have all fields, by field: `{'index': '0', 'uuid': 'GPU-5a1f...'}`."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _number(text: str) -> int | None:
    """None for text such as `[N/A]`."""
    return int(text) if text.isdigit() else None


def _mib(text: str) -> int | None:
    """None for `[N/A]`."""
    value = _number(text)
    return None if value is None else value * MIB


def file_text(path: Path) -> str:
    """Empty when the file cannot be read."""
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""


# Packages


def installed_packages() -> dict[str, str]:
    """Versions by name; if there are two of the same name, the one that would be imported:
    `{'numpy': '2.3.1', 'torch': '2.13.0'}`."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        if "Name" not in metadata or "Version" not in metadata:
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
        return dict.fromkeys(("torch", "cuda", "nccl"))

    # torch's own version.py has more than the package's metadata: `2.13.0+cu128`.
    source = file_text(Path(spec.origin).with_name("version.py"))
    values = dict(TEXT_CONSTANT.findall(source))
    cuda = values.get("cuda")
    nccl = [packages[name] for name in packages if re.fullmatch(r"nvidia-nccl(-cu\d+)?", name)]

    if cuda and not nccl:
        nccl = _system_nccl()

    version = values.get("__version__") or packages.get("torch", "?")
    return {
        "torch": version,
        "cuda": cuda,
        "nccl": nccl[0] if nccl else None,
    }


def _system_nccl() -> list[str]:
    """The versions of the system's NCCL, which are in the names of its files: `libnccl.so.2.27.3`."""
    versions = []
    for folder in NCCL_FOLDERS:
        for file in sorted(Path(folder).glob("libnccl.so.*.*.*")):
            if match := NCCL_FILE.search(file.name):
                versions.append(match[1])

    return versions


# Network cards, from /sys


def card_facts(environment: Environment) -> Facts:
    """`rdma`: a card for each active port; `interfaces`: `gbit` and `vendor` by name, where the
    kernel knows them; `nccl_plugin`: its path, or None."""
    cards = _entries(SYSTEM_CLASSES / "infiniband")
    devices = _entries(SYSTEM_CLASSES / "net")
    return {
        "rdma": [port for card in cards for port in _active_ports(card)],
        "interfaces": {device.name: _interface(device) for device in devices},
        "nccl_plugin": _plugin(environment.get("LD_LIBRARY_PATH", "")),
    }


def _entries(folder: Path) -> list[Path]:
    """Sorted; none where the kernel has no such folder."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _active_ports(card: Path) -> list[dict[str, str]]:
    """A name and a kind for each active port of a card: `{'name': 'mlx5_0', 'kind': 'RoCE'}`."""
    is_efa = (card / "device" / "driver").resolve().name == EFA_DRIVER
    active = []
    for port in _entries(card / "ports"):
        kind = "EFA" if is_efa else CARD_KINDS.get(file_text(port / "link_layer").strip())
        if kind and "ACTIVE" in file_text(port / "state"):
            active.append({"name": card.name, "kind": kind})

    return active


def _interface(folder: Path) -> Facts:
    """The speed and the vendor of a network interface: `{'gbit': 100.0, 'vendor': '0x15b3'}`."""
    speed = file_text(folder / "speed").strip()  # in Mbit/s; -1: unknown
    gbit = int(speed) / 1000 if speed.isdigit() else None
    return {"gbit": gbit, "vendor": file_text(folder / "device" / "vendor").strip() or None}


def _plugin(library_path: str) -> str | None:
    """The path of the first network plugin of NCCL."""
    folders = [*filter(None, library_path.split(":")), *PLUGIN_FOLDERS]
    for folder in folders:
        for name in NCCL_PLUGINS:
            file = Path(folder, name)
            if file.is_file():
                return str(file)

    return None


# Network and folders


def _network_facts(resolving: Future[list[str]], environment: Environment) -> Facts:
    """`addresses` of the host's own name, or a `name_error`; its interfaces, and which gloo and
    NCCL would use."""
    addresses: list[str] = []
    name_error = ""
    is_gloo_blocked = False
    try:
        addresses = resolving.result(NAME_TIMEOUT_S)
    except TimeoutError:
        name_error = f"no answer within {NAME_TIMEOUT_S:g} s"
        # it resolves the name as well
        is_gloo_blocked = not environment.get(GLOO_VARIABLE)
    except OSError as error:
        name_error = error.strerror or str(error)

    host_interfaces = interfaces()
    gloo = None if is_gloo_blocked else gloo_interface(host_interfaces, environment)
    nccl = nccl_interface(host_interfaces, environment)

    return {
        "addresses": addresses,
        "name_error": name_error,
        "interfaces": [
            {**asdict(interface), "ipv6": list(interface.ipv6)} for interface in host_interfaces
        ],
        "gloo_interface": gloo.name if gloo else None,
        "nccl_interface": nccl.name if nccl else None,
    }


def _folder_facts(facts: Future[Any], folder: str | None, deadline: float) -> Any:
    """The facts, or why they are missing: a call to a file server that is down never returns."""
    left = max(0.05, deadline - time.monotonic())
    try:
        return facts.result(left)
    except TimeoutError:
        reason = f"no answer within {left:.2g} s"
    except OSError as error:
        reason = error.strerror or str(error)

    return {"folder": folder, "unreachable": reason}


def disk_facts(folder: Path) -> Facts:
    """The disk of the folder, or of where it will be created; `error`: why nothing can be written
    there."""
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent

    refusal = ""
    try:
        # it has no name, and is deleted at once
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"drumline doctor")
    except OSError as error:
        refusal = error.strerror or str(error)

    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    return {
        "folder": str(folder),
        "parent": str(parent),
        **_space(parent),
        "error": refusal,
        "file_system": file_system_of(parent, mounts),
    }


def file_system_of(folder: Path, mounts: str) -> str:
    """`ext4`, `nfs4`, ...: the type of the nearest mount above the folder. A line of `mounts`:

    server:/export /data nfs4 rw,relatime,vers=4.2 0 0
    """
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
