"""What a machine is, as plain JSON: what `drumline doctor` shows, judges (`machine.py`) and compares with other hosts
(`compare.py`). Nothing heavy is imported and nothing is changed; slow questions are asked side by side."""

from __future__ import annotations

import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.doctor.code_hash import code_facts
from drumline.doctor.dataset import data_facts
from drumline.doctor.gpus import GpuQuestion
from drumline.doctor.own_network import NetworkQuestion
from drumline.doctor.packages import installed_packages, torch_facts
from drumline.doctor.question import Question
from drumline.doctor.system import (
    clock_facts,
    cpu_facts,
    disk_facts,
    memory_facts,
    open_file_facts,
    shared_memory_facts,
)
from drumline.doctor.variables import VISIBLE_GPUS, shown_variables

# All of it is to take under two seconds, so that is what the slowest question gets.
TIME_LIMIT_S = 1.8


def machine_facts(
    environment: Mapping[str, str],
    *,
    run_folder: Path,
    code: Path | None = None,
    data: Path | None = None,
    shm_need: int | None = None,
) -> dict[str, Any]:
    """Everything about this machine. `shm_need`: bytes of shared memory that the job is known to need."""
    deadline = time.monotonic() + TIME_LIMIT_S
    gpus = GpuQuestion(environment)
    network = NetworkQuestion(environment)
    disk = Question(lambda: disk_facts(run_folder))
    skip = [path for path in (run_folder, data) if path is not None]
    code_found = None if code is None else Question(lambda: code_facts(code, skip=skip))
    data_found = None if data is None else Question(lambda: data_facts(data))
    packages = installed_packages()
    return {
        "host": socket.gethostname(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "executable": sys.executable,
        **torch_facts(packages),
        "memory": memory_facts(),
        "cpus": cpu_facts(),
        "shm": shared_memory_facts(shm_need),
        "open_files": open_file_facts(),
        "threads": environment.get("OMP_NUM_THREADS"),
        "visible_gpus": environment.get(VISIBLE_GPUS),
        "variables": shown_variables(environment),
        "packages": packages,
        **network.answer(),
        **gpus.answer(_left(deadline)),
        "disk": _folder_facts(disk, run_folder, deadline),
        "code": None if code is None or code_found is None else _folder_facts(code_found, code, deadline),
        "data": None if data is None or data_found is None else _folder_facts(data_found, data, deadline),
        "clock": clock_facts(),
    }


def _folder_facts(question: Question[dict[str, Any]], folder: Path, deadline: float) -> dict[str, Any]:
    """A folder on a file server that is gone answers never."""
    try:
        return question.answer(_left(deadline))
    except (OSError, TimeoutError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return {"folder": str(folder), "silent": reason}


def _left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())
