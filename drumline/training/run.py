"""A whole run on one rank, from its folder to its last event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.base.errors import ExitCode, UsageError, log
from drumline.rank.collectives import all_sum, gather_json
from drumline.rank.determinism import explain_refused_kernels
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.node_group import NodesChanged
from drumline.runs.run_folder import RunFolder, locked, set_aside
from drumline.training.between_steps.balance import Balance
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.preemption import Preemption, report_preemption
from drumline.training.between_steps.saver import FAILED_S, Saver
from drumline.training.between_steps.spot_notice import watching_for_notice
from drumline.training.between_steps.step_profiler import ProfiledStep
from drumline.training.between_steps.throughput import total_peak
from drumline.training.between_steps.trace import TracedStep
from drumline.training.failure_report import is_own, out_of_memory
from drumline.training.job.evaluation_job import with_local_data
from drumline.training.job.initial_weights import load_initial_weights
from drumline.training.job.job import Progress, build_job, check_streams, count_steps
from drumline.training.kept_state import (
    GroupState,
    KeptState,
    check_continues,
    check_newest,
    compare_group,
    keep_state,
    report_regrouped,
    restore_kept,
)
from drumline.training.loop import Loop, between_steps
from drumline.training.manager import RunManager
from drumline.training.output import (
    StartClock,
    WatchNotices,
    divert_output,
    notes_on_settings,
    open_reporter,
    report_end,
    report_start,
    undo_divert,
    write_environment,
    write_settings,
)
from drumline.training.replica_state import agreed_step, synced_step
from drumline.training.resume import (
    FoundCheckpoint,
    begin_launch,
    facts_of,
    find_newest,
    report_recovery,
    report_resume,
    resume,
)
from drumline.training.run_context import (
    AT_EPOCH_END,
    RunContext,
    RunRequest,
    SimpleAction,
    make_hooks,
)
from drumline.training.steps.choice import StepOptions, TrialFile, find_unsafe, make_step
from drumline.training.steps.eager import AnyStep
from drumline.training.steps.warm_up import warm_up
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import uncalled_methods
from drumline.watch.heartbeat import Phase


@dataclass
class Regrouping:
    """The nodes of `--dist.on_lost_node continue`, and what this rank kept of the group before."""

    live: LiveNodes | None = None
    """None: a lost node restarts all."""

    kept_state: KeptState | None = None
    """None: this rank was in no group before, or trains in the first."""

    @property
    def is_continued(self) -> bool:
        """Whether this rank's nodes have trained as another group before."""
        return self.live is not None and self.live.latest.generation > 0


