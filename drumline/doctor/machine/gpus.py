"""The GPUs of this machine, its driver, and who computes on them: asked of nvidia-smi, which can be given up on when
the driver hangs. It shows all GPUs, whatever CUDA_VISIBLE_DEVICES says."""

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

GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")
KERNEL = Path("/proc/driver/nvidia")
MIB = 1 << 20


class GpuQuestion:
    """Asked at once, beside everything else: without persistence mode the driver takes seconds to wake up."""

    def __init__(self, environment: Mapping[str, str], *, kernel: Path = KERNEL) -> None:
        self._kernel = kernel
        program = shutil.which("nvidia-smi", path=environment.get("PATH"))
        self._asked = (
            [
                _ask(program, f"--query-gpu={','.join(GPU_FIELDS)}"),
                _ask(program, f"--query-compute-apps={','.join(PROCESS_FIELDS)}"),
            ]
            if program
            else []
        )

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """`driver`, `gpus`, and the `trouble` in a sentence if there is any."""
        known = kernel_answer(self._kernel)
        if not self._asked:
            return {**known, "trouble": "nvidia-smi is not on the PATH" if known["driver"] else ""}
        deadline = time.monotonic() + timeout_s
        gpus, processes = (_text(process, deadline) for process in self._asked)
        if gpus is not None and self._asked[0].returncode == 0:
            return read_answer(gpus, processes or "")
        return {**known, "trouble": _trouble(gpus, timeout_s)}


def read_answer(gpus: str, processes: str) -> dict[str, Any]:
    """nvidia-smi's two answers, in CSV without a head line and units."""
    found = [_gpu(row) for row in _rows(gpus, GPU_FIELDS)]
    drivers = {row["driver_version"] for row in _rows(gpus, GPU_FIELDS)}
    for row in _rows(processes, PROCESS_FIELDS):
        for gpu in found:
            if gpu["uuid"] == row["gpu_uuid"]:
                gpu["processes"].append(_process(row))
    return {"driver": min(drivers, default=None), "gpus": found, "trouble": ""}


def _gpu(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "index": _number(row["index"]),
        "uuid": row["uuid"],
        "name": row["name"],
        "memory_bytes": _mib(row["memory.total"]),
        "used_bytes": _mib(row["memory.used"]),
        "processes": [],
    }


def _process(row: Mapping[str, str]) -> dict[str, Any]:
    # Only what the program is called: arguments may hold secrets.
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


def _ask(program: str, query: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, query, "--format=csv,noheader,nounits"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )


def _text(process: subprocess.Popen[str], deadline: float) -> str | None:
    """All it said; None when it has not ended by then."""
    try:
        return process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        process.kill()
    with contextlib.suppress(
        subprocess.TimeoutExpired
    ):  # it may hang in the driver, where no signal reaches it
        process.communicate(timeout=0.2)
    return None


def _trouble(said: str | None, timeout_s: float) -> str:
    if said is None:
        return f"nvidia-smi gave no answer within {timeout_s:.1f} s"
    if "No devices" in said:
        return ""
    return f"nvidia-smi failed: {said.strip().splitlines()[0] if said.strip() else 'no word'}"


def kernel_answer(kernel: Path) -> dict[str, Any]:
    """What the driver's files in /proc tell, for when nvidia-smi does not: no memory, and nobody who uses it."""
    driver = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", _read(kernel / "version"))
    found = []
    for index, folder in enumerate(sorted(kernel.glob("gpus/*"))):
        lines = [line.partition(":") for line in _read(folder / "information").splitlines()]
        values = {name: value.strip() for name, _, value in lines}
        known = {"index": index, "uuid": values.get("GPU UUID", "?"), "name": values.get("Model", "?")}
        found.append({**known, "memory_bytes": None, "used_bytes": None, "processes": []})
    return {"driver": driver[1] if driver else None, "gpus": found, "trouble": ""}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return ""
