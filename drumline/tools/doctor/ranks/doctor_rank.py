"""One rank of the collectives: joins the others, runs the checks, and always prints one line of
JSON.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... \
        python -m drumline.tools.doctor.ranks.doctor_rank nccl 60

The arguments are the backend and how many seconds a collective may take.

It exits with 0, or with 3 when something must be fixed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from drumline.base.errors import DrumlineError, ExitCode
from drumline.config.schema import WatchConfig
from drumline.rank.torch_internals import load_compiler
from drumline.tools.doctor.finding import Finding, has_problems
from drumline.tools.doctor.ranks.collective_checks import Collectives, run_checks
from drumline.tools.doctor.ranks.phase_timer import NO_CONNECTION_FIX, PhaseTimer
from drumline.training.manager import RunManager

DEVICES = {"auto": "auto", "gloo": "cpu", "nccl": "cuda"}
START_TIMEOUT_S = 60.0
# torch's own timeouts name no rank, so they are longer.
AFTER_OURS_S = 60.0
# Rank 0 runs the store in which the others search for the rank that blocks them, so it exits last.
LINGER_S = 3.0
GRACE_AFTER_START_S = 10.0


class RankReport:
    def __init__(self, ddp: RunManager, *, write: Callable[[str], None] = print) -> None:
        self.ddp = ddp
        self.findings: list[Finding] = []
        self.numbers: dict[str, float] = {}
        self._write = write
        self._once = threading.Lock()

    def add(self, what: str, fix: str) -> None:
        rank = self.ddp.rank
        host = self.ddp.host
        what = f"rank {rank} on {host}: {what}"
        self.findings.append(Finding("problem", "collectives", host, what, fix, rank))

    def print(self) -> ExitCode:
        """Print the line. The rank and its timer may both call it: the second blocks until the
        first exits the process."""
        self._once.acquire()
        is_wrong = has_problems(self.findings)
        result = {
            "rank": self.ddp.rank,
            "host": self.ddp.host,
            "ok": not is_wrong,
            "findings": [finding.as_json() for finding in self.findings],
            "numbers": self.numbers,
        }
        self._write(json.dumps(result))
        return ExitCode.PREFLIGHT_FAILED if is_wrong else ExitCode.SUCCESS

    def give_up(self, findings: list[Finding]) -> None:
        """Called when a phase does not end: print the findings and exit."""
        self.findings += findings
        code = self.print()
        sys.stdout.flush()
        time.sleep(LINGER_S)
        os._exit(code)


def check_rank(
    report: RankReport,
    timer: PhaseTimer,
    make_collectives: Callable[[torch.device], Collectives] = Collectives,
) -> None:
    """Collective: join the others, then run all checks; what is wrong is in the report
    afterwards."""
    ddp = report.ddp
    try:
        with timer.phase("the rendezvous", limit_s=START_TIMEOUT_S + GRACE_AFTER_START_S):
            is_joined = ddp.setup()
    except DrumlineError as error:
        num_gpus = torch.cuda.device_count()
        if 0 < num_gpus <= ddp.get_local_rank():
            what = f"NCCL needs a GPU per rank, and this host has {num_gpus} for {ddp.local_world_size} ranks"
            report.add(what, f"--procs {num_gpus}, or --backend gloo")
        else:
            report.add(error.what, error.next_step or "read the other ranks' findings")
        return
    except (dist.DistError, RuntimeError) as error:
        report.add(f"the ranks could not connect: {_reason(error)}", NO_CONNECTION_FIX)
        return
    if not is_joined or ddp.connection.store is None:
        report.add(
            "RANK is not set in the environment", "start it with drumline doctor --collectives"
        )
        return
    timer.joined(ddp.connection.store, rank=ddp.rank, world_size=ddp.world_size, host=ddp.host)
    try:
        report.numbers = run_checks(ddp, timer, make_collectives(ddp.device), report.add)
    except (DrumlineError, dist.DistError, RuntimeError) as error:
        report.add(f"{timer.current} failed: {_reason(error)}", "find out which rank failed first")


def _reason(error: BaseException) -> str:
    """Its first line; for NCCL's errors, the one that follows `Last error:`."""
    text = (
        str(error).partition("Last error:")[2].strip() or str(error).strip() or type(error).__name__
    )
    return text.splitlines()[0].strip()


def main(argv: Sequence[str]) -> int:
    backend, limit_s = argv
    load_compiler()
    ddp = RunManager(
        watch=WatchConfig(sidecar="off"),  # PhaseTimer replaces it
        device=DEVICES[backend],
        backend=backend,
        start_timeout_s=START_TIMEOUT_S,
        train_timeout_s=float(limit_s) + AFTER_OURS_S,
    )
    report = RankReport(ddp)
    timer = PhaseTimer(limit_s=float(limit_s), place=ddp.place, on_late=report.give_up)
    check_rank(report, timer)
    code = report.print()
    sys.stdout.flush()
    # The result is printed; a group that cannot be destroyed must not change it.
    exit_timer = threading.Timer(LINGER_S, os._exit, [code])
    exit_timer.daemon = True
    exit_timer.start()
    ddp.cleanup(broken=code != ExitCode.SUCCESS)
    exit_timer.cancel()
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(exit_code)