@dataclass(eq=False)
class TrainingRun:
    """A run on this rank: its phases, in the order in which `train` calls them, and what they
    share: each phase sets what later ones read. The next group of nodes is another TrainingRun."""

    request: RunRequest
    task_class: type[Task]
    ddp: RunManager
    progress: Progress
    """The caller can read it meanwhile."""

    preemption: Preemption = field(default_factory=Preemption)
    clock: StartClock = field(default_factory=StartClock)
    """It has run since the command."""

    regrouping: Regrouping = field(default_factory=Regrouping)
    """Of nodes: NodesChanged is raised when one is lost, or joins; the next run continues from what
    this rank then kept."""

    def __post_init__(self) -> None:
        self.config = self.request.config
        self.folder = RunFolder(self.request.run)
        self.resources = ExitStack()

    def train(self) -> ExitCode:
        """Collective: to the last step, or until the run is preempted."""
        with self.resources, self._failure_in_heartbeat():
            self.open_folder()
            self.find_start()
            self.build()
            self.restore()
            self.record_start()
            self.open_saver()

            with explain_refused_kernels(), self.saver:
                self.warm_up_model()
                self.run_loop(self.build_loop())

            return self.report_result()

    @contextmanager
    def _failure_in_heartbeat(self) -> Iterator[None]:
        """Mark a failure in the heartbeat before anything is closed, since closing may block."""
        connection = self.ddp.connection
        try:
            yield
        except torch.OutOfMemoryError as error:
            connection.note_failure(error)
            raise out_of_memory(error, self.config, self.ddp, getattr(self, "job", None)) from error
        except (Exception, SystemExit) as error:
            connection.note_failure(error)
            raise

    def open_folder(self) -> None:
        """Collective: rank 0 creates and locks the folder; the others then write to log files in
        it, not to the screen. The mirror is restored, if the run has one and the folder no
        checkpoint. From here on there are events."""
        ddp = self.ddp
        has_mirror = self.config.checkpoint.mirror is not None and not self.regrouping.is_continued
        moved_to = self._claim_folder(has_mirror=has_mirror) if ddp.is_main_process() else None

        restored = []
        if has_mirror:
            from drumline.training.between_steps.mirroring import restore_from_mirror

            restored = restore_from_mirror(self.request, self.folder, ddp)

        ddp.barrier()

        if not ddp.is_main_process():
            self.folder.make()
            divert_output(self.folder.log_file(ddp.rank))

        opened = open_reporter(self.config, self.folder, ddp, self.progress)
        self.reporter = self.resources.enter_context(opened)
        if moved_to is not None:
            self.reporter.report("note", message=f"moved the earlier run to {moved_to}")

        for kind, message in restored:
            self.reporter.report(kind, message=message)

        if ddp.is_main_process() and not self.task_class.__module__.startswith("drumline."):
            for message in uncalled_methods(self.task_class):
                self.reporter.report("warning", message=message)

    def _claim_folder(self, *, has_mirror: bool) -> Path | None:
        """On rank 0: make and lock the folder. Returns where an earlier run was moved to, with
        `--fresh`."""
        moved_to = None

        # A launcher that restarts a failed job passes the same flags: --fresh must not start a new
        # run.
        if self.request.fresh and not self.ddp.is_restart:
            if has_mirror:
                from drumline.training.between_steps.mirroring import refuse_used_mirror

                refuse_used_mirror(self.request)

            moved_to = set_aside(self.folder)

        undo_divert()  # another rank may have been the first before
        self.folder.make()
        try:
            self.resources.enter_context(locked(self.folder))
        except UsageError as error:
            if not self.regrouping.is_continued:
                raise

            # One that is stopped, and a lost host for a while, keep the lock.
            log.warning(
                f"{error.what}: it was lost, and this run continues without the lock; end that process"
            )

        return moved_to

    def find_start(self) -> None:
        """Collective: the checkpoint to resume from, or how far the nodes of this group are. A spot
        notice is watched for from here on."""
        ddp = self.ddp
        root = self.folder.checkpoints

        # On rank 0: what ended the previous start of the run.
        self.failure: Mapping[str, Any] | None = None
        if not self.regrouping.is_continued:
            self.failure = begin_launch(self.folder, ddp)

        notice = self.config.watch.notice
        if notice is not None and ddp.get_local_rank() == 0:
            self.resources.enter_context(watching_for_notice(notice, self.preemption.notice))

        # At a checkpoint, at what the nodes kept in memory, or (None) at step 0.
        self.start: FoundCheckpoint | GroupState | None
        if self.regrouping.is_continued:
            is_sharded = self.config.dist.mode == "hsdp"
            self.start = compare_group(self.regrouping.kept_state, ddp, is_sharded=is_sharded)
            if ddp.is_main_process():
                check_newest(root, self.start)
        else:
            self.start = find_newest(ddp, root)

        self.clock.mark("folder")

    def build(self) -> None:
        """Collective: data, model and optimizer, compared across ranks. A new run begins with the
        weights of `model.init`, if that is set."""
        config = self.config
        ddp = self.ddp
        saved = None if self.start is None else self.start.facts

        load_weights = None
        if saved is None and config.model.init is not None:
            load_weights = partial(
                load_initial_weights, config.model, ddp=ddp, report=self.reporter.report
            )

        local = with_local_data(config, ddp)
        self.job = build_job(
            local,
            self.task_class(local),
            ddp,
            saved=saved,
            on_data=partial(self.clock.mark, "data"),
            on_model=load_weights,
        )

        self.resources.callback(self.job.close)
        self.clock.mark("model")

    def restore(self) -> None:
        """Collective: the run's position, its last step, and the state of job and hooks, from a
        checkpoint or from what the nodes kept in memory."""
        start = self.start
        job = self.job

        progress = Progress() if start is None else start.progress
        total_steps = count_steps(job, self.config.train, progress)

        hooks = make_hooks(
            job,
            self.config,
            self.folder.path,
            self.reporter.report,
            total_steps,
            self.progress,
        )

        self.context = RunContext(
            self.request, job, self.progress, self.reporter, total_steps, hooks
        )

        before = None if start is None else start.facts
        self.facts = facts_of(self.request, job, before=before, step=progress.step)
        if isinstance(start, FoundCheckpoint):
            resume(self.context, start)

        if isinstance(start, GroupState):
            restore_kept(self.context, start, self.regrouping.kept_state)
        elif self.regrouping.live is not None:
            check_continues(job)

        self.clock.mark("checkpoint")

    def record_start(self) -> None:
        """Collective: the records of this start in the folder: hosts and versions, the `start`
        event, and what has changed if it resumes."""
        context = self.context
        self.ranks = write_environment(context)
        report_start(context)
        for message in notes_on_settings(self.job, self.config):
            context.note(message)

        if isinstance(self.start, FoundCheckpoint):
            report_resume(context, self.start, self.facts)

    def open_saver(self) -> None:
        """Collective: what watches over the steps and saves them. It is closed at the end, however
        the run ends."""
        ddp = self.ddp
        self.notices = WatchNotices(ddp.connection.watch_folder if ddp.is_main_process() else None)

        self.non_finite = NonFinite(self.context)
        self.balance: Balance | None = None

        if self.config.data.balance == "auto" and ddp.world_size > 1:
            saved = None if self.start is None else self.start.facts
            self.balance = Balance(self.context, self.non_finite, self.ranks, self.facts, saved)

        positions: list[Mapping[str, Any]] = []
        if isinstance(self.start, GroupState):
            positions = list(self.start.positions.values())

        self.saver = Saver(
            self.context,
            facts=self.facts,
            check_state=self.non_finite.check_state,
            before=positions,
        )

        self.resources.callback(self._close_saver)
        writer = self.saver.writer
        self.preemption.write_with(lambda: writer.is_busy)

    def _close_saver(self) -> None:
        """Wait for the mirror, as long as the reason for the end allows."""
        is_stopping = self.progress.is_stopping
        self.saver.close(self.preemption.time_left_s() if is_stopping else FAILED_S)

    def warm_up_model(self) -> None:
        """Collective: before the first step; a run that has finished takes none."""
        context = self.context
        if self.progress.step >= context.total_steps:
            self._note_finished()
        else:
            check_streams(self.job)
            flops = warm_up(self.job, self.config, note=context.note)
            context.throughput.model_flops = flops
            if flops is not None and self.ddp.device.type == "cuda":
                peak = total_peak(self.ranks, flops.arithmetic)
                context.throughput.peak_tflop_per_s = peak

        self.clock.mark("warm-up")

    def _note_finished(self) -> None:
        """There is no step to take: what the user can do about it."""
        end = "has finished"
        if self.progress.stopped is not None:
            reason = self.progress.stopped["reason"]
            end = f"was stopped at step {self.progress.step} ({reason})"

        self.context.note(
            f"this run {end}; raise train.epochs or train.steps, or start a new one with --fresh"
        )

    def build_loop(self) -> Loop:
        """Collective: the step, and what happens between steps. Not an attribute: its actions
        refer to this object, and a cycle would hold the memory of a lost group."""
        step, traced = self._compose_step()

        self.profiled: ProfiledStep | None = None
        if self.config.log.profile is not None:
            self.profiled = ProfiledStep(step, self.context)
            self.resources.callback(self.profiled.close)

        # First, so that the folder has the settings of this step even if a later hook fails.
        first_step = SimpleAction(
            "first_step",
            due=lambda step: self.context.throughput.start_s is None,
            run=self._after_first_step,
            interval=AT_EPOCH_END,
        )

        actions = between_steps(
            self.context,
            self.non_finite,
            self.saver,
            self.preemption,
            notices=self.notices,
            trace=traced,
            balance=self.balance,
        )
        actions.insert(0, first_step)

        live = self.regrouping.live
        if live is not None:
            live.guard_connections()
            actions.insert(0, self._leave_group(live))

        return Loop(self.context, self.profiled or step, self.saver.ledger, actions)

    def _compose_step(self) -> tuple[AnyStep, TracedStep | None]:
        """Collective: from the inside out, a kind of step; around it the rounds of replicas, or
        that all nodes have their gradients before an update; around that the trace, if there is
        one."""
        step = self._make_step()
        live = self.regrouping.live
        if self.job.sync is not None:
            step = synced_step(step, self.job.sync, self.context, live)
        elif live is not None:
            step = agreed_step(step, live, self.context)

        if not self.config.log.trace:
            return step, None

        traced = TracedStep(step, self.context)
        self.resources.callback(traced.close)
        traced.start()

        return traced, traced

    def _make_step(self) -> AnyStep:
        """Collective: the step of the settings, or what `auto` has chosen or tries. What an earlier
        start has chosen, or failed with, is known from the checkpoint and the run folder."""
        job = self.job
        is_default = job.step_kind == "auto" and self.facts["config"]["train.step"] is None
        options = StepOptions(
            chosen=self.facts["step"],
            num_steps=self.context.total_steps - self.progress.step,
            is_default=is_default,
            uncaptured=self._reason_against_capture(is_default=is_default),
            on_choice=partial(self.facts.__setitem__, "step"),
            note=self.context.note,
        )

        if job.step_kind == "auto":
            trials = self.resources.enter_context(TrialFile(self.folder.trial_file, job.ddp))
            options = replace(options, failed=trials.failed, on_trial=trials.write)

        return make_step(job, self.config, options)

    def _reason_against_capture(self, *, is_default: bool) -> str | None:
        """Collective. A module's hook may be on one rank alone, and all ranks must try the same
        kinds of steps."""
        if self.job.step_kind in ("eager", "compile"):
            return None

        hooks = self.context.hooks.hooks
        reason = find_unsafe(self.job, self.config, hooks, is_default=is_default)
        reasons = gather_json(reason)

        return next(filter(None, reasons), None)

    def _leave_group(self, live: LiveNodes) -> SimpleAction:
        """Not collective: after this step the group of nodes ends."""

        def leave(context: RunContext) -> None:
            """NodesChanged carries what this rank keeps out of the loop."""
            raise NodesChanged(self._keep_state())

        return SimpleAction("leave", lambda step: live.ends, leave, interval=0)

    def _keep_state(self) -> KeptState:
        """What the next group of nodes continues from."""
        return keep_state(self.context, self.facts, self.saver)

    def run_loop(self, loop: Loop) -> None:
        """Collective: to the last step, or until an action ends the run. An error because of a lost
        node becomes `NodesChanged`, if the others can continue."""
        try:
            self._run_steps(loop)
        except (Exception, SystemExit) as error:
            live = self.regrouping.live
            if live is not None and isinstance(error, RuntimeError) and live.is_lost(error):
                raise NodesChanged(self._keep_state()) from error

            if is_own(error):  # a rank that only lost another one does not report it
                self.ddp.connection.note_failure(error)  # a hook may block
                self.context.hooks.fail(error)

            raise

    def _run_steps(self, loop: Loop) -> None:
        """Collective: all steps, with the hooks before and after."""
        context = self.context
        if self.regrouping.kept_state is not None:
            self.regrouping.kept_state.release()

        context.hooks.call("start")
        context.hooks.capture()  # what cannot be saved is refused before the first step

        loop.run()

        if self.progress.is_stopping:
            return

        if self.profiled is not None:
            self.profiled.finish()

        self.saver.finish()
        context.hooks.call("end")

    def _after_first_step(self, context: RunContext) -> None:
        """Collective: write the settings of the run and their history, when the device has finished the first
        step of this start. Not before: a refused start changes nothing."""
        if self.ddp.device.type == "cuda":
            torch.cuda.synchronize(self.ddp.device)

        loader = self.job.loader
        counts = [loader.waited_s, loader.num_tokens]
        on_device = torch.tensor(counts, dtype=torch.float64, device=self.ddp.device)
        waited_s, tokens = all_sum(on_device).tolist()
        context.throughput.end_start(waited_s=waited_s / self.ddp.world_size, tokens=tokens)

        if self.ddp.is_main_process():
            write_settings(context, self.facts["history"])

        step = self.progress.step
        live = self.regrouping.live
        if live is not None and self.regrouping.is_continued:
            report_regrouped(context, live.latest, self.regrouping.kept_state)
        else:
            self.clock.report(self.reporter, step=step)

        if self.failure is not None:
            report_recovery(self.failure, self.reporter, step=step)

    def report_result(self) -> ExitCode:
        """Collective: the last event of this start, and the exit code of the job."""
        self.ddp.connection.heartbeat.mark(Phase.LEAVING)
        if self.progress.is_stopping:
            report_preemption(self.context, self.preemption)
            return ExitCode.PREEMPTED

        report_end(self.context, self.notices)
        return ExitCode.SUCCESS
