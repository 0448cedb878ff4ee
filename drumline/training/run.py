"""A whole run on one rank, from its folder to its last event."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, assert_never

import torch

from drumline.base.errors import ExitCode, UsageError, log
from drumline.config.config_file import to_toml
from drumline.config.schema import Config
from drumline.parallel.blocks import describe_blocks
from drumline.parallel.recompute import recomputed_blocks
from drumline.rank.collectives import gather_json
from drumline.rank.determinism import explain_refused_kernels
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.node_group import NodesChanged
from drumline.runs.events import Reporter
from drumline.runs.run_folder import RunFolder, locked, set_aside, write_whole
from drumline.training.between_steps.action import SimpleAction
from drumline.training.between_steps.actions import FirstStep
from drumline.training.between_steps.balance import make_balance
from drumline.training.between_steps.non_finite import NonFinite
from drumline.training.between_steps.preemption import (
    Preemption,
    report_preemption,
    watching_for_notice,
)
from drumline.training.between_steps.saver import FAILED_S, Saver
from drumline.training.between_steps.step_profiler import ProfiledStep
from drumline.training.between_steps.task_hooks import make_hooks
from drumline.training.between_steps.throughput import total_peak
from drumline.training.between_steps.trace import TracedStep
from drumline.training.failure_report import is_own, out_of_memory
from drumline.training.job.initial_weights import load_initial_weights
from drumline.training.job.job import (
    Job,
    Progress,
    build_job,
    check_streams,
    choose_batch,
    choose_step,
    count_steps,
)
from drumline.training.job.local_data import with_local_data
from drumline.training.kept_state import (
    KeptState,
    check_continues,
    check_newest,
    compare_group,
    keep_state,
    report_regrouped,
    restore_kept,
)
from drumline.training.loop import Loop, between_steps
from drumline.training.manager import DDPManager
from drumline.training.output import (
    StartClock,
    WatchNotices,
    divert_output,
    open_reporter,
    report_end,
    report_start,
    undo_divert,
)
from drumline.training.replica_state import AgreedStep, SyncedStep
from drumline.training.resume import (
    begin_launch,
    find_newest,
    report_recovery,
    report_resume,
    resume,
)
from drumline.training.run_context import RunContext, RunRequest, facts_of
from drumline.training.steps.capture_checks import find_unsafe
from drumline.training.steps.choice import TrialFile, make_step
from drumline.training.steps.eager import AnyStep
from drumline.training.steps.warm_up import warm_up
from drumline.training.tasks.base import Task
from drumline.training.tasks.built_in import unused_settings
from drumline.training.tasks.other_libraries import uncalled_methods
from drumline.watch.heartbeat import Phase


def train(
    request: RunRequest,
    task_class: type[Task],
    ddp: DDPManager,
    progress: Progress,
    preemption: Preemption | None = None,
    clock: StartClock | None = None,
    live: LiveNodes | None = None,
    kept: KeptState | None = None,
) -> ExitCode:
    """Collective: train to the last step, or until the run is preempted. The caller can read
    `progress` meanwhile; `clock` has run since the command. `live`: raise NodesChanged when a node
    is lost, or joins; the next call continues from what was `kept`."""
    config = request.config
    folder = RunFolder(request.run)
    clock = clock or StartClock()
    preemption = preemption or Preemption()
    with ExitStack() as stack, _failure_in_heartbeat(ddp):
        # The folder, the failure that ended the previous start, and the checkpoint to resume from.
        continues = live is not None and live.latest.generation > 0
        reporter = _open_folder(request, folder, ddp, progress, stack, restores=not continues)
        if ddp.is_main_process() and not task_class.__module__.startswith("drumline."):
            for message in uncalled_methods(task_class):
                reporter.report("warning", message=message)
        group_state = (
            compare_group(kept, ddp, is_sharded=config.dist.mode == "hsdp") if continues else None
        )
        failure = None if continues else begin_launch(folder, ddp)
        stack.enter_context(watching_for_notice(config.watch.notice, ddp, preemption))
        found = None if continues else find_newest(ddp, folder.checkpoints)
        saved = None if found is None else found.facts
        if group_state is not None:
            saved = group_state.furthest["facts"]
            if ddp.is_main_process():
                check_newest(folder.checkpoints, group_state)
        clock.mark("folder")

        # Data, model and optimizer, compared across ranks.
        batch = choose_batch(config.train, world_size=ddp.world_size, saved=saved)
        begin = None
        if saved is None and config.model.init is not None:
            begin = partial(load_initial_weights, config.model, ddp=ddp, report=reporter.report)
        step = choose_step(config, ddp.device, saved)
        local = config if config.data.dir is None else with_local_data(config, ddp)
        built = partial(clock.mark, "data")
        with explain_out_of_memory(config, ddp):
            job = build_job(
                local, task_class(local), ddp, batch, step=step, on_data=built, on_model=begin
            )
        stack.callback(job.close)
        clock.mark("model")

        # The run's position, and its last step.
        at = Progress() if found is None else found.progress
        if group_state is not None:
            at = group_state.progress
        total_steps = count_steps(job, config.train, at)
        hooks = None
        if task_class.hooks is not Task.hooks:
            hooks = make_hooks(job, config, folder.path, reporter.report, total_steps)
        context = RunContext(request, job, progress, reporter, total_steps, hooks)
        facts = facts_of(request, job, before=saved, step=at.step)
        if found is not None:
            resume(context, found)
        if group_state is not None:
            restore_kept(context, group_state, kept)
        elif live is not None:
            check_continues(job)
        clock.mark("checkpoint")

        # Records of this start in the folder.
        ranks = _write_environment(context)
        report_start(context)
        if blocks := recomputed_blocks(job.model):
            context.note(f"recompute: {describe_blocks(blocks)}")
        if job.sharded is not None:
            context.note(f"shards: {job.sharded.describe_blocks()}")
        if config.dist.mode != "ddp" and ddp.world_size == 1:
            context.note(
                f"dist.mode {config.dist.mode} has no effect: one process holds the whole model"
            )
        if config.dist.comm != "none" and ddp.world_size == 1:
            context.note(
                f"dist.comm {config.dist.comm} has no effect: one process sends no gradients"
            )
        if config.dist.sync != "step" and job.sync is None:
            context.note(f"dist.sync {config.dist.sync} has no effect: there is one replica")
        if found is not None:
            report_resume(context, found, facts)

        # The steps, and what happens between them.
        notices = WatchNotices(ddp._connection.watch_folder if ddp.is_main_process() else None)
        non_finite = NonFinite(context)
        match config.data.balance:
            case "off":
                balance = None
            case "auto":
                balance = make_balance(context, non_finite, facts, saved)
            case _:
                assert_never(config.data.balance)
        before = [] if group_state is None else group_state.states
        saver = Saver(context, facts=facts, check_state=non_finite.check_state, before=before)
        stack.callback(
            lambda: saver.close(preemption.time_left_s() if progress.is_stopping else FAILED_S)
        )
        preemption.is_writing = lambda: saver.writer.is_busy
        with explain_refused_kernels(), explain_out_of_memory(config, ddp, job), saver:
            if at.step < context.total_steps:
                check_streams(job)
                if (
                    flops := warm_up(job, config, note=context.note, warn=context.warn)
                ) is not None:
                    context.throughput.model_flops = flops
                    if ddp.device.type == "cuda":
                        context.throughput.peak_tflop_per_s = total_peak(ranks, flops.arithmetic)
            else:
                reason = "" if progress.stopped is None else f" ({progress.stopped['reason']})"
                ended = f"was stopped at step {progress.step}{reason}" if reason else "has finished"
                context.note(
                    f"this run {ended}; raise train.epochs or train.steps, or start a new one with --fresh"
                )
            clock.mark("warm-up")
            train_step, trace = _make_step(context, facts, stack, live)
            profiled = None if config.log.profile is None else ProfiledStep(train_step, context)
            first_step = FirstStep(
                partial(_after_first_step, context, facts, clock, failure, live, kept)
            )
            actions = between_steps(
                context,
                train_step,
                first_step,
                non_finite,
                notices,
                trace,
                saver,
                preemption,
                balance,
            )
            keep = partial(keep_state, context, facts, saver)
            if live is not None:
                live.guard_connections()
                actions.insert(
                    0,
                    SimpleAction(
                        "leave", lambda _: live.ends, partial(_leave_group, keep), interval=0
                    ),
                )
            with _failure_in_hooks(context), _lost_node_ends_group(live, keep):
                if kept is not None:
                    kept.release()
                context.call_hooks("start")
                if hooks is not None:
                    hooks.capture()  # what cannot be saved is refused before the first step
                Loop(context, profiled or train_step, saver.ledger, actions).run()
                if not progress.is_stopping:
                    if profiled is not None:
                        profiled.finish()
                    saver.finish()
                    context.call_hooks("end")
        ddp._connection.heartbeat.mark(Phase.LEAVING)

        # The end.
        if progress.is_stopping:
            report_preemption(context, preemption)
            return ExitCode.PREEMPTED
        report_end(context, notices)
        return ExitCode.SUCCESS


@contextmanager
def _failure_in_heartbeat(ddp: DDPManager) -> Iterator[None]:
    """Mark a failure in the heartbeat before anything is closed, since closing may block."""
    try:
        yield
    except (Exception, SystemExit) as error:
        ddp._connection.note_failure(error)
        raise


@contextmanager
def _failure_in_hooks(context: RunContext) -> Iterator[None]:
    """Call the hooks of a rank that fails; not where it only lost another one."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if context.hooks is not None and is_own(error):
            context.job.ddp._connection.note_failure(error)  # a hook may block
            context.hooks.fail(
                error, step=context.progress.step, epoch=context.epoch, metrics=context.metrics
            )
        raise


