"""Profiles some steps of a run (`log.profile`): torch.profiler's trace of every rank, in
RUN/profile."""

from __future__ import annotations

from types import CodeType

from drumline.config.fields import flag_text
from drumline.config.rules import profiled_steps
from drumline.data.delivery import Delivery
from drumline.data.loader import Step
from drumline.data.sharding import spans_of_full_batch
from drumline.parallel.wrap import LiveBuffers
from drumline.rank.profiled.stack_sampler import END, code_of
from drumline.rank.profiled.trace_capture import TraceCapture
from drumline.runs.profile_files import BUFFERS, PROFILE_FOLDER, JobFacts
from drumline.runs.run_folder import writing_to
from drumline.training.between_steps.saver import Saver
from drumline.training.job.job import flat
from drumline.training.loop import CompareReplicas, Evaluate, LogTraining, Loop
from drumline.training.run_context import RunContext
from drumline.training.steps.eager import AnyStep, TrainStep
from drumline.training.steps.graph import GraphStep

WITHOUT = "train without --log.profile"
ADVISABLE = (
    "train.",
    "dist.",
    "data.",
    "model.activation_checkpointing",
    "optim.name",
    "log.every_steps",
    "watch.replicas_every",
    "checkpoint.every",
)
"""The settings that a profile records."""


class ProfiledStep:
    """A train step, of which some are profiled. Steps are counted from the start of this process.
    torch's profiler is started before the first of them, and stopped after the last."""

    def __init__(self, inner: AnyStep, context: RunContext) -> None:
        steps = profiled_steps(context.config.log.profile or "")
        assert steps is not None
        ddp = context.job.ddp

        self._inner = inner
        self._context = context
        self._folder = context.folder.path / PROFILE_FOLDER
        self._first_step = context.progress.step
        self._progress = context.progress
        self._steps = steps

        self._capture = TraceCapture(
            steps,
            self._folder,
            ddp.connection.topology,
            job_facts(context),
        )

        self._capture.modules = [context.job.applied]
        self._capture.optimizer = context.job.optimizer
        self._capture.optimizers = [context.job.optimizer]
        self._capture.phases = phases_of(context)

        context.throughput.on_pause = self._capture.add_pause

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        capture = self._capture
        if capture.is_done:
            capture.stop_late()
        else:
            with writing_to(self._folder, instead=WITHOUT):
                capture.begin_step(self._progress.step - self._first_step)
            if capture.is_recording:
                step = step._replace(micro_batches=capture.marked(step.micro_batches))

        self._inner(step)

    def close(self) -> None:
        """The run has ended, also by an error or a lost node."""
        self._capture.close()

    def finish(self) -> None:
        """Collective: rank 0 gets the files of the ranks whose folder it does not see, and reports
        if no step was profiled."""
        with writing_to(self._folder, instead=WITHOUT):
            try:
                self._capture.finish()
            except OSError:
                self._capture.collect()  # the other ranks wait for this one
                raise

            if self._capture.is_done:
                self._capture.collect()

        if not self._capture.is_done:
            self._context.warn(
                f"nothing was profiled: the run ended before step {self._steps.start} of this start"
            )


def phases_of(context: RunContext) -> dict[CodeType | None, str]:
    """The functions with which the phases of the loop begin, each with its name in the profile."""
    hooks = context.hooks.defining("after_step")
    return {
        code_of(Loop.run): END,
        code_of(Delivery.deliver): "to the device",
        code_of(context.job.task.on_device): "on_device",
        code_of(TrainStep._forward): "forward",
        code_of(TrainStep._backward): "backward",
        code_of(LiveBuffers.broadcast): BUFFERS,
        code_of(TrainStep._update): "optimizer",
        code_of(GraphStep.__call__): "captured step",
        code_of(LogTraining.run): "log",
        code_of(CompareReplicas.run): "comparison of replicas",
        code_of(Evaluate.run): "evaluation",
        code_of(Saver.save_step): "save",
        **{code_of(hook.after_step): f"hook {type(hook).__name__}" for hook in hooks},
    }


def job_facts(context: RunContext) -> JobFacts:
    """What a profile records about the run: its advice refers to these settings."""
    config = context.config
    job = context.job
    throughput = context.throughput

    settings = {
        name: value
        for name, value in flat(config).items()
        if name.startswith(ADVISABLE) and value is not None
    }

    step_tflop = None
    if throughput.model_flops is not None:
        step_tflop = throughput.model_flops.of(samples=job.batch.size, tokens=None) / 1e12

    return JobFacts(
        task=context.request.task,
        batch_size=job.batch.size,
        accumulate=len(spans_of_full_batch(job.loader.sharding)),
        precision=config.train.precision,
        bucket_cap_mb=config.dist.bucket_cap_mb,
        settings={name: flag_text(value) for name, value in settings.items()},
        step_tflop=step_tflop,
        peak_tflop_per_s=throughput.peak_tflop_per_s,
    )
