"""The events at the start and at the end of a run: what it is, how long it took to its first step, what came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drumline.checkpoint.retention import best
from drumline.data.sharding import Cursor, plan_step
from drumline.engine.notices import WatchNotices
from drumline.engine.preemption import Preemption
from drumline.engine.resume import FoundCheckpoint
from drumline.engine.run_context import RunContext
from drumline.engine.run_folder import write_whole
from drumline.engine.run_settings import changes, resets_optimizer
from drumline.launch.node_plan import resume_command, two_node_command
from drumline.launch.rank_environment import command_start, now, process_start
from drumline.metrics.events import Reporter


@dataclass
class StartClock:
    """Divides the time from the command to the end of the first step into parts: each stage of the start marks its end.
    No later step pays for it."""

    began: float = field(default_factory=now)
    since: str = "rank"
    """What began then: the `command`, or only this `rank`."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds by name, in the order of the run."""

    def mark(self, part: str) -> None:
        """All time since the last mark belongs to this part."""
        past = sum(self.parts.values())
        self.parts[part] = self.parts.get(part, 0.0) + now() - self.began - past

    def report(self, reporter: Reporter, *, step: int) -> None:
        """After the first step, once the device has finished it."""
        self.mark("first step")
        seconds = sum(self.parts.values())
        reporter.report("first_step", step=step, seconds=seconds, since=self.since, parts=self.parts)


def start_clock(environment: Mapping[str, str], *, is_alone: bool) -> StartClock:
    """The clock of this rank, once all that it needs is loaded. `is_alone`: this process is the command."""
    own = process_start()
    start = own if is_alone else command_start(environment)
    clock = StartClock(own if start is None else start, "rank" if start is None else "command")
    if clock.began < own:
        clock.parts["launcher"] = own - clock.began
    clock.mark("python and torch")
    return clock


def report_start(context: RunContext) -> None:
    request, job = context.request, context.job
    train, world_size, per_epoch = request.config.train, job.ddp.world_size, job.loader.steps_per_epoch
    context.reporter.report(
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
        epochs=train.epochs or (per_epoch and -(-context.total_steps // per_epoch)),
        total_steps=context.total_steps,
    )


def report_resume(context: RunContext, found: FoundCheckpoint, facts: Mapping[str, Any]) -> None:
    step = found.progress.step
    for path, reason in found.skipped:
        context.warn(f"the checkpoint {path} was skipped: {reason}")
    if found.non_finite is not None:
        context.warn(
            f"no checkpoint is finite: {found.non_finite} of {found.path} is not; start a new run with --fresh"
        )
    context.reporter.report("resume", step=step, epoch=found.progress.cursor.epoch + 1, path=str(found.path))
    if context.job.batch.note is not None:
        context.note(context.job.batch.note)
    if resets_optimizer(found.facts, context.request):
        context.note(f"the optimizer is reset at step {step} (--optim.reset); the weights are kept")
    for change in changes(found.facts, facts, context.request):
        context.warn(change)


def report_end(context: RunContext, notices: WatchNotices) -> None:
    request, job, ddp = context.request, context.job, context.job.ddp
    throughput = context.throughput
    notices.report(context.reporter)
    # On several nodes the command to resume with is the launcher's, which a rank does not know.
    is_one_node = ddp.world_size == ddp.local_world_size
    two_nodes = two_node_command(request.task, request.command, procs=ddp.local_world_size)
    context.reporter.report(
        "end",
        step=context.progress.step,
        epoch=context.epoch,
        seconds=throughput.seconds_since_start(),
        samples_per_s=throughput.samples_per_s,
        data_share=min(1.0, job.loader.waited_s / max(throughput.seconds, 1e-9)),
        metrics=context.metrics,
        best_step=best(
            context.folder.checkpoints, metric=job.task.best_metric, higher_is_better=job.task.higher_is_better
        ),
        stragglers=notices.stragglers,
        run=str(request.run),
        resume_command=resume_command(request.command, procs=ddp.world_size) if is_one_node else None,
        two_node_command=two_nodes if is_one_node else None,
    )


def report_preemption(context: RunContext, preemption: Preemption) -> None:
    """Collective: leave a marker, report, and wait for each other, so that no rank exits before all is written."""
    ddp, step, cause = context.job.ddp, context.progress.step, preemption.cause
    if ddp.is_main_process():
        write_whole(context.folder.preempted_file, json.dumps({"step": step, **cause}, indent=1) + "\n")
    context.reporter.report(
        "preempted", step=step, signal=cause["signal"], told_rank=cause["rank"], told_host=cause["host"]
    )
    preemption.ignore_signals()
    ddp.barrier()
