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
DRIVER = Path("/proc/driver/nvidia/version")
MIB = 1 << 20


class GpuQuestion:
    """Asked at once, beside everything else: without persistence mode the driver takes seconds to wake up."""

    def __init__(self, environment: Mapping[str, str]) -> None:
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
        driver = _loaded_driver()
        if not self._asked:
            trouble = "the driver is loaded, but nvidia-smi is not on the PATH" if driver else ""
            return {"driver": driver, "gpus": [], "trouble": trouble}
        deadline = time.monotonic() + timeout_s
        texts = [_text(process, deadline) for process in self._asked]
        if texts[0] is None:
            return {
                "driver": driver,
                "gpus": [],
                "trouble": f"nvidia-smi gave no answer within {timeout_s:g} s",
            }
        if self._asked[0].returncode != 0:
            lines = texts[0].strip().splitlines()
            trouble = (
                "" if "No devices" in texts[0] else f"nvidia-smi failed: {lines[0] if lines else 'no word'}"
            )
            return {"driver": driver, "gpus": [], "trouble": trouble}
        return read_answer(texts[0], texts[1] or "")


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
        text=True,
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


def _loaded_driver() -> str | None:
    """From the kernel, for when nvidia-smi does not tell."""
    try:
        found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else None
