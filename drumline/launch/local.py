"""Starts the ranks of one machine, through torchrun's own elastic agent, and says how they ended.

The agent supervises: when one rank fails it ends the others. What went wrong was already told by the rank that
failed; here only what a rank could not tell itself (killed by a signal) is added.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from drumline.errors import ExitCode

LOOPBACK = "127.0.0.1"
INTERRUPTED = "drumline: interrupted; the same command goes on from the last checkpoint"


def default_procs() -> int:
    """One rank per GPU, or one on a machine without."""
    import torch

    return max(1, torch.cuda.device_count())


def run_ranks(num_procs: int, arguments: Sequence[str], *, log_dir: Path) -> ExitCode:
    """Run `python -m drumline ARGUMENTS` on `num_procs` ranks of this machine, to the end."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent would add its own table and traceback below ours.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    # Several ranks that each take all cores would only fight for them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_procs)))
    with tempfile.TemporaryDirectory(prefix="drumline-agent-") as scratch:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_procs,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{LOOPBACK}:0",
            local_addr=LOOPBACK,
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "drumline", *arguments)
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            return _explain(rank, failure.exitcode, log_dir)
        except (SignalException, KeyboardInterrupt):
            print(INTERRUPTED, file=sys.stderr)
            return ExitCode.INTERRUPTED
    return ExitCode.SUCCESS


def _explain(rank: int, exit_code: int, log_dir: Path) -> ExitCode:
    if exit_code < 0:
        log = log_dir / f"rank-{rank:05d}.log"
        hint = f"\n  next: see {log}" if log.exists() else ""
        name = signal.Signals(-exit_code).name
        print(f"drumline: rank {rank} was ended by {name}; the others were stopped{hint}", file=sys.stderr)
        return ExitCode.TRAINING_FAILED
    return ExitCode(exit_code) if exit_code in list(ExitCode) else ExitCode.TRAINING_FAILED
