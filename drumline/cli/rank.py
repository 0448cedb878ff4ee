"""One rank of `drumline train`: torch is imported here, and a failure is told here, by the rank that failed first."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from drumline.config import PRESETS, Config, Layers, resolve
from drumline.distributed.failure import summary
from drumline.engine.job import make_manager
from drumline.engine.output import describe_failure, screen
from drumline.engine.preemption import Preemption
from drumline.engine.request import Request
from drumline.engine.run_folder import RunFolder
from drumline.engine.saving import Progress
from drumline.engine.start_clock import start_clock
from drumline.engine.train import train
from drumline.errors import DrumlineError, ExitCode, Place
from drumline.launch.late_compiler import load_compiler_late
from drumline.launch.node.local import INTERRUPTED
from drumline.launch.topology import let_first_rank_speak, topology_from
from drumline.manager import DDPManager
from drumline.tasks.base import Task
from drumline.tasks.load import load_task


def run_rank(task: str, layers: Layers, *, folder: Path, fresh: bool, argv: Sequence[str]) -> int:
    """Train as one rank of a group, or alone; returns the exit code."""
    ddp, progress, preemption = DDPManager(), Progress(), Preemption()
    preemption.listen(is_speaker=os.environ.get("RANK", "0") == "0")
    try:
        task_class, config = _load(task, layers)
        clock = start_clock(os.environ, is_alone=topology_from(os.environ) is None)
        ddp = make_manager(config, task, run=folder)
        ddp.setup()
        load_compiler_late()
        clock.mark("meeting")
        preemption.join(ddp, progress)
        request = Request(task, config, folder, fresh, tuple(argv))
        code = train(request, task_class, ddp, progress, preemption, clock)
    except KeyboardInterrupt as error:
        ddp.beat.fail(summary(error))
        if ddp.store is None:  # among several ranks the launcher says so, once
            print(INTERRUPTED, file=sys.stderr)
        _end_now(ExitCode.INTERRUPTED)
    except (Exception, SystemExit) as error:  # the user's code may call sys.exit, which is no success
        ddp.beat.fail(summary(error))
        _write_traceback(error, RunFolder(folder).log_file(ddp.rank))
        _end_now(_tell(error, ddp, progress))
    preemption.close()
    if not ddp.cleanup():
        _end_now(code)
    return code


def _load(task: str, layers: Layers) -> tuple[type[Task], Config]:
    task_class = load_task(task)
    defaults = PRESETS[task].defaults if task in PRESETS else task_class.defaults
    return task_class, resolve(layers, defaults, task=task_class.__name__)


def _tell(error: BaseException, ddp: DDPManager, progress: Progress) -> int:
    """Say what happened, if this rank was the first to fail; returns the exit code of the whole job."""
    place = ddp.place(progress.step or None)
    if ddp.store is None and (topology := topology_from(os.environ)) is not None:
        let_first_rank_speak(topology)
        place = Place(host=topology.host, rank=topology.rank)
    code = _exit_code(error, progress)
    first = ddp.claim_failure(error, step=place.step, exit_code=code)
    if first is None:
        print(describe_failure(error, place), file=screen(), end="", flush=True)
    else:
        print(
            f"drumline: {place} stopped, because {first.place} failed first: {first.error}", file=sys.stderr
        )
    return code if first is None else first.exit_code


def _write_traceback(error: BaseException, log_file: Path) -> None:
    with contextlib.suppress(OSError), log_file.open("a") as file:
        traceback.print_exception(error, file=file)


def _exit_code(error: BaseException, progress: Progress) -> int:
    """Once steps were taken it is the training that failed, whatever the reason."""
    if isinstance(error, DrumlineError) and progress.step == 0:
        return error.exit_code
    return ExitCode.TRAINING_FAILED


def _end_now(code: int) -> None:
    """Without Python's own ending, which would wait for a group that is broken or cannot be destroyed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
