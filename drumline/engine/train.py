"""A whole run on one rank, from its folder to the closing summary."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.config.schema import TrainConfig
from drumline.config.write import to_toml
from drumline.distributed.collectives import gather_json
from drumline.distributed.determinism import told_of_refused_kernels
from drumline.distributed.failure import summary
from drumline.engine.announce import FINISHED, leave_preempted, report_end, report_resume, report_start
from drumline.engine.batch import choose_batch
from drumline.engine.facts import check_not_finished, facts_of, resets_optimizer
from drumline.engine.job import Job, build_job, count_steps
from drumline.engine.ledger_file import LedgerFile
from drumline.engine.loop import Loop
from drumline.engine.output import divert_output
from drumline.engine.preemption import Preemption
from drumline.engine.reclaim import looking_for_notice
from drumline.engine.recovery import begin_launch
from drumline.engine.reporting import open_reporter
from drumline.engine.request import Request
from drumline.engine.run_folder import RunFolder, locked, set_aside, write_whole
from drumline.engine.saving import Found, Progress, find_newest, restore
from drumline.engine.start_clock import StartClock
from drumline.engine.steps.warm_up import warm_up
from drumline.engine.stream_check import check_streams
from drumline.engine.trace import Trace
from drumline.errors import ExitCode
from drumline.manager import DDPManager
from drumline.metrics.events import Reporter
from drumline.tasks.base import Task
from drumline.tasks.uncalled_methods import uncalled_methods


def train(
    request: Request,
    task_class: type[Task],
    ddp: DDPManager,
    progress: Progress,
    preemption: Preemption | None = None,
    clock: StartClock | None = None,
) -> ExitCode:
    """Collective: train to the end, or until told to leave.

    `progress` tells whoever catches an error how far it came; `clock` has run since the command.
    """
    clock = clock or StartClock()
    folder = RunFolder(request.run)
    with ExitStack() as stack, _errors_in_the_beat(ddp):
        moved_to = _open_folder(folder, request, ddp, stack)
        reporter = stack.enter_context(open_reporter(request.config.log, folder, ddp))
        if moved_to is not None:
            reporter.report("note", message=f"the earlier run was moved to {moved_to}")
        stack.enter_context(_errors_as_events(reporter, progress))
        if ddp.is_main_process():
            for sentence in uncalled_methods(task_class):
                reporter.report("warning", message=sentence)
        fault = begin_launch(folder, ddp)
        preemption = preemption or Preemption()
        stack.enter_context(looking_for_notice(request.config.watch.notice, ddp, preemption))
        found = find_newest(ddp, folder.checkpoints)
        batch = choose_batch(
            request.config.train, world_size=ddp.world_size, saved=None if found is None else found.facts
        )
        clock.mark("folder")
        job = build_job(request.config, task_class(request.config), ddp, batch, clock)
        stack.callback(job.close)
        clock.mark("model")
        at = Progress() if found is None else found.progress
        total_steps = count_steps(job, request.config.train, step=at.step, cursor=at.cursor)
        if found is not None:
            check_not_finished(found.facts, request, step=at.step, total_steps=total_steps)
        facts = facts_of(request, job, before=None if found is None else found.facts, step=at.step)
        _resume(job, found, request, progress)
        clock.mark("checkpoint")
        _write_environment(request, folder, ddp)
        ledger_file = _open_ledger(folder, job, request.config.train, progress)
        stack.callback(ledger_file.close)
        report_start(reporter, request, job, total_steps)
        if found is not None:
            report_resume(reporter, found, job.batch, request, facts)
            if progress.step >= total_steps:
                reporter.report("note", message=FINISHED)
        if progress.step < total_steps:
            check_streams(job)
        loop = Loop(
            job=job,
            config=request.config,
            progress=progress,
            reporter=reporter,
            checkpoints=folder.checkpoints,
            facts=facts,
            total_steps=total_steps,
            ledger_file=ledger_file,
            trace=_open_trace(request, folder, job, progress, stack),
            preemption=preemption,
            fault=fault,
            clock=clock,
            keep_settings=partial(_write_settings, request, folder, ddp, facts),
        )
        preemption.is_writing = loop.saver.is_writing
        with told_of_refused_kernels(), loop.saver:
            if progress.step < total_steps:
                warm_up(job, request.config, report=lambda text: reporter.report("note", message=text))
            clock.mark("warm-up")
            loop.run()
        if loop.is_preempted:
            leave_preempted(reporter, folder, loop)
            return ExitCode.PREEMPTED
        report_end(reporter, request, loop)
        return ExitCode.SUCCESS


def _open_trace(
    request: Request, folder: RunFolder, job: Job, progress: Progress, stack: ExitStack
) -> Trace | None:
    if not request.config.log.trace:
        return None
    trace = Trace(folder.trace_file(job.ddp.rank), job, progress, seed=request.config.train.seed)
    stack.callback(trace.close)
    return trace


@contextmanager
def _errors_in_the_beat(ddp: DDPManager) -> Iterator[None]:
    """Before anything is closed: workers, files and the other ranks may keep that waiting."""
    try:
        yield
    except (Exception, SystemExit) as error:
        ddp.note_failure(error)
        raise


@contextmanager
def _errors_as_events(reporter: Reporter, progress: Progress) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        reporter.report("error", step=progress.step, message=summary(error))
        raise


def _open_folder(folder: RunFolder, request: Request, ddp: DDPManager, stack: ExitStack) -> Path | None:
    """Collective: rank 0 makes and locks the folder; the others then write beside it, off the screen."""
    moved = None
    if ddp.is_main_process():
        # A launcher that restarts a failed job gives the same flags again: that is no new start.
        if request.fresh and not ddp.is_restart:
            moved = set_aside(folder)
        folder.make()
        stack.enter_context(locked(folder))
    ddp.barrier()
    if not ddp.is_main_process():
        folder.make()
        divert_output(folder.log_file(ddp.rank))
    return moved


def _write_settings(request: Request, folder: RunFolder, ddp: DDPManager, facts: Mapping[str, Any]) -> None:
    """What the run is trained with, and how that changed on the way. Not before its first step: a start that is refused
    leaves what it found."""
    if not ddp.is_main_process():
        return
    header = f"drumline train {request.task} --config {folder.config_file}"
    write_whole(folder.config_file, to_toml(request.config, header=header))
    if facts["history"]:
        write_whole(folder.settings_history, "".join(f"{json.dumps(one)}\n" for one in facts["history"]))
    else:  # of steps that were lost
        folder.settings_history.unlink(missing_ok=True)


def _write_environment(request: Request, folder: RunFolder, ddp: DDPManager) -> None:
    """Collective: where the run runs."""
    device = (
        torch.cuda.get_device_name(ddp.device) if ddp.device.type == "cuda" else platform.machine() or "cpu"
    )
    ranks = gather_json(
        {"rank": ddp.rank, "host": ddp.host, "pid": os.getpid(), "device": device}, device=ddp.device
    )
    if ddp.is_main_process():
        environment = {
            "command": ["drumline", "train", *request.command],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ranks": ranks,
        }
        write_whole(folder.environment_file, json.dumps(environment, indent=1) + "\n")
        folder.preempted_file.unlink(missing_ok=True)


def _open_ledger(folder: RunFolder, job: Job, train: TrainConfig, progress: Progress) -> LedgerFile:
    ledger_file = LedgerFile(folder.ledger if job.ddp.is_main_process() else None)
    ledger_file.start(
        step=progress.step,
        cursor=progress.cursor,
        world_size=job.ddp.world_size,
        batch_size=job.batch.size,
        samples=job.loader.num_samples,
        seed=train.seed,
        shards=train.shards if train.exact == "elastic" else None,
    )
    return ledger_file


def _resume(job: Job, found: Found | None, request: Request, progress: Progress) -> None:
    """Collective: resume from a checkpoint, if there is one."""
    if found is not None:
        restore(job, found.path, with_optimizer=not resets_optimizer(found.facts, request))
        progress.step, progress.cursor = found.progress.step, found.progress.cursor
        job.loader.cursor = progress.cursor
