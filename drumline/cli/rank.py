"""One rank of `drumline train`: torch is imported here, and a failure is told here, by the rank that failed first."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from drumline.config import PRESETS, Config, Layers, resolve
from drumline.distributed.failure import claim_failure
from drumline.engine.output import describe_failure, screen
from drumline.engine.saving import Progress
from drumline.engine.train import Request, train
from drumline.errors import DrumlineError, ExitCode, Place
from drumline.launch.local import INTERRUPTED
from drumline.launch.topology import let_first_rank_speak, topology_from
from drumline.manager import DDPManager
from drumline.tasks.base import Task
from drumline.tasks.load import load_task


def run_rank(task: str, layers: Layers, *, folder: Path, fresh: bool, argv: Sequence[str]) -> int:
    """Train as one rank of a group, or alone; returns the exit code."""
    ddp, progress = DDPManager(), Progress()
    try:
        task_class, config = _load(task, layers)
        ddp = _make_manager(config)
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


def _load(task: str, layers: Layers) -> tuple[type[Task], Config]:
    task_class = load_task(task)
    defaults = PRESETS[task].defaults if task in PRESETS else task_class.defaults
    return task_class, resolve(layers, defaults, task=task_class.__name__)


def _make_manager(config: Config) -> DDPManager:
    return DDPManager(
        device=config.dist.device,
        backend=config.dist.backend,
        start_timeout_s=config.dist.start_timeout_s,
        train_timeout_s=config.dist.train_timeout_s,
        seed=config.train.seed,
    )


def _tell(error: Exception, ddp: DDPManager, progress: Progress) -> None:
    place = ddp.place(progress.step or None)
    if ddp.store is None and (topology := topology_from(os.environ)) is not None:
        let_first_rank_speak(topology)
        place = Place(host=topology.host, rank=topology.rank)
    first = claim_failure(ddp.store, place, error)
    if first is None:
        print(describe_failure(error, place), file=screen(), end="", flush=True)
    else:
        print(f"drumline: {place} stopped, because {first[0]} failed first: {first[1]}", file=sys.stderr)
    if screen() is not sys.stderr:
        traceback.print_exception(error)  # into this rank's own log file


def _end_now(code: ExitCode) -> None:
    """The group is broken: taking it down in order would wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
