"""How a rank reports its failure: to its launcher, and once for the job on the screen. A traceback
of the user's code begins at the user's line.

    drumline: error: rank 3 on gpu-02 crashed at step 1841: ValueError: label 7 is out of range

The rank that was first prints such a line; the others, which fail because of it, add to their logs
that they have stopped.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from drumline.base.errors import (
    DrumlineError,
    ExitCode,
    NonFiniteError,
    Place,
    TrainingError,
    TrialError,
    UnusedParametersError,
    UsageError,
    summary,
)
from drumline.base.rank_environment import (
    LOGS_SHOWN,
    ErrorRecord,
    let_first_rank_report,
    topology_from,
    write_error,
)
from drumline.base.text import memory_size, paragraph, plural, show, shown
from drumline.base.untrusted import open_log
from drumline.base.user_code import is_users_file
from drumline.config.schema import Config
from drumline.data.sharding import spans_of_full_batch
from drumline.rank.failure import Failure
from drumline.runs.catalog import explain_os_error
from drumline.runs.run_folder import RunFolder
from drumline.training.job.evaluation_job import evaluate
from drumline.training.job.job import Job, Progress
from drumline.training.manager import RunManager
from drumline.training.output import screen
from drumline.training.steps.eager import TrainStep
from drumline.training.steps.graph import user_line
from drumline.watch.failure_kind import FailureKind, failure_kind

# After a restart the file system would refuse the write again.
REFUSALS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
# A RuntimeError raised in these modules may be caused by the exit of another process (a rank, a
# DataLoader worker).
OTHERS_FAULT = ("torch.distributed", "torch.autograd", "torch.utils.data", "drumline.")


def report_failure(
    error: BaseException,
    ddp: RunManager,
    progress: Progress,
    *,
    run: Path | None,
    environment: Mapping[str, str],
) -> int:
    """Print what happened, if this rank was the first to fail; returns the exit code of the whole
    job. `run`: where the logs are that it is added to, if any."""
    place = ddp.place(progress.step or None)
    if ddp.connection.store is None and (topology := topology_from(environment)) is not None:
        let_first_rank_report(topology)
        place = Place(host=topology.host, rank=topology.rank)

    has_checkpoint = ddp.is_restart or progress.saved_step is not None
    exit_code = ExitCode.TRAINING_FAILED

    # After the first step, training failed, whatever the reason.
    if isinstance(error, DrumlineError) and not progress.step:
        exit_code = error.exit_code

    failure = Failure(
        subject(error, place),
        summary(error),
        exit_code,
        is_own=is_own(error),
        can_restart=can_restart(error, has_checkpoint=has_checkpoint),
        full_disk=full_disk(error, run),
        raised_by=place,
    )

    first = ddp.connection.claim_failure(error, failure, environment=environment)
    log_file = None if run is None else RunFolder(run).log_file(ddp.rank)
    _print_once(error, place, first, log_file, run=run or Path(), environment=environment)

    return (first or failure).exit_code


def subject(error: BaseException, place: Place) -> Place:
    """The rank that an error is about: the one it names, otherwise the one that raised it."""
    if not isinstance(error, DrumlineError) or error.place.rank is None:
        return place
    return replace(error.place, step=place.step) if error.place.step is None else error.place


def _print_once(
    error: BaseException,
    place: Place,
    first: Failure | None,
    log_file: Path | None,
    *,
    run: Path,
    environment: Mapping[str, str],
) -> None:
    """Print it on the screen once per job, and in this rank's log, which some launchers also
    show."""
    is_log_shown = bool(environment.get(LOGS_SHOWN)) and screen() is not sys.stderr
    if not is_log_shown:
        _append(log_file, shown("".join(traceback.format_exception(error))))

    if first is None:
        write_error(environment, _record_of(_explained(error, place, run), place))
        text = describe_failure(error, place, run=run)
        if not (is_log_shown and _append(log_file, text)):
            show(text, end="", stream=screen())

        return

    line = paragraph(f"{place.clause('stopped')} because {first.sentence}")
    _append(log_file, line)

    # The screen of another host may be another one.
    if first.place.host != place.host and not environment.get(LOGS_SHOWN):
        show(line, end="", stream=sys.stderr)


def can_restart(error: BaseException, *, has_checkpoint: bool) -> bool:
    """Whether a restart can help. An error before the first checkpoint would be raised again at the
    same step. A NaN, unused parameters, a full disk, a quota, a missing permission or a read-only
    file system would fail again, too."""
    for cause in _causes(error):
        if isinstance(cause, NonFiniteError | UnusedParametersError):
            return False
        if isinstance(cause, OSError) and cause.errno in REFUSALS:
            return False
    return has_checkpoint or isinstance(error, TrialError) or not is_own(error)


def full_disk(error: BaseException, run: Path | None) -> str:
    """The folder whose disk is full, or whose quota is used up, if that is the cause; else
    empty."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            folder = run or Path()
            if isinstance(cause.filename, str) and Path(cause.filename).parent.is_dir():
                folder = Path(cause.filename).parent
            return str(folder.absolute())
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from, the latest first."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def is_own(error: BaseException) -> bool:
    """Whether it is this rank's own error, and not a result of another process's exit, as
    `Connection reset by peer` in a collective is."""
    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return True

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return not (
        isinstance(error, dist.DistError)
        or module.startswith(OTHERS_FAULT)
        or failure_kind(error) is FailureKind.LOST_PEER
    )


