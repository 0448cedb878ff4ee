"""Where a rank reports: its event file, its log file and the user's screen; the records and events at
the start and at the end of a run; and the notices of the sidecars.

Rank 0 shows the run on the screen. The other ranks write to their own log files, and use the screen
only for a failure.

                events                     print, and C++ libraries
    rank 0      file, log, screen          screen
    the others  file; warnings in the log  log
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

import torch

from drumline.base.errors import log, summary
from drumline.base.json_output import is_wrapped
from drumline.base.startup import command_start, now, process_start
from drumline.base.untrusted import APPEND, descriptor_of, open_log
from drumline.checkpoint.retention import best
from drumline.config.config_file import to_toml
from drumline.config.schema import Config
from drumline.data.sharding import spans_of_full_batch
from drumline.metrics.display import Display, JsonDisplay, PlainDisplay
from drumline.metrics.trackers.mlflow import MLflow
from drumline.metrics.trackers.tensorboard import TensorBoard
from drumline.metrics.trackers.tracker import Tracker
from drumline.metrics.trackers.tracking import Tracking, close_all
from drumline.metrics.trackers.wandb import WeightsAndBiases
from drumline.parallel.blocks import describe_blocks
from drumline.parallel.recompute import recomputed_blocks
from drumline.rank.collectives import gather_json
from drumline.runs.events import EventLog, Reporter, Sink, Tail
from drumline.runs.run_folder import RunFolder, write_whole
from drumline.training.job.job import Job, Progress, flat, steps_of_settings
from drumline.training.manager import RunManager
from drumline.training.run_context import RunContext
from drumline.training.tasks.built_in import unused_settings
from drumline.watch.sidecar.sidecar_reporter import NOTICES

_screen: TextIO | None = None


def divert_output(path: Path) -> None:
    """Redirect everything that this process prints, including C++ libraries, to a file; `screen` is
    for failures. For the ranks other than 0."""
    global _screen
    undo_divert()
    _screen = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace")

    log_file = descriptor_of(path, APPEND)
    _print_to(log_file)
    os.close(log_file)


def undo_divert() -> None:
    """This process shows the run from now on."""
    global _screen
    if _screen is not None:
        _print_to(_screen.fileno())
        _screen.close()
        _screen = None


def _print_to(descriptor: int) -> None:
    """From now on stdout and stderr are this file; what was printed before goes where it was
    meant to."""
    sys.stdout.flush()
    sys.stderr.flush()

    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def screen() -> TextIO:
    """The user's screen, also after `divert_output`: where a failure is shown."""
    return _screen or sys.stderr


@contextmanager
def open_reporter(
    config: Config, folder: RunFolder, ddp: RunManager, progress: Progress
) -> Iterator[Reporter]:
    """A reporter for one run on one rank. Warnings of the package's logger become events, and so
    does an error that leaves the block.

    Rank 0's events go to its file, its log, the screen and the trackers; those of the others to
    their own files, and their warnings to their logs."""
    with ExitStack() as stack:
        log_file = stack.enter_context(open_log(folder.log_file(ddp.rank)))
        plain = make_display("plain", log_file)
        events = stack.enter_context(closing(EventLog(folder.event_file(ddp.rank))))

        sinks: list[Sink] = [events]
        if ddp.is_main_process():
            sinks += [plain, make_display(config.log.display, sys.stdout)]
        else:  # the launcher may show its log, too
            sinks.append(lambda event: plain(event) if event["kind"] == "warning" else None)

        reporter = stack.enter_context(Reporter(sinks, rank=ddp.rank, host=ddp.host))

        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: reporter.report("warning", message=record.getMessage())  # type: ignore[method-assign]
        log.logger.addHandler(handler)
        stack.callback(log.logger.removeHandler, handler)

        if ddp.is_main_process():
            trackers = _trackers(config, folder, reporter)
            # while their warnings still become events
            stack.callback(close_all, trackers)
            for sink in trackers:
                reporter.add(sink)

        try:
            yield reporter
        except (Exception, SystemExit) as error:
            reporter.report("error", step=progress.step, message=summary(error))
            raise


def _trackers(config: Config, folder: RunFolder, reporter: Reporter) -> list[Tracking]:
    """The trackers that the settings name, each with a thread of its own."""
    makers: dict[str, Callable[[], Tracker]] = {
        "wandb": lambda: WeightsAndBiases(folder.path, flat(config)),
        "mlflow": lambda: MLflow(folder.path, flat(config)),
        "tensorboard": lambda: TensorBoard(folder.tensorboard, flat(config)),
    }

    # All packages are there, before a thread starts.
    trackers = [makers[name]() for name in dict.fromkeys(config.log.trackers or ())]
    return [
        Tracking(
            tracker,
            folder=folder.path,
            event_file=folder.event_file(0),
            id_file=folder.trackers / f"{tracker.name}.json",
            report=reporter.report,
        )
        for tracker in trackers
    ]


