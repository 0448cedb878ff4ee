"""The events at either end of a run: what it is, where it goes on from, what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from drumline.checkpoint.retention import best
from drumline.data.sharding import Cursor, plan_step
from drumline.engine.batch import Batch
from drumline.engine.facts import changes, resets_optimizer
from drumline.engine.job import Job
from drumline.engine.loop import Loop
from drumline.engine.request import Request
from drumline.engine.run_folder import RunFolder, write_whole
from drumline.engine.saving import Found
from drumline.launch.node_plan import resume_command, two_node_command
from drumline.metrics.events import Reporter

FINISHED = "this run has finished; raise train.epochs or train.steps to go on, or start anew with --fresh"


def report_start(reporter: Reporter, request: Request, job: Job, total_steps: int) -> None:
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
        accumulate=len(plan_step(Cursor(), length=job.batch.size, sharding=job.loader.sharding).spans),
        shards=train.shards if train.exact == "elastic" else None,
        precision=train.precision,
        lr=job.peak_lr,
        epochs=train.epochs or (per_epoch and -(-total_steps // per_epoch)),
        total_steps=total_steps,
    )


def report_resume(
    reporter: Reporter, found: Found, batch: Batch, request: Request, facts: Mapping[str, Any]
) -> None:
    for path, reason in found.skipped:
        reporter.report("warning", message=f"the checkpoint {path} was skipped: {reason}")
    if found.non_finite is not None:
        message = (
            f"no checkpoint is finite: {found.non_finite} of {found.path} is not; start anew with --fresh"
        )
        reporter.report("warning", message=message)
    step = found.progress.step
    reporter.report("resume", step=step, epoch=found.progress.cursor.epoch + 1, path=str(found.path))
    if batch.note is not None:
        reporter.report("note", message=batch.note)
    if resets_optimizer(found.facts, request):
        reporter.report(
            "note",
            message=f"the optimizer starts anew at step {step} (--optim.reset); the weights are kept",
        )
    for change in changes(found.facts, facts, request):
        reporter.report("warning", message=change)


def report_end(reporter: Reporter, request: Request, loop: Loop) -> None:
    job = loop.job
    loop.notices.report(reporter)
    # On several nodes the command that goes on is the launcher's, which a rank does not know.
    is_one_node = job.ddp.world_size == job.ddp.local_world_size
    two_nodes = two_node_command(request.task, request.command, procs=job.ddp.local_world_size)
    reporter.report(
        "end",
        step=loop.progress.step,
        epoch=loop.epoch(),
        seconds=loop.pace.seconds_since_start(),
        samples_per_s=loop.pace.samples_per_s,
        data_share=min(1.0, job.loader.waited_s / max(loop.pace.seconds, 1e-9)),
        metrics=loop.metrics,
        best_step=best(
            loop.checkpoints, metric=job.task.best_metric, higher_is_better=job.task.higher_is_better
        ),
        stragglers=loop.notices.stragglers,
        run=str(request.run),
        resume_command=resume_command(request.command, procs=job.ddp.world_size) if is_one_node else None,
        two_node_command=two_nodes if is_one_node else None,
    )


def leave_preempted(reporter: Reporter, folder: RunFolder, loop: Loop) -> None:
    """Collective: leave a marker, tell the user, and part together, so that no rank is ended before all is written."""
    ddp, step, cause = loop.job.ddp, loop.progress.step, loop.preemption.cause
    if ddp.is_main_process():
        write_whole(folder.preempted_file, json.dumps({"step": step, **cause}, indent=1) + "\n")
    reporter.report(
        "preempted", step=step, signal=cause["signal"], told_rank=cause["rank"], told_host=cause["host"]
    )
    loop.preemption.leave()
    ddp.barrier()