def describe_failure(error: BaseException, place: Place, *, run: Path) -> str:
    """A failure as text: our own errors and the system's are explained, others have their
    traceback."""
    error = _explained(error, place, run)
    if isinstance(error, UsageError) and place.step is None:
        what, *details = error.lines()  # the command is wrong, on any rank
    elif isinstance(error, DrumlineError):
        what, *details = error.located(place).lines()
    else:
        what = f"{place.clause('crashed')}: {summary(error)}"
        if isinstance(error, SystemExit):
            what = f"{summary(error)} [{place}]"
        details = users_traceback(error)

    return paragraph(f"error: {what}", *details)


def _record_of(error: BaseException, place: Place) -> ErrorRecord:
    """The error as data, for the Python program that has started this, if one has."""
    if isinstance(error, DrumlineError):
        return ErrorRecord(error.what, error.next_step, error.place)
    return ErrorRecord(summary(error), None, place, "\n".join(users_traceback(error)))


def users_traceback(error: BaseException) -> list[str]:
    """Its lines, from the first frame of the user's code on, without those of Drumline, torch and
    Python but for the last one; all of them where no frame is the user's.

        Traceback (most recent call last):
          (14 frames of Drumline, torch and Python left out)
          File "my_task.py", line 31, in loss
            return Loss(functional.cross_entropy(scores, labels, reduction="sum"))
    """
    report = traceback.TracebackException.from_exception(error)
    num_left_out = 0

    cause: traceback.TracebackException | None = report
    while cause is not None:  # the error, and those that it was raised from
        num_left_out += _leave_out(cause)
        cause = cause.__cause__ or cause.__context__

    first, *lines = "".join(report.format()).rstrip("\n").split("\n")
    if num_left_out:
        note = f"  ({plural(num_left_out, 'frame')} of Drumline, torch and Python left out)"
        lines.insert(0, note)

    return [first, *lines]


def _leave_out(report: traceback.TracebackException) -> int:
    """Reduce a traceback to the user's frames and the last one. Returns how many frames are left
    out."""
    frames = list(report.stack)
    shown_frames = [
        frame for frame in frames if is_users_file(frame.filename) or frame is frames[-1]
    ]

    if not any(is_users_file(frame.filename) for frame in shown_frames):
        return 0

    report.stack[:] = shown_frames
    return len(frames) - len(shown_frames)


def _explained(error: BaseException, place: Place, run: Path) -> BaseException:
    """What the file system refused, in words. Its traceback is in the rank's log, if that can be
    written."""
    if not isinstance(error, OSError) or error.errno not in REFUSALS:
        return error

    path = error.filename2 or error.filename
    reason, next_step = explain_os_error(error, folder=Path(str(path)).parent if path else run)
    explained = TrainingError(
        f"{reason}: {path or run}", next_step=f"{next_step}, then rerun the same command"
    )

    return explained.located(place)


def _append(log_file: Path | None, text: str) -> bool:
    """Add to a log file. Returns whether it could be written: the disk may be full."""
    if log_file is None:
        return False

    with contextlib.suppress(OSError), open_log(log_file) as file:
        file.write(text)
        return True
    return False


@contextmanager
def explain_out_of_memory(config: Config, job: Job) -> Iterator[None]:
    """In it an error of the GPU's memory names the setting that needs less."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, config, job.ddp, job) from error


def out_of_memory(
    error: torch.OutOfMemoryError, config: Config, ddp: RunManager, job: Job | None
) -> TrainingError:
    """The error, with the setting that needs less memory. `job`: None while it is built."""
    peak = ""
    if ddp.device.type == "cuda":
        used = torch.cuda.max_memory_reserved(ddp.device)
        total = torch.cuda.mem_get_info(ddp.device)[1]
        peak = f"; the most that this rank has held is {memory_size(used)} of {memory_size(total)}"

    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if job is not None and evaluate.__name__ in functions:
        next_step = f"--train.eval_batch_size {max(1, config.train.eval_batch_size // 2)}, half of what it is"
    elif job is None or TrainStep._update.__name__ in functions:
        next_step = _hold_less(config.dist.mode, ddp.world_size)
    else:
        next_step = _compute_less(job, config)

    return TrainingError(
        f"out of memory{user_line(error)}: {str(error).partition('. GPU')[0]}{peak}",
        next_step=next_step,
    )


def _hold_less(mode: str, world_size: int) -> str:
    """The setting with which a GPU holds less of the model, its gradients and the optimizer's
    state, however small the batch is."""
    if mode == "fsdp" and world_size > 1:
        return "--dist.offload_optimizer, more GPUs or a smaller model"

    on_several = "" if world_size > 1 else " on several GPUs"
    return (
        f"--dist.mode fsdp{on_several}, which shards the model and the optimizer's state over the ranks (drumline plan "
        "TASK shows what each mode needs)"
    )


def _compute_less(job: Job, config: Config) -> str:
    """The setting with which a GPU computes less at a time: half of the largest micro-batch."""
    at_once = max(span.size for span in spans_of_full_batch(job.loader.sharding))
    if at_once <= 1:
        return (
            "--model.activation_checkpointing, --train.precision bf16, --dist.mode fsdp or a smaller model: a "
            "micro-batch is one sample"
        )

    instead = " in place of --train.accumulate" if config.train.accumulate > 1 else ""
    return (
        f"--train.micro_batch_size {at_once // 2}{instead}, half of the {at_once} samples that a rank now computes at "
        "once; the global batch stays as it is (drumline find-batch measures what fits)"
    )
