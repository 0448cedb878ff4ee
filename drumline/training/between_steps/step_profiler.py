"""Profiles some steps of a run (`log.profile`): torch.profiler's trace of every rank, in
RUN/profile."""

from __future__ import annotations

from torch import Tensor

from drumline.config.fields import flag_text
from drumline.config.schema import Config, profiled_steps
from drumline.data.loader import Step
from drumline.data.sharding import Cursor, plan_step
from drumline.rank.watched.trace_capture import TraceCapture
from drumline.runs.profile_files import PROFILE_FOLDER, JobFacts
from drumline.runs.run_folder import writing_to
from drumline.training.job.job import Job, flat
from drumline.training.run_context import RunContext
from drumline.training.steps.eager import AnyStep

WITHOUT = "train without --log.profile"
ADVISABLE = ("train.", "dist.", "data.", "model.activation_checkpointing")
"""The settings that a profile records."""


class ProfiledStep:
    """A train step, of which some are profiled. Steps are counted from the start of this
    process."""

    def __init__(self, inner: AnyStep, context: RunContext) -> None:
        steps = profiled_steps(context.config.log.profile or "")
        assert steps is not None
        ddp = context.job.ddp
        self._inner = inner
        self._context = context
        self._folder = context.folder.path / PROFILE_FOLDER
        self._first_step = context.progress.step
        self._progress = context.progress
        self._num_pauses = 0
        self._steps = steps
        self.grad_norm: Tensor | None = None
        self._capture = TraceCapture(
            steps,
            self._folder,
            rank=ddp.rank,
            world_size=ddp.world_size,
            local_world_size=ddp.local_world_size,
            host=ddp.host,
            job=job_facts(context.request.task, context.config, context.job),
        )
        self._capture.modules = [context.job.applied]

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        capture = self._capture
        if not capture.is_done:
            self._leave_out_paused()
            with writing_to(self._folder, instead=WITHOUT):
                capture.begin_step(self._progress.step - self._first_step)
            if capture.is_recording:
                step = step._replace(micro_batches=capture.marked(step.micro_batches))
        self._inner(step)
        self.grad_norm = self._inner.grad_norm

    def _leave_out_paused(self) -> None:
        """An evaluation or a save after the latest step is not a part of it."""
        num_pauses = self._context.throughput.num_pauses
        if self._capture.is_recording and num_pauses != self._num_pauses:
            self._capture.left_out.append(self._progress.step - self._first_step - 1)
        self._num_pauses = num_pauses

    def finish(self) -> None:
        """Collective: rank 0 gets the files of the ranks whose folder it does not see."""
        device = self._context.job.ddp.device
        self._leave_out_paused()
        with writing_to(self._folder, instead=WITHOUT):
            try:
                self._capture.finish()
            except OSError:
                self._capture.collect(device)  # the other ranks wait for this one
                raise
            if self._capture.is_done:
                self._capture.collect(device)
        if not self._capture.is_done:
            self._context.warn(
                f"nothing was profiled: the run ended before step {self._steps.start} of this start"
            )


def job_facts(task: str, config: Config, job: Job) -> JobFacts:
    settings = {
        name: value
        for name, value in flat(config).items()
        if name.startswith(ADVISABLE) and value is not None
    }
    return JobFacts(
        task=task,
        batch_size=job.batch.size,
        accumulate=len(
            plan_step(Cursor(), length=job.batch.size, sharding=job.loader.sharding).spans
        ),
        precision=config.train.precision,
        bucket_cap_mb=config.dist.bucket_cap_mb,
        settings={name: flag_text(value) for name, value in settings.items()},
    )
