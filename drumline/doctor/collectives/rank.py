"""One rank of the doctor's last question: do collectives give the right values, does DDP keep replicas in step?

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=... MASTER_PORT=... python -m drumline.doctor.collectives.rank

Started once per GPU, or per process on machines without. Whatever happens, each rank prints one line of JSON: what
it found, and the bandwidth it measured. It exits with 0, or with 3 when something must be mended.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from drumline.config.schema import WatchConfig
from drumline.doctor.collectives.examination import check_everything
from drumline.doctor.collectives.exchange import Exchange
from drumline.doctor.collectives.timekeeper import UNCONNECTED, Timekeeper
from drumline.doctor.finding import Finding, has_problems
from drumline.errors import DrumlineError, ExitCode
from drumline.manager import DDPManager

BACKENDS = ("auto", "gloo", "nccl")
DEVICES = {"auto": "auto", "gloo": "cpu", "nccl": "cuda"}
START_TIMEOUT_S = 60.0
LIMIT_S = 15.0
# Torch's own timeouts name nobody, so they come last.
AFTER_OURS_S = 60.0
# Rank 0 runs the store in which the others look for whom to blame, and whoever ends takes its connections along.
LINGER_S = 3.0
GRACE_AFTER_START_S = 10.0


class Rank:
    """What one rank finds out, and tells once."""

    def __init__(self, ddp: DDPManager, *, tell: Callable[[str], None] = print) -> None:
        self.ddp = ddp
        self.findings: list[Finding] = []
        self.numbers: dict[str, float] = {}
        self._tell = tell
        self._once = threading.Lock()

    def wrong(self, what: str, fix: str) -> None:
        """Something that this rank saw."""
        what = f"rank {self.ddp.rank} on {self.ddp.host}: {what}"
        self.findings.append(
            Finding(level="problem", check="collectives", where=self.ddp.host, what=what, fix=fix)
        )

    def tell(self) -> ExitCode:
        """The one line. Whoever comes second, of the rank and its timer, waits for the end that the first brings."""
        self._once.acquire()
        is_wrong = has_problems(self.findings)
        result = {
            "rank": self.ddp.rank,
            "host": self.ddp.host,
            "ok": not is_wrong,
            "findings": [finding.as_json() for finding in self.findings],
            "numbers": self.numbers,
        }
        self._tell(json.dumps(result))
        return ExitCode.PREFLIGHT_FAILED if is_wrong else ExitCode.SUCCESS

    def give_up(self, findings: list[Finding]) -> None:
        """A phase did not end, so neither would this process."""
        self.findings += findings
        code = self.tell()
        sys.stdout.flush()
        time.sleep(LINGER_S)
        os._exit(code)


def examine(
    rank: Rank,
    timekeeper: Timekeeper,
    *,
    start_timeout_s: float,
    make_exchange: Callable[[torch.device], Exchange],
) -> None:
    """Collective: meet, then everything that can be checked; what is wrong is with the rank afterwards."""
    ddp = rank.ddp
    try:
        with timekeeper.phase("the meeting of all ranks", limit_s=start_timeout_s + GRACE_AFTER_START_S):
            is_joined = ddp.setup()
    except DrumlineError as error:
        rank.wrong(*_refusal(ddp, error))
        return
    except (dist.DistError, RuntimeError) as error:
        rank.wrong(f"the ranks could not be connected: {_reason(error)}", UNCONNECTED)
        return
    if not is_joined or ddp.store is None:
        rank.wrong("there is no RANK in the environment", "start it by way of drumline doctor --collectives")
        return
    timekeeper.joined(ddp.store, rank=ddp.rank, world_size=ddp.world_size, host=ddp.host)
    try:
        rank.numbers = check_everything(ddp, timekeeper, make_exchange(ddp.device), rank.wrong)
    except (DrumlineError, dist.DistError, RuntimeError) as error:
        rank.wrong(f"{timekeeper.current} failed: {_reason(error)}", "look at the rank that ended first")


def _refusal(ddp: DDPManager, error: DrumlineError) -> tuple[str, str]:
    """Why the ranks did not meet; too many for the GPUs is the doctor's own question, with its own flags."""
    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus <= ddp.get_local_rank():
        what = f"NCCL takes one rank per GPU, and this host has {num_gpus} for {ddp.local_world_size} ranks"
        return what, f"--procs {num_gpus}, or --backend gloo"
    return error.what, error.next_step or "look at the other ranks' findings"


def _reason(error: BaseException) -> str:
    """The line that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Duplicate GPU" in line]
    return (telling or lines or [type(error).__name__])[0]


def options_from(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m drumline.doctor.collectives.rank", allow_abbrev=False)
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="gloo on CPUs, nccl on GPUs")
    parser.add_argument(
        "--start-timeout-s", type=float, default=START_TIMEOUT_S, help="for all ranks to meet"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for each collective")
    return parser.parse_args(argv)


def main(argv: Sequence[str], *, make_exchange: Callable[[torch.device], Exchange] = Exchange) -> int:
    """One rank, from start to end."""
    options = options_from(argv)
    # DDP loads torch's compiler when first used, which takes seconds: not within a phase that others wait in.
    import torch._dynamo  # noqa: F401

    ddp = DDPManager(
        watch=WatchConfig(sidecar="off"),  # the doctor's own timekeeper knows better what takes too long
        device=DEVICES[options.backend],
        backend=options.backend,
        start_timeout_s=options.start_timeout_s,
        train_timeout_s=options.limit_s + AFTER_OURS_S,
    )
    rank = Rank(ddp)
    timekeeper = Timekeeper(limit_s=options.limit_s, place=ddp.place, on_late=rank.give_up)
    examine(rank, timekeeper, start_timeout_s=options.start_timeout_s, make_exchange=make_exchange)
    code = rank.tell()
    sys.stdout.flush()
    # All was told; a group that cannot part must not undo that.
    parting = threading.Timer(LINGER_S, os._exit, [code])
    parting.daemon = True
    parting.start()
    ddp.cleanup(broken=code != ExitCode.SUCCESS)
    parting.cancel()
    return code


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(exit_code)
