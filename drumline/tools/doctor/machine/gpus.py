"""GPUs, driver and the processes on the GPUs, from nvidia-smi, with a time limit because the driver
may hang.

It lists all GPUs, regardless of CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import contextlib
import csv
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from drumline.base.text import MIB

GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
DRIVER_FOLDER = Path("/proc/driver/nvidia")


class NvidiaSmi:
    """Started at once, in parallel: without persistence mode the driver takes seconds to start."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        program = shutil.which("nvidia-smi", path=environment.get("PATH"))
        queries = (
            f"--query-gpu={','.join(GPU_FIELDS)}",
            f"--query-compute-apps={','.join(PROCESS_FIELDS)}",
        )
        self._processes = [
            subprocess.Popen(
                [program, query, "--format=csv,noheader,nounits"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
            )
            for query in queries
            if program
        ]

    def facts(self, timeout_s: float) -> dict[str, Any]:
        """`driver`, `gpus`, and a `gpu_error` where nvidia-smi failed."""
        from_kernel = _known_to_kernel()
        if not self._processes:
            return {
                **from_kernel,
                "gpu_error": "nvidia-smi is not on the PATH" if from_kernel["driver"] else "",
            }
        deadline = time.monotonic() + timeout_s
        gpus, processes = (_output(process, deadline) for process in self._processes)
        if gpus is None:
            return {
                **from_kernel,
                "gpu_error": f"nvidia-smi did not answer within {timeout_s:.1f} s",
            }
        if self._processes[0].returncode == 0:
            return read_nvidia_smi(gpus, processes or "")
        has_none = "No devices" in gpus
        first_line = (gpus.strip() or "no output").splitlines()[0]
        return {**from_kernel, "gpu_error": "" if has_none else f"nvidia-smi failed: {first_line}"}


def _known_to_kernel() -> dict[str, Any]:
    """In nvidia-smi's place, which without persistence mode may be too slow: no memory and no
    processes."""
    driver = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", file_text(DRIVER_FOLDER / "version"))
    files = sorted(DRIVER_FOLDER.glob("gpus/*/information"))
    details = [
        dict(re.findall(r"(?m)^(Model|GPU UUID):\s*(.*)$", file_text(file))) for file in files
    ]
    unknown: dict[str, Any] = {"memory_bytes": None, "used_bytes": None, "processes": []}
    gpus = [
        {"index": index, "uuid": gpu.get("GPU UUID", "?"), "name": gpu.get("Model", "?"), **unknown}
        for index, gpu in enumerate(details)
    ]
    return {"driver": driver[1] if driver else None, "gpus": gpus}


def read_nvidia_smi(gpus: str, processes: str) -> dict[str, Any]:
    """From its two outputs, in CSV without a header and units."""
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
    return {"driver": driver, "gpus": listed, "gpu_error": ""}


def _process(row: Mapping[str, str]) -> dict[str, Any]:
    # Only the program's name: arguments may contain secrets.
    words = row["process_name"].split()
    name = PurePath(words[0]).name if words and not words[0].startswith("[") else "?"
    return {"pid": _number(row["pid"]), "name": name, "memory_bytes": _mib(row["used_memory"])}


def _rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _mib(text: str) -> int | None:
    """None for `[N/A]`."""
    value = _number(text)
    return None if value is None else value * MIB


def _output(process: subprocess.Popen[str], deadline: float) -> str | None:
    """None when it has not exited by then."""
    try:
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        process.kill()
    # It may hang in the driver, where no signal reaches it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=0.2)
    return None


def file_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""