def _leave_group(keep: Callable[[], KeptState], context: RunContext) -> None:
    """Not collective: the group of nodes ends after this step."""
    raise NodesChanged(keep())


@contextmanager
def _lost_node_ends_group(live: LiveNodes | None, keep: Callable[[], KeptState]) -> Iterator[None]:
    """Between steps: where a collective fails because a node is lost, keep what this rank has."""
    try:
        yield
    except RuntimeError as error:
        if live is None or not live.is_lost(error):
            raise
        raise NodesChanged(keep()) from error


@contextmanager
def explain_out_of_memory(
    config: Config, ddp: DDPManager, job: Job | None = None
) -> Iterator[None]:
    """Name the setting that needs less memory. `job`: None while it is built."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error, ddp, config, job) from error


def _open_folder(
    request: RunRequest,
    folder: RunFolder,
    ddp: DDPManager,
    progress: Progress,
    stack: ExitStack,
    *,
    restores: bool,
) -> Reporter:
    """Collective: rank 0 creates and locks the folder; the others then write to log files in it,
    not to the screen. `restores`: from the mirror, if the run has one and the folder no
    checkpoint."""
    moved_to = None
    if has_mirror := restores and request.config.checkpoint.mirror is not None:
        from drumline.training.between_steps.mirroring import (  # few runs need it
            refuse_used_mirror,
            restore_from_mirror,
        )
    if ddp.is_main_process():
        # A launcher that restarts a failed job passes the same flags: --fresh must not start a new
        # run.
        if request.fresh and not ddp.is_restart:
            if has_mirror:
                refuse_used_mirror(request)
            moved_to = set_aside(folder)
        undo_divert()  # another rank may have been the first before
        folder.make()
        try:
            stack.enter_context(locked(folder))
        except UsageError as error:
            if restores:
                raise
            # One that is stopped, and a lost host for a while, keep the lock.
            log.warning(
                f"{error.what}: it was lost, and this run continues without the lock; end that process"
            )
    restored = restore_from_mirror(request, folder, ddp) if has_mirror else []
    ddp.barrier()
    if not ddp.is_main_process():
        folder.make()
        divert_output(folder.log_file(ddp.rank))
    reporter = stack.enter_context(open_reporter(request.config, folder, ddp, progress))
    if moved_to is not None:
        reporter.report("note", message=f"moved the earlier run to {moved_to}")
    for kind, message in restored:
        reporter.report(kind, message=message)
    return reporter


def _write_environment(context: RunContext) -> list[dict[str, Any]]:
    """Collective: record the command, versions, hosts and devices. Returns the ranks."""
    ddp = context.job.ddp
    folder = context.folder
    is_gpu = ddp.device.type == "cuda"
    device = torch.cuda.get_device_name(ddp.device) if is_gpu else platform.machine() or "cpu"
    gpu = str(torch.cuda.get_device_properties(ddp.device).uuid) if is_gpu else None
    mine = {"rank": ddp.rank, "host": ddp.host, "pid": os.getpid(), "device": device, "gpu": gpu}
    ranks = gather_json(mine, device=ddp.device)
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


def _make_step(
    context: RunContext, facts: dict[str, Any], stack: ExitStack, live: LiveNodes | None
) -> tuple[AnyStep, TracedStep | None]:
    """Collective: the step; if it is traced, also as a TracedStep."""
    job = context.job
    is_auto = context.job.step == "auto"
    hooks = [] if context.hooks is None else context.hooks.hooks
    is_default = is_auto and facts["config"]["train.step"] is None
    # A module's hook may be on one rank alone, and all ranks must try the same kinds.
    captures = job.step not in ("eager", "compile")
    reason = find_unsafe(job, context.config, hooks, is_default=is_default) if captures else None
    reasons = gather_json(reason, device=job.ddp.device) if captures else []
    step = make_step(
        job,
        context.config,
        chosen=facts["step"],
        num_steps=context.total_steps - context.progress.step,
        is_default=is_default,
        uncaptured=next(filter(None, reasons), None),
        trials=stack.enter_context(TrialFile(context.folder.trial_file, job.ddp))
        if is_auto
        else None,
        on_choice=partial(facts.__setitem__, "step"),
        note=context.note,
    )
    if job.sync is not None:
        step = SyncedStep(step, job.sync, context, live)
    elif live is not None:
        step = AgreedStep(step, live, context)
    if not context.config.log.trace:
        return step, None
    traced = TracedStep(step, context)
    stack.callback(traced.close)
    traced.start()
    return traced, traced


def _after_first_step(
    context: RunContext,
    facts: Mapping[str, Any],
    clock: StartClock,
    failure: Mapping[str, Any] | None,
    live: LiveNodes | None,
    kept: KeptState | None,
) -> None:
    """Write the settings of the run and their history. Not before the first step: a refused start
    changes nothing."""
    folder = context.folder
    step = context.progress.step
    loader = context.job.loader
    context.throughput.end_start(waited_s=loader.waited_s, tokens=loader.num_tokens)
    if context.job.ddp.is_main_process():
        header = f"drumline train {context.request.task} --config {folder.config_file}"
        left_out = unused_settings(type(context.job.task), context.config)
        write_whole(folder.config_file, to_toml(context.config, header=header, left_out=left_out))
        if facts["history"]:
            write_whole(
                folder.settings_history, "".join(f"{json.dumps(one)}\n" for one in facts["history"])
            )
        else:  # the changes belonged to steps that were lost
            folder.settings_history.unlink(missing_ok=True)
    if live is not None and live.latest.generation > 0:
        report_regrouped(context, live.latest, kept)
    else:
        clock.report(context.reporter, step=step)
    if failure is not None:
        report_recovery(failure, context.reporter, step=step)
