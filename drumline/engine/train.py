"""A whole run on one rank, from its folder to the closing summary."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.checkpoint.retention import best
from drumline.config.schema import Config, TrainConfig
from drumline.config.write import to_toml
from drumline.data.plan import Cursor, plan_step
from drumline.distributed.collectives import gather_json
from drumline.distributed.determinism import machine_facts, told_of_refused_kernels
from drumline.distributed.failure import summary
from drumline.engine.batch import choose_batch
from drumline.engine.job import Job, build_job, count_steps, flat
from drumline.engine.ledger_file import LedgerFile
from drumline.engine.loop import Loop
from drumline.engine.output import divert_output
from drumline.engine.reporting import open_reporter
from drumline.engine.run_folder import RunFolder, locked, set_aside, write_whole
from drumline.engine.saving import Found, Progress, find_newest, restore
from drumline.engine.stream_check import check_streams
from drumline.engine.trace import Trace
from drumline.engine.warm_up import warm_up
from drumline.launch.commands import resume_command, two_node_command
from drumline.manager import DDPManager
from drumline.metrics.events import Reporter
from drumline.tasks.base import Task

# Settings that say how a run is watched and kept, not what it computes.
FREE_TO_CHANGE = (
    "log.",
    "checkpoint.",
    "watch.",
    "dist.",
    "data.dir",
    "data.workers",
    "data.pin_memory",
    "data.persistent",
)

FINISHED = "this run has finished; raise train.epochs or train.steps to go on, or start anew with --fresh"


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    task: str
    config: Config
    run: Path
    fresh: bool
    command: tuple[str, ...]


def train(request: Request, task_class: type[Task], ddp: DDPManager, progress: Progress) -> None:
    """Collective: train to the end. `progress` tells whoever catches an error how far it came."""
    folder = RunFolder(request.run)
    with ExitStack() as stack:
        moved_to = _open_folder(folder, request, ddp, stack)
        reporter = stack.enter_context(open_reporter(request.config.log, folder, ddp))
        if moved_to is not None:
            reporter.report("note", message=f"the earlier run was moved to {moved_to}")
        stack.enter_context(_errors_as_events(reporter, progress))
        found = find_newest(ddp, folder.checkpoints)
        batch = choose_batch(
            request.config.train, world_size=ddp.world_size, saved=None if found is None else found.facts
        )
        job = build_job(request.config, task_class(request.config), ddp, batch)
        stack.callback(job.close)
        _resume(job, found, progress)
        _write_down(
            request, folder, ddp
        )  # not before: what a checkpoint was made with is still to be read there
        ledger_file = _open_ledger(folder, job, request.config.train, progress)
        stack.callback(ledger_file.close)
        total_steps = count_steps(job, request.config.train, step=progress.step, cursor=progress.cursor)
        _report_start(reporter, request, job, total_steps)
        if found is not None:
            _report_resume(reporter, found, job, progress, _facts(request, job))
            if progress.step >= total_steps:
                reporter.report("note", message=FINISHED)
        if progress.step < total_steps:
            check_streams(job)
        warm_up(job, static_graph=request.config.dist.static_graph)
        loop = Loop(
            job=job,
            config=request.config,
            progress=progress,
            reporter=reporter,
            checkpoints=folder.checkpoints,
            facts=_facts(request, job),
            total_steps=total_steps,
            ledger_file=ledger_file,
            trace=_open_trace(request, folder, job, progress, stack),
        )
        with told_of_refused_kernels():
            loop.run()
        _report_end(reporter, request, loop)


def _open_trace(
    request: Request, folder: RunFolder, job: Job, progress: Progress, stack: ExitStack
) -> Trace | None:
    if not request.config.log.trace:
        return None
    trace = Trace(folder.trace_file(job.ddp.rank), job, progress, seed=request.config.train.seed)
    stack.callback(trace.close)
    return trace


@contextmanager
def _errors_as_events(reporter: Reporter, progress: Progress) -> Iterator[None]:
    try:
        yield
    except Exception as error:
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


def _write_down(request: Request, folder: RunFolder, ddp: DDPManager) -> None:
    """Collective: what the run is and where it runs."""
    device = (
        torch.cuda.get_device_name(ddp.device) if ddp.device.type == "cuda" else platform.processor() or "cpu"
    )
    ranks = gather_json(
        {"rank": ddp.rank, "host": ddp.host, "pid": os.getpid(), "device": device}, device=ddp.device
    )
    if ddp.is_main_process():
        header = f"drumline train {request.task} --config {folder.config_file}"
        write_whole(folder.config_file, to_toml(request.config, header=header))
        environment = {
            "command": ["drumline", "train", *request.command],
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ranks": ranks,
        }
        write_whole(folder.environment_file, json.dumps(environment, indent=1) + "\n")


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


def _report_start(reporter: Reporter, request: Request, job: Job, total_steps: int) -> None:
    train, world_size, per_epoch = request.config.train, job.ddp.world_size, job.loader.steps_per_epoch
    reporter.report(
        "start",
        task=request.task,
        run=str(request.run),
        world_size=world_size,
        device=str(job.ddp.device.type),
        backend=job.ddp.backend,
        model_parameters=sum(parameter.numel() for parameter in job.model.parameters()),
        train_samples=job.loader.num_samples,
        eval_samples=0 if job.eval_loader is None else job.eval_loader.num_samples,
        batch_size=job.batch.size,
        batch_size_per_rank=job.batch.size / world_size,
        accumulate=len(plan_step(Cursor(), length=job.batch.size, sharing=job.loader.sharing).pieces),
        shards=train.shards if train.exact == "elastic" else None,
        precision=train.precision,
        lr=job.peak_lr,
        epochs=train.epochs or (per_epoch and -(-total_steps // per_epoch)),
        total_steps=total_steps,
    )


def _report_end(reporter: Reporter, request: Request, loop: Loop) -> None:
    job = loop.job
    reporter.report(
        "end",
        step=loop.progress.step,
        epoch=loop.epoch(),
        seconds=loop.pace.seconds_since_start(),
        samples_per_s=loop.pace.samples_per_s,
        metrics=loop.metrics,
        best_step=best(
            loop.checkpoints, metric=job.task.best_metric, higher_is_better=job.task.higher_is_better
        ),
        run=str(request.run),
        resume_command=resume_command(request.command),
        two_node_command=two_node_command(request.command, procs=job.ddp.local_world_size),
    )


def _facts(request: Request, job: Job) -> dict[str, Any]:
    """What a checkpoint remembers of the run, for whoever resumes it."""
    return {
        "task": request.task,
        "config": flat(request.config),
        "world_size": job.ddp.world_size,
        "batch_size": job.batch.size,
        "data": job.data_fingerprint,
        "machine": machine_facts(job.ddp.device),
    }


def _resume(job: Job, found: Found | None, progress: Progress) -> None:
    """Collective: go on from a checkpoint, if there is one."""
    if found is not None:
        saved = restore(job, found.path)
        progress.step, progress.cursor = saved.step, saved.cursor
        job.loader.cursor = saved.cursor


def _report_resume(
    reporter: Reporter, found: Found, job: Job, progress: Progress, facts: dict[str, Any]
) -> None:
    for path, reason in found.torn:
        reporter.report("warning", message=f"the checkpoint {path} is not whole and was skipped: {reason}")
    reporter.report("resume", step=progress.step, epoch=progress.cursor.epoch + 1, path=str(found.path))
    if job.batch.note is not None:
        reporter.report("note", message=job.batch.note)
    for change in _changes(found.facts, facts):
        reporter.report("warning", message=change)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is not as it was when the checkpoint was made."""
    old, new = before["config"], now["config"]
    texts = [
        f"resumed with another {name}: {old.get(name)} before, {new[name]} now"
        for name in new
        if old.get(name) != new[name] and not name.startswith(FREE_TO_CHANGE)
    ]
    if before["task"] != now["task"]:
        texts.append(f"the run was saved by the task {before['task']} and goes on with {now['task']}")
    if before["data"] != now["data"]:
        texts.append("the training data is not what it was when the run was saved")
    if before["world_size"] != now["world_size"] and new["train.exact"] != "elastic":
        texts.append(
            f"the run was saved on {before['world_size']} ranks and goes on with {now['world_size']}: the same "
            "samples, but not the same bits (--train.exact elastic has both)"
        )
        return texts
    machine = before.get("machine", now["machine"])
    texts += [
        f"the run was saved with another {name} ({machine.get(name)}, now {value}): its bits may differ from here on"
        for name, value in now["machine"].items()
        if machine.get(name) != value
    ]
    return texts
