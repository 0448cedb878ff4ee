"""The facts of one machine as plain JSON, judged by `machine_checks.py` and compared by `host_differences.py`.

Nothing heavy is imported and nothing is changed. What may be slow runs side by side, each with a time limit.
"""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.doctor.background import in_background, resolve_ipv4
from drumline.doctor.machine.folder_hashes import code_facts, data_facts
from drumline.doctor.machine.gpus import NvidiaSmi
from drumline.doctor.machine.known_variables import VISIBLE_GPUS, shown_variables
from drumline.doctor.machine.system import (
    clock_facts,
    cpu_facts,
    disk_facts,
    installed_packages,
    memory_facts,
    open_file_facts,
    shared_memory_facts,
    torch_facts,
)
from drumline.net.interfaces import GLOO_VARIABLE, gloo_interface, interfaces, nccl_interface

# All of it takes under two seconds, so that is the limit of the slowest part.
TIME_LIMIT_S = 1.8
NAME_TIMEOUT_S = 1.0


def machine_facts(
    environment: Mapping[str, str], *, run_folder: Path, code: Path | None = None, data: Path | None = None
) -> dict[str, Any]:
    """Everything about this machine, and about the folders of the run on it."""
    deadline = time.monotonic() + TIME_LIMIT_S
    gpus = NvidiaSmi(environment)
    host = socket.gethostname()
    addresses = in_background(lambda: resolve_ipv4(host))
    disk = in_background(lambda: disk_facts(run_folder))
    skip = [path for path in (run_folder, data) if path is not None]
    code_found = in_background(lambda: None if code is None else code_facts(code, skip=skip))
    data_found = in_background(lambda: None if data is None else data_facts(data))
    packages = installed_packages()
    return {
        "host": host,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "executable": sys.executable,
        **torch_facts(packages),
        "memory": memory_facts(),
        "cpus": cpu_facts(),
        "shm": shared_memory_facts(),
        "open_files": open_file_facts(),
        "threads": environment.get("OMP_NUM_THREADS"),
        "visible_gpus": environment.get(VISIBLE_GPUS),
        "variables": shown_variables(environment),
        "packages": packages,
        **_network_facts(addresses, environment),
        **gpus.facts(_left(deadline)),
        "disk": _folder_facts(disk, run_folder, deadline),
        "code": _folder_facts(code_found, code, deadline),
        "data": _folder_facts(data_found, data, deadline),
        "clock": clock_facts(),
    }


def _network_facts(resolving: Future[list[str]], environment: Mapping[str, str]) -> dict[str, Any]:
    """`addresses` of the host's own name, or a `name_error`; its interfaces, and which gloo and NCCL would use."""
    addresses: list[str] = []
    error, timed_out = "", False
    try:
        addresses = resolving.result(NAME_TIMEOUT_S)
    except TimeoutError:
        error, timed_out = f"no answer within {NAME_TIMEOUT_S:g} s", True
    except OSError as found:
        error = found.strerror or str(found)
    found_here = interfaces()
    # gloo resolves the name as well, and would block as long.
    is_known = not timed_out or environment.get(GLOO_VARIABLE)
    gloo = gloo_interface(found_here, environment) if is_known else None
    nccl = nccl_interface(found_here, environment)
    return {
        "addresses": addresses,
        "name_error": error,
        "interfaces": [{**asdict(one), "ipv6": list(one.ipv6)} for one in found_here],
        "gloo_interface": gloo.name if gloo else None,
        "nccl_interface": nccl.name if nccl else None,
    }


def _folder_facts(facts: Future[Any], folder: Path | None, deadline: float) -> Any:
    """A folder on a file server that is down never answers."""
    left = _left(deadline)
    try:
        return facts.result(left)
    except TimeoutError:
        reason = f"no answer within {left:.2g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    return {"folder": str(folder), "unreachable": reason}


def _left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())
