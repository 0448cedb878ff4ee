"""How a rank reports its failure: to its launcher, and once per job on the screen."""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from drumline.checkpoint.catalog import explain_os_error
from drumline.distributed.failure import Failure, summary
from drumline.engine.job import Progress
from drumline.engine.output import screen
from drumline.engine.run_folder import RunFolder
from drumline.errors import DrumlineError, ExitCode, NonFiniteError, Place, TrainingError, UsageError
from drumline.launch.rank_environment import LOGS_SHOWN
from drumline.launch.topology import let_first_rank_report, topology_from
from drumline.manager import DDPManager
from drumline.terminal import paragraph, show, shown
from drumline.untrusted import open_log
from drumline.watch.failure_kind import FailureKind, failure_kind

# After a restart the file system would refuse the write again.
REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
# A RuntimeError raised in these modules may be caused by the exit of another process (a rank, a DataLoader worker).
OTHERS_FAULT = ("torch.distributed", "torch.autograd", "torch.utils.data", "drumline.")


def report_failure(
    error: BaseException, ddp: DDPManager, progress: Progress, *, run: Path, environment: Mapping[str, str]
) -> int:
    """Print what happened, if this rank was the first to fail; returns the exit code of the whole job."""
    place = ddp.place(progress.step or None)
    if ddp.store is None and (topology := topology_from(environment)) is not None:
        let_first_rank_report(topology)
        place = Place(host=topology.host, rank=topology.rank)
    has_checkpoint = ddp.is_restart or progress.saved_step is not None
    # After the first step, training failed, whatever the reason.
    exit_code = error.exit_code if isinstance(error, DrumlineError) and not progress.step else ExitCode.TRAINING_FAILED
    mine = Failure(
        subject(error, place),
        summary(error),
        exit_code,
        is_own=is_own(error),
        can_restart=can_restart(error, has_checkpoint=has_checkpoint),
        raised_by=place,
    )
    first = ddp.claim_failure(error, mine)
    _print_once(error, place, first, RunFolder(run).log_file(ddp.rank), run=run, environment=environment)
    return (first or mine).exit_code


def subject(error: BaseException, place: Place) -> Place:
    """The rank that an error is about: the one it names, otherwise the one that raised it."""
    if not isinstance(error, DrumlineError) or error.place.rank is None:
        return place
    return replace(error.place, step=place.step) if error.place.step is None else error.place


def _print_once(
    error: BaseException, place: Place, first: Failure | None, log: Path, *, run: Path, environment: Mapping[str, str]
) -> None:
    """Print it on the screen once per job, and in this rank's log, which some launchers also show."""
    is_log_shown = bool(environment.get(LOGS_SHOWN)) and screen() is not sys.stderr
    if not is_log_shown:
        _append(log, shown("".join(traceback.format_exception(error))))
    if first is None:
        text = describe_failure(error, place, run=run)
        if not (is_log_shown and _append(log, text)):
            show(text, end="", stream=screen())
        return
    line = paragraph(f"{place.clause('stopped')} because {first.place.clause('crashed')}: {first.error}")
    _append(log, line)
    if first.place.host != place.host and not environment.get(LOGS_SHOWN):  # its screen may be another one
        show(line, end="", stream=sys.stderr)


def can_restart(error: BaseException, *, has_checkpoint: bool) -> bool:
    """Whether a restart can help. An error before the first checkpoint would be raised again at the same step. A NaN, a
    full disk, a quota, a missing permission or a read-only file system would fail again, too."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NonFiniteError) or (isinstance(cause, OSError) and cause.errno in REFUSALS):
            return False
        cause = cause.__cause__
    return has_checkpoint or not is_own(error)


def is_own(error: BaseException) -> bool:
    """Whether it is this rank's own error, and not a result of another process's exit."""
    if not isinstance(error, RuntimeError):  # torch's DistError is one
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return not (
        isinstance(error, dist.DistError)
        or module.startswith(OTHERS_FAULT)
        or failure_kind(error) is FailureKind.LOST_PEER
    )


def describe_failure(error: BaseException, place: Place, *, run: Path) -> str:
    """A failure as text: our own errors and the system's are explained, others have their traceback."""
    if isinstance(error, OSError) and error.errno in REFUSALS:
        error = _explained(error, run)
    if isinstance(error, UsageError) and place.step is None:
        what, *more = error.lines()  # the command is wrong, on any rank
    elif isinstance(error, DrumlineError):
        what, *more = error.located(**vars(place)).lines()
    else:
        is_exit = isinstance(error, SystemExit)
        what = f"{summary(error)} [{place}]" if is_exit else f"{place.clause('crashed')}: {summary(error)}"
        more = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    return paragraph(f"error: {what}", *more)


def _explained(error: OSError, run: Path) -> TrainingError:
    """Its traceback is in the rank's log, if that can be written."""
    path = error.filename2 or error.filename
    reason, next_step = explain_os_error(error, folder=Path(str(path)).parent if path else run)
    frames = traceback.extract_tb(error.__traceback__)
    where = str(path) if path else f"{frames[-1].filename}:{frames[-1].lineno}" if frames else str(run)
    return TrainingError(f"{reason}: {where}", next_step=f"{next_step}, then rerun the same command")


def _append(log_file: Path, text: str) -> bool:
    """Returns whether it could be written."""
    with contextlib.suppress(OSError), open_log(log_file) as file:
        file.write(text)
        return True
    return False
