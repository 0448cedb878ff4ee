"""Starts the collectives on this machine alone, and brings together what its ranks say; none of them outlives it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.doctor.finding import Finding

PROGRAM = ("-m", "drumline.doctor.collectives")
LOOPBACK = "127.0.0.1"
CPU_PROCS = 2
DEADLINE_S = 120.0
LIMIT_S = 15.0
# For the others to say whom they wait for, once the first has ended in trouble.
AFTER_TROUBLE_S = 12.0
POLL_S = 0.05


def local_collectives(
    procs: int | None,
    *,
    environment: Mapping[str, str],
    num_gpus: int,
    backend: str = "auto",
    limit_s: float = LIMIT_S,
    deadline_s: float = DEADLINE_S,
    program: Sequence[str] = PROGRAM,
) -> tuple[list[Finding], dict[str, float]]:
    """Run them on so many ranks (one per GPU that torch would see, or two); what they found, and measured."""
    on_gpus = backend == "nccl" or (backend == "auto" and num_gpus > 0)
    num_ranks = procs or (max(1, num_gpus) if on_gpus else CPU_PROCS)
    if on_gpus and num_ranks > num_gpus:
        return [_too_many(num_ranks, num_gpus)], {}
    words = [sys.executable, *program, "--backend", backend, "--limit-s", str(limit_s)]
    with tempfile.TemporaryDirectory(prefix="drumline-doctor-") as folder:
        texts, codes = _run(words, num_ranks, environment, Path(folder), limit_s, deadline_s)
    results = {rank: read_result(text) for rank, text in texts.items()}
    findings, numbers = merge_results(results)
    told = " ".join(finding.what for finding in findings)
    for rank, result in results.items():
        if result is None and f"rank {rank} " not in told:
            findings.append(_silent(rank, codes[rank], texts[rank], deadline_s))
    return findings, numbers


def read_result(text: str) -> dict[str, Any] | None:
    """A rank's line, among whatever else NCCL and torch have printed."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                result: dict[str, Any] = json.loads(line)
            except ValueError:
                continue
            if "findings" in result and "rank" in result:
                return result
    return None


def merge_results(results: Mapping[int, dict[str, Any] | None]) -> tuple[list[Finding], dict[str, float]]:
    """What all ranks found, each thing once, and what the first one measured."""
    told = [result for result in results.values() if result is not None]
    found = {(one["where"], one["what"]): one for result in told for one in result["findings"]}
    numbers: dict[str, float] = next((result["numbers"] for result in told if result["numbers"]), {})
    return [Finding(**one) for one in found.values()], numbers


def _run(
    words: Sequence[str],
    num_ranks: int,
    environment: Mapping[str, str],
    folder: Path,
    limit_s: float,
    deadline_s: float,
) -> tuple[dict[int, str], dict[int, int | None]]:
    """All ranks to their ends, or to the deadline; their output, and how they ended."""
    port = _free_port()
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(num_ranks):
            with (folder / str(rank)).open("wb") as output:
                processes[rank] = subprocess.Popen(
                    words,
                    env={**environment, **_rank_variables(rank, num_ranks, port)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        _wait(processes, folder, limit_s, deadline_s)
        codes = {rank: process.poll() for rank, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return {rank: _text(folder, rank) for rank in processes}, codes


def _wait(
    processes: Mapping[int, subprocess.Popen[bytes]], folder: Path, limit_s: float, deadline_s: float
) -> None:
    """Until all have ended. After the first that failed, only for those that nobody has blamed yet."""
    deadline = time.monotonic() + deadline_s
    seen_trouble = False
    while time.monotonic() < deadline:
        running = [rank for rank, process in processes.items() if process.poll() is None]
        if any(process.returncode for process in processes.values()):
            if not seen_trouble:
                seen_trouble = True
                deadline = min(deadline, time.monotonic() + limit_s + AFTER_TROUBLE_S)
            told = "".join(_text(folder, rank) for rank in processes if rank not in running)
            running = [rank for rank in running if f"rank {rank} on" not in told]
        if not running:
            return
        time.sleep(POLL_S)


def _text(folder: Path, rank: int) -> str:
    """What a rank has printed."""
    return (folder / str(rank)).read_text(errors="replace")


def _rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _too_many(num_ranks: int, num_gpus: int) -> Finding:
    host = socket.gethostname()
    return Finding(
        level="problem",
        check="collectives",
        where=host,
        what=f"{num_ranks} ranks cannot talk by NCCL here: it takes one rank per GPU, and torch sees {num_gpus}",
        fix=f"--procs {num_gpus}, or --backend gloo" if num_gpus else "--backend gloo",
    )


def _silent(rank: int, code: int | None, text: str, deadline_s: float) -> Finding:
    """Of a rank that ended without its line."""
    if code is None:
        how = f"was still at it after {deadline_s:g} s, and was ended"
    elif code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    else:
        how = f"ended with exit code {code}"
    lines = text.strip().splitlines()
    host = socket.gethostname()
    return Finding(
        level="problem",
        check="collectives",
        where=host,
        what=f"rank {rank} on {host} {how} without a result{f': {lines[-1]}' if lines else ''}",
        fix="run it by hand to see all of its output: python -m drumline.doctor.collectives, under torchrun",
    )
