"""The processes of one host's ranks: each prints one line, and none is left, even when this process
is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Annotated, Literal

from msgspec import Meta

from drumline.base.text import memory_size, plural, signal_name
from drumline.launch.node import guard
from drumline.net.interfaces import LOOPBACK
from drumline.tools.doctor.finding import Finding, JsonObject
from drumline.tools.doctor.pairs.probe import Port

PROGRAM = ("-m", "drumline.tools.doctor.ranks.doctor_rank")
# How long ranks wait for each other in one collective before they report.
PHASE_LIMIT_S = 15.0
# How long the others may take to report which rank they wait for, after the first has failed.
AFTER_FAILURE_S = 12.0
# Of its end, which has the result or the error.
MAX_OUTPUT_BYTES = 1 << 18
POLL_S = 0.05
MAX_ERROR_LETTERS = 600
Backend = Literal["auto", "gloo", "nccl"]
RankOutcome = JsonObject
"""What a rank has printed, or how its process has ended."""


@dataclass(frozen=True)
class HostRanks:
    """Which ranks of the group run on this host, and where the rendezvous is.

    The second of two hosts with 8 GPUs each has `first_rank` 8, `num_procs` 8 and `world_size` 16.
    """

    first_rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    num_procs: Annotated[int, Meta(ge=1, le=1024)]
    world_size: Annotated[int, Meta(ge=1)]
    address: str
    port: Port
    limit_s: Annotated[float, Meta(ge=1.0, le=600.0)]
    backend: Backend = "auto"

    def variables(self, local_rank: int) -> dict[str, str]:
        """As torchrun sets them."""
        return {
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_procs),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            # Variables of another launcher belong to another group.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
        }


class RankProcesses:
    """The ranks of this host: started together, ended together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_over = False

    def run(self, ranks: HostRanks, environment: Mapping[str, str]) -> list[RankOutcome]:
        """For each rank `result`, what it printed, or None and an `error`; no process is left when
        this returns."""
        job = guard.new_job()
        watcher = guard.Guard(job, 0)

        with contextlib.ExitStack() as stack:
            stack.callback(watcher.close, has_succeeded=True)
            stack.callback(self.kill)

            outputs = []
            for number in range(ranks.num_procs):
                out = stack.enter_context(tempfile.TemporaryFile())
                # Apart: what NCCL has printed may be written after the traceback.
                err = stack.enter_context(tempfile.TemporaryFile())
                variables = {**environment, **ranks.variables(number), guard.JOB_ENV: job}
                self._start(ranks, variables, out, err)
                outputs.append((out, err))

            self._wait(ranks, [out for out, _ in outputs])
            codes = [process.poll() for process in self._running]  # None: it hangs
            self.kill()

            outcomes = []
            for rank, (out, err) in enumerate(outputs, start=ranks.first_rank):
                code = codes[rank - ranks.first_rank]
                outcome = _outcome(code, _text(out), _text(err), ranks.limit_s)
                outcomes.append({"rank": rank, **outcome})

            return outcomes

    def kill(self) -> None:
        """Kill the running processes, and start no more."""
        with self._lock:
            self._is_over = True
            for process in self._running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _start(
        self, ranks: HostRanks, environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> None:
        """Start a rank, unless the ranks were killed meanwhile."""
        with self._lock:
            if self._is_over:
                return

            process = subprocess.Popen(
                [sys.executable, *PROGRAM, ranks.backend, str(PHASE_LIMIT_S)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            self._running.append(process)

    def _wait(self, ranks: HostRanks, outputs: Sequence[IO[bytes]]) -> None:
        """Wait until all have exited, or time is up. After the first failure, wait only for ranks
        without a finding."""
        deadline = time.monotonic() + ranks.limit_s

        has_failed = False
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self._running]
            running = [number for number, code in enumerate(codes) if code is None]
            awaited = {ranks.first_rank + number for number in running}

            if any(codes):
                if not has_failed:
                    has_failed = True
                    deadline = min(deadline, time.monotonic() + PHASE_LIMIT_S + AFTER_FAILURE_S)

                # Only the output of ranks that have exited: a running rank shares its file position
                # with us.
                for number in set(range(len(codes))) - set(running):
                    result = read_result(_text(outputs[number]))
                    if result is not None:
                        awaited -= {finding.get("rank") for finding in result["findings"]}

            if not awaited:
                return

            time.sleep(POLL_S)


def read_result(text: str) -> JsonObject | None:
    """The line of a rank, found in the output of NCCL and torch.

    {"rank": 0, "host": "gpu-01", "ok": true, "findings": [], "numbers": {"world_size": 2, ...}}
    """
    for line in reversed(text.splitlines()):
        try:
            result = json.loads(line)
        except ValueError:
            continue

        if isinstance(result, dict) and "findings" in result:
            return result

    return None


def _text(output: IO[bytes]) -> str:
    """The end of what a rank printed."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - MAX_OUTPUT_BYTES))
    return output.read().decode(errors="replace")


def _outcome(code: int | None, out: str, err: str, limit_s: float) -> RankOutcome:
    """The result of a rank, or how its process ended.

    {'code': 0, 'result': {...}}
    {'code': -9, 'result': None, 'error': 'killed by SIGKILL'}
    """
    if (result := read_result(out)) is not None:
        return {"code": code, "result": result}

    if code is None:
        error = f"still running after {limit_s:g} s"
    elif code < 0:
        error = f"killed by {signal_name(-code)}"
    else:
        error = f"exited with code {code}"

    lines = err.strip().splitlines()
    last_line = f": {lines[-1].strip()[:MAX_ERROR_LETTERS]}" if lines else ""
    return {"code": code, "result": None, "error": error + last_line}


CPU_PROCS = 2
LOCAL_LIMIT_S = 120.0


def local_collectives(
    procs: int | None,
    *,
    environment: Mapping[str, str],
    num_gpus: int,
    backend: Backend,
) -> tuple[list[Finding], Mapping[str, float]]:
    """Findings and numbers of `procs` ranks on this machine; by default one per GPU that torch
    sees, or two.

    NCCL needs a GPU per rank: 4 ranks, and torch sees 2 GPUs
    """
    on_gpus = backend == "nccl" or (backend == "auto" and num_gpus > 0)
    usual_ranks = max(1, num_gpus) if on_gpus else CPU_PROCS
    num_ranks = procs or usual_ranks
    host = socket.gethostname()

    if on_gpus and num_ranks > num_gpus:
        what = f"NCCL needs a GPU per rank: {plural(num_ranks, 'rank')}, and torch sees {plural(num_gpus, 'GPU')}"
        fix = f"--procs {num_gpus}, or --backend gloo" if num_gpus else "--backend gloo"
        return [Finding("problem", "collectives", host, what, fix)], {}

    with socket.create_server((LOOPBACK, 0)) as free:
        port = free.getsockname()[1]

    ranks = HostRanks(0, num_ranks, num_ranks, LOOPBACK, port, LOCAL_LIMIT_S, backend)
    outcomes = [{"host": host, **outcome} for outcome in RankProcesses().run(ranks, environment)]
    return collective_findings(outcomes, {}), measured(outcomes)


def collective_findings(outcomes: Sequence[RankOutcome], names: Mapping[str, str]) -> list[Finding]:
    """The ranks' findings, each once, and the ranks that printed nothing and have no finding.

    `names`: the user's name for each host, by its host name.

    A rank that another one names as blocked has a finding, though it printed nothing itself.
    """
    findings = []
    for result in _results(outcomes):
        for entry in result["findings"]:
            where = names.get(entry["where"], entry["where"])
            findings.append(Finding(**{**entry, "where": where}))

    explained = {finding.rank for finding in findings}

    for outcome in outcomes:
        rank = outcome["rank"]
        host = outcome["host"]
        if outcome.get("result") is None and rank not in explained:
            what = f"rank {rank} gave no result: {outcome.get('error')}"
            fix = f"run python -c 'import torch.distributed' on {host}"
            findings.append(Finding("problem", "collectives", host, what, fix, rank))

    return list(dict.fromkeys(findings))


def measured(outcomes: Sequence[RankOutcome]) -> Mapping[str, float]:
    """The numbers of the first rank that has some; empty when none has."""
    for result in _results(outcomes):
        if result.get("numbers"):
            numbers: Mapping[str, float] = result["numbers"]
            return numbers

    return {}


def collectives_line(outcomes: Sequence[RankOutcome]) -> str:
    """`collectives: 4 ranks, all values right; all_reduce of 4 MiB at 1.2 GB/s, ...`."""
    results = _results(outcomes)
    is_right = len(results) == len(outcomes) and not any(result["findings"] for result in results)
    state = "all values right" if is_right else "some checks failed"
    parts = [f"{plural(len(outcomes), 'rank')}, {state}", numbers_text(measured(outcomes))]

    return f"collectives: {'; '.join(filter(None, parts))}"


def numbers_text(numbers: Mapping[str, float]) -> str:
    """`all_reduce of 4 MiB at 1.2 GB/s, the smallest in 80 us`; empty when nothing was measured."""
    if not numbers:
        return ""

    size = memory_size(int(numbers["all_reduce_bytes"]))
    rate = numbers["all_reduce_gb_per_s"]
    smallest = f"the smallest in {numbers['all_reduce_latency_us']:.0f} us"
    if not rate:  # a single rank sends nothing
        return f"all_reduce: {smallest}"

    return f"all_reduce of {size} at {rate:.3g} GB/s, {smallest}"


def _results(outcomes: Sequence[RankOutcome]) -> list[JsonObject]:
    """Of the ranks that printed one."""
    return [outcome["result"] for outcome in outcomes if outcome.get("result") is not None]
