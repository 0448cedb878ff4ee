"""One rank of `drumline train`: torch is imported here, and a failure is told here, by the rank that failed first."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from drumline.config import PRESETS, Layers, resolve
from drumline.distributed.failure import claim_failure
from drumline.engine.output import describe_failure, screen
from drumline.engine.saving import Progress
from drumline.engine.train import Request, train
from drumline.errors import DrumlineError, ExitCode
from drumline.launch.local import INTERRUPTED
from drumline.manager import DDPManager
from drumline.tasks.load import load_task


def run_rank(task: str, layers: Layers, *, folder: Path, fresh: bool, argv: Sequence[str]) -> int:
    """Train as one rank of a group, or alone; returns the exit code."""
    task_class = load_task(task)
    preset = PRESETS.get(task)
    config = resolve(layers, preset.defaults if preset else task_class.defaults, task=task_class.__name__)
    dist = config.dist
    ddp = DDPManager(
        device=dist.device,
        backend=dist.backend,
        start_timeout_s=dist.start_timeout_s,
        train_timeout_s=dist.train_timeout_s,
        seed=config.train.seed,
    )
    progress = Progress()
    try:
        ddp.setup()
        train(Request(task, config, folder, fresh, tuple(argv)), task_class, ddp, progress)
    except KeyboardInterrupt:
        if ddp.store is None:  # among several ranks the launcher says so, once
            print(INTERRUPTED, file=sys.stderr)
        _end_now(ExitCode.INTERRUPTED)
    except Exception as error:
        _tell(error, ddp, progress)
        _end_now(error.exit_code if isinstance(error, DrumlineError) else ExitCode.TRAINING_FAILED)
    ddp.cleanup()
    return ExitCode.SUCCESS


def _tell(error: Exception, ddp: DDPManager, progress: Progress) -> None:
    place = ddp.place(progress.step or None)
    first = claim_failure(ddp.store, place, error)
    diverted = screen() is not sys.stderr
    if first is None:
        print(describe_failure(error, place), file=screen(), end="", flush=True)
    else:
        print(f"drumline: {place} stopped, because {first[0]} failed first: {first[1]}", file=sys.stderr)
    if diverted:
        traceback.print_exception(error)  # into this rank's own log file


def _end_now(code: ExitCode) -> None:
    """The group is broken: taking it down in order would wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
