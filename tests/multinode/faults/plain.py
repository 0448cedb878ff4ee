"""The same faults under plain torchrun, with a script without Drumline: what is reported, about
which rank, how soon.

It gets some seconds, not the half hour that it would take: what was not said by then is told as
"nothing".
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.multinode import processes
from tests.multinode.faults import reading
from tests.multinode.faults.catalogue import EVERY, HOSTS, RANKS_PER_HOST, Case
from tests.multinode.faults.host_faults import HostFault
from tests.multinode.faults.inject import fired_at
from tests.multinode.faults.matrix import END_S, HERE, Matrix, notes_of, remove_control_group
from tests.multinode.job import Job

CAP_S = 30.0
# `failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: ...`, and in the summary `rank : 3
# (local_rank: 1)`.
NAMES_LOCAL = re.compile(r"failed \(exitcode: .*?\) local_rank: (\d+)")
NAMES_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank", re.MULTILINE)
# A rank's own traceback, which torch marks.
NAMES_ITSELF = re.compile(r"^\[rank(\d+)\]: (?!Traceback)\w*(?:Error|Exception)", re.MULTILINE)


@dataclass
class PlainResult:
    """What plain torchrun made of a case."""

    fault: str
    seed: int
    said_s: float | None = None
    """From the fault to the first new line on any screen."""
    named: list[int] = field(default_factory=list)
    """Ranks that were said to have failed, in the order in which they were named on the screens of
    a, then b."""
    names_only_the_right_one: bool = False
    new_step_s: float | None = None
    text: str = ""
    problems: list[str] = field(default_factory=list)


def run_plain(matrix: Matrix, case: Case, *, cap_s: float = CAP_S) -> PlainResult:
    """A case, watched for `cap_s` seconds from its fault on."""
    folder = matrix.new_folder(case)
    result = PlainResult(case.name, case.seed)
    jobs = [_start(matrix, case, folder, node) for node in range(len(HOSTS))]
    notes = notes_of(case, folder)
    host_fault = HostFault(matrix.bed, case, notes)
    try:
        _watch(folder, notes, jobs, host_fault, cap_s, result)
    except AssertionError as error:
        result.problems.append(str(error))
    finally:
        host_fault.repair()
        _end(matrix, notes)
    _judge(case, jobs, result)
    return result


def _start(matrix: Matrix, case: Case, folder: Path, node: int) -> Job:
    endpoint = f"{matrix.bed.hosts[0].address}:{28000 + matrix.count}"
    where = (
        "--nnodes",
        str(len(HOSTS)),
        "--nproc-per-node",
        str(RANKS_PER_HOST),
        "--node-rank",
        str(node),
    )
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "plain")
    host = matrix.bed.hosts[node]
    return host.start(
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            *where,
            *meeting,
            "--local-addr",
            host.address,
        ),
        *("--max-restarts", "3", "--", str(HERE / "plain_script.py")),
        *(str(folder), str(case.fault.steps), str(EVERY)),
        cwd=folder,
        # Without it more than half of torchrun's restarts under gloo are lost, whatever the fault.
        env={**matrix.environment(folder), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def _watch(
    folder: Path,
    notes: Path,
    jobs: list[Job],
    host_fault: HostFault,
    cap_s: float,
    result: PlainResult,
) -> None:
    def has_struck() -> bool:
        host_fault.poll()
        return fired_at(notes) is not None or not any(job.is_running() for job in jobs)

    processes.wait_until(has_struck, "the fault", timeout_s=END_S)
    fired = fired_at(notes)
    assert fired is not None, "it ended before the fault struck"
    before = [len(job.text()) for job in jobs]
    while time.time() < fired + cap_s and any(job.is_running() for job in jobs):
        if result.said_s is None and [len(job.text()) for job in jobs] != before:
            result.said_s = time.time() - fired
        new = reading.again(reading.steps_of(folder, folder), fired).first_new_step
        if new is not None:
            result.new_step_s = new - fired
            return
        time.sleep(0.02)


def _end(matrix: Matrix, notes: Path) -> None:
    while pids := [
        pid for host in matrix.bed for pid in host.space.pids() if processes.command(pid)
    ]:
        processes.send(pids, signal.SIGKILL)
        time.sleep(0.05)
    remove_control_group(notes)
    for host in matrix.bed:
        for left in Path(f"/proc/{host.space.pid}/root/dev/shm").iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def _judge(case: Case, jobs: list[Job], result: PlainResult) -> None:
    for node, job in enumerate(jobs):
        text = job.text()
        named = [node * RANKS_PER_HOST + int(match[1]) for match in NAMES_LOCAL.finditer(text)]
        named += [int(match[1]) for match in NAMES_RANK.finditer(text)]
        named += [int(match[1]) for match in NAMES_ITSELF.finditer(text)]
        result.named += [rank for rank in dict.fromkeys(named) if rank not in result.named]
        result.text += f"--- {HOSTS[node]}\n{text[-4000:]}\n"
    result.names_only_the_right_one = case.fault.names == "rank" and result.named == [case.rank]