def make_display(mode: Literal["auto", "live", "plain", "none"], stream: TextIO) -> Display:
    """The display for a stream; `auto` is live on a terminal that can move its cursor, and plain
    elsewhere. `none` shows nothing."""
    if mode == "none":
        return Display()
    if stream is sys.stdout and is_wrapped():
        return JsonDisplay(stream)
    if mode == "plain" or (mode == "auto" and not stream.isatty()):
        return PlainDisplay(stream)
    assert mode in ("live", "auto"), mode

    # the plain display does not need rich
    from drumline.metrics.live import LiveDisplay

    live = LiveDisplay(stream)
    return live if mode == "live" or live.can_animate else PlainDisplay(stream)


@dataclass
class StartClock:
    """Divides the time from the command to the end of the first step into parts: each stage of the
    start marks its end. Later steps do not use it.

        {"launcher": 0.4, "python and torch": 2.1, "folder": 0.1, "data": 0.3, "model": 0.8, ...}
    """

    began: float = field(default_factory=now)
    since: str = "rank"
    """What the time is measured from: the `command`, or the start of this `rank`."""

    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by name, in the order of the run."""

    def mark(self, part: str) -> None:
        """All time since the last mark belongs to this part."""
        since_last_mark = now() - self.began - sum(self.parts.values())
        self.parts[part] = self.parts.get(part, 0.0) + since_last_mark

    def report(self, reporter: Reporter, *, step: int) -> None:
        """After the first step, once the device has finished it."""
        self.mark("first step")
        seconds = sum(self.parts.values())
        reporter.report(
            "first_step", step=step, seconds=seconds, since=self.since, parts=self.parts
        )


def start_clock(environment: Mapping[str, str], *, is_alone: bool) -> StartClock:
    """The clock of this rank, after its imports. `is_alone`: this process is the command; otherwise
    the environment has the time at which the command began, if one of ours has started this
    rank."""
    process_began = process_start()
    command_began = process_began if is_alone else command_start(environment)

    clock = StartClock(process_began)
    if command_began is not None:
        clock = StartClock(command_began, since="command")

    if clock.began < process_began:
        clock.parts["launcher"] = process_began - clock.began

    clock.mark("python and torch")
    return clock


def report_start(context: RunContext) -> None:
    """The `start` event: what the run trains, on what, and for how long. It is what the screen
    shows first."""
    request = context.request
    job = context.job
    train = request.config.train
    world_size = job.ddp.world_size

    total_steps = context.total_steps
    if context.progress.stopped is not None:
        # A hook has ended the run before its last step: that is not the length that was asked for.
        total_steps = max(total_steps, steps_of_settings(job, train, context.progress))

    epochs = train.epochs
    per_epoch = job.loader.steps_per_epoch
    if not epochs and per_epoch:
        epochs = -(-total_steps // per_epoch)

    context.reporter.report(
        "start",
        task=request.task,
        run=str(request.run),
        world_size=world_size,
        device=str(job.ddp.device.type),
        backend=job.ddp.backend,
        model_parameters=sum(parameter.numel() for parameter in job.model.parameters()),
        train_samples=job.loader.num_samples,
        eval_samples=job.eval_samples,
        batch_size=job.batch.size,
        batch_size_per_rank=job.batch.size / world_size,
        accumulate=len(spans_of_full_batch(job.loader.sharding)),
        shards=train.shards if train.exact == "elastic" else None,
        precision=train.precision,
        lr=job.rates.peak,
        lr_rates=job.rates.num_rates,
        epochs=epochs,
        total_steps=total_steps,
    )


def write_environment(context: RunContext) -> list[dict[str, Any]]:
    """Collective: record the command, versions, hosts and devices. Returns the ranks:

    [{"rank": 0, "host": "gpu-01", "pid": 4711, "device": "NVIDIA H100", "gpu": "GPU-5c1e..."}, ...]
    """
    ddp = context.job.ddp
    folder = context.folder
    this_rank: dict[str, Any] = {
        "rank": ddp.rank,
        "host": ddp.host,
        "pid": os.getpid(),
        "device": platform.machine() or "cpu",
        "gpu": None,
    }

    if ddp.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(ddp.device)
        this_rank["device"] = gpu.name
        this_rank["gpu"] = str(gpu.uuid)

    ranks = gather_json(this_rank)

    if ddp.is_main_process():
        environment = {
            "command": ["drumline", "train", *context.request.command],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ranks": ranks,
        }

        write_whole(folder.environment_file, json.dumps(environment, indent=1) + "\n")
        folder.preempted_file.unlink(missing_ok=True)

    return ranks


def notes_on_settings(job: Job, config: Config) -> Iterator[str]:
    """What the settings make of the model, and those that have no effect: `recompute: 12 x Block`,
    `shards: 12 x Block`."""
    dist = config.dist
    if config.model.activation_checkpointing and (blocks := recomputed_blocks(job.model)):
        yield f"recompute: {describe_blocks(blocks)}"

    if job.sharded is not None:
        yield f"shards: {job.sharded.describe_blocks()}"

    if dist.mode != "ddp" and job.ddp.world_size == 1:
        yield f"dist.mode {dist.mode} has no effect: one process holds the whole model"


def write_settings(context: RunContext, history: list[Any]) -> None:
    """Write `config.toml`, with which `--config` repeats the run, and the settings that changed
    during the run."""
    folder = context.folder
    header = f"drumline train {context.request.task} --config {folder.config_file}"
    left_out = unused_settings(type(context.job.task), context.config)
    write_whole(folder.config_file, to_toml(context.config, header=header, left_out=left_out))

    if history:
        lines = "".join(f"{json.dumps(change)}\n" for change in history)
        write_whole(folder.settings_history, lines)
    else:  # the changes belonged to steps that were lost
        folder.settings_history.unlink(missing_ok=True)


def report_end(context: RunContext, notices: WatchNotices) -> None:
    """The `end` event: the result, the mean speed, and the commands to type next. The commands are
    those with which the user would continue: resume this run, or train on two nodes."""
    request = context.request
    task = context.job.task
    ddp = context.job.ddp
    throughput = context.throughput

    notices.report(context.reporter)

    next_commands: dict[str, str | None] = {"resume_command": None, "two_node_command": None}
    # On several nodes a rank does not know the launcher's command.
    if ddp.world_size == ddp.local_world_size:
        procs = ddp.world_size
        next_commands = {
            "resume_command": resume_command(request.command, procs=procs),
            "two_node_command": two_node_command(request.task, request.command, procs=procs),
        }

    context.reporter.report(
        "end",
        step=context.progress.step,
        epoch=context.progress.epoch,
        num_steps=throughput.num_steps,
        seconds=time.perf_counter() - throughput.created,
        start_s=throughput.start_s,
        **asdict(throughput.steady()),
        checkpoint_pause_s=throughput.checkpoint_pause_s,
        metrics=context.progress.metrics,
        best_step=best(
            context.folder.checkpoints,
            metric=task.best_metric,
            higher_is_better=task.higher_is_better,
        ),
        stragglers=notices.stragglers,
        stopped=context.progress.stopped and context.progress.stopped["reason"],
        run=str(request.run),
        **next_commands,
    )


class WatchNotices:
    """Reports notices of the sidecars (stragglers, stalls). Their leader appends to a file in the
    watch folder; rank 0 checks it with each log line, which costs one `stat`:

        {"kind": "straggler", "rank": 3, "host": "gpu-02", "what": ..., "message": ...}
    """

    def __init__(self, folder: Path | None) -> None:
        self._slow: dict[tuple[Any, Any], str] = {}
        """By host and rank: the latest notice that it is slow."""

        self._tail: Tail | None = None
        if folder is not None:
            self._tail = Tail(folder / NOTICES)
            with suppress(OSError):
                (folder / NOTICES).touch()  # if it exists, the sidecar does not print

    @property
    def stragglers(self) -> list[str]:
        """The latest notice about each rank or host, over the whole run."""
        return list(self._slow.values())

    def report(self, reporter: Reporter) -> None:
        """Report new notices."""
        if self._tail is None:
            return

        for notice in self._tail.new():
            if not all(isinstance(notice.get(name), str) for name in ("kind", "message")):
                continue

            kind = notice["kind"]
            rank = notice.get("rank")
            host = notice.get("host")

            if kind in ("straggler", "stall"):
                reporter.report(kind, message=notice["message"], about_rank=rank, about_host=host)

            if kind == "straggler":
                self._slow[host, rank] = str(notice.get("what", ""))


# Commands for the user to type next


def resume_command(arguments: Sequence[str], *, procs: int) -> str:
    """The command that resumes this run on the same number of ranks: without `--fresh`, with
    `--procs` if needed. `drumline train my_task.py:MyTask --optim.lr 0.1 --procs 2`."""
    words = [word for word in arguments if word != "--fresh"]
    has_procs = any(word.partition("=")[0] == "--procs" for word in words)
    if procs != 1 and not has_procs:
        words += ["--procs", str(procs)]

    return shlex.join(["drumline", "train", *words])


def two_node_command(task: str, arguments: Sequence[str], *, procs: int) -> str:
    """The command for the same run on two machines, with this many ranks on each: `drumline launch
    --hosts HOST_A,HOST_B --procs 2 my_task.py:MyTask --optim.lr 0.1`."""
    words = []
    previous = ""
    for word in arguments:
        is_procs = "--procs" in (word, previous) or word.startswith("--procs=")
        if not is_procs and word != "--fresh":
            words.append(word)

        previous = word

    # `drumline launch` needs the task before its flags; `drumline train` takes it anywhere.
    if task in words:
        words.remove(task)

    return f"drumline launch --hosts HOST_A,HOST_B --procs {procs} {shlex.join([task, *words])}"
