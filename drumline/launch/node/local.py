"""Starts the ranks of one machine through torchrun's elastic agent, and reports how they ended.

The machine runs the whole job, or one node of it. When one rank fails, the agent ends the others
and restarts all, up to the limit. A rank of a task has reported its error itself; here only what it
could not report (killed by a signal) is added. For a script, its name and exit code are reported.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from drumline.base import startup
from drumline.base.errors import ExitCode, Place
from drumline.base.rank_environment import ErrorRecord, write_error
from drumline.base.startup import use_private_cache
from drumline.base.text import how_it_ended, print_message
from drumline.launch.node.guard import JOB_ENV, Guard
from drumline.launch.node_plan import NodePlan, Program, Supervision
from drumline.net.interfaces import check_is_own
from drumline.watch.watch_folder import SidecarDiagnosis, WatchFolder, claim_report

# A variable of torch's agent: the signals that end it and its ranks.
HANDLED_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
HANG_ENDED = "the job was stopped; rerun the same command to resume from the newest checkpoint"
STOPPED = "interrupted; all ranks were stopped"
STOPPED_BETWEEN = "stopped while no rank was running; rerun the same command to resume"
INTERRUPTED_BETWEEN = "interrupted while no rank was running; rerun the same command to resume"
STOPPED_EARLY = "stopped before the first step; rerun the same command to resume"


def run_node(node: NodePlan, program: Program, supervision: Supervision) -> int:
    """Run this node's ranks to the end; the exit code is that of the rank that failed first."""
    if node.num_nodes > 1 and node.node_rank == 0:
        check_is_own(node.master_addr)
    use_private_cache()

    # Until there are ranks to pass a signal on to; the guard ends the other processes.
    interrupted = startup.INTERRUPTED_EARLY if program.is_task else STOPPED
    _exit_on_signals(STOPPED_EARLY, interrupted, is_task=program.is_task)

    os.environ[JOB_ENV] = supervision.job
    watch = WatchFolder(supervision.job)
    code = None
    guard = Guard(supervision.job, supervision.grace_s, folder=str(watch.root or ""))
    try:
        code = _run_guarded(node, program, supervision, watch)
        return code
    finally:
        # The agent's handlers raise exceptions, which are not needed any more: the guard does the
        # rest.
        for number in (signal.SIGTERM, signal.SIGINT):
            startup.set_handler(number, signal.SIG_DFL)
        guard.close(has_succeeded=code == ExitCode.SUCCESS)
        watch.close()


def exit_between_starts() -> None:
    """With --keep-going, while a task waits for its next start: a signal ends this process, which
    has no ranks."""
    _exit_on_signals(STOPPED_BETWEEN, INTERRUPTED_BETWEEN, is_task=True)


def _exit_on_signals(when_preempted: str, when_interrupted: str, *, is_task: bool) -> None:
    """The messages with which a signal ends this process."""
    preempted = startup.exit_handler(ExitCode.PREEMPTED, when_preempted)
    interrupted = startup.exit_handler(ExitCode.INTERRUPTED, when_interrupted)
    startup.set_handler(signal.SIGINT, interrupted)
    startup.set_handler(signal.SIGTERM, preempted if is_task else interrupted)
    startup.set_handler(signal.SIGUSR1, preempted)


def _run_guarded(
    node: NodePlan,
    program: Program,
    supervision: Supervision,
    watch: WatchFolder,
) -> int:
    """Run the ranks with torch's agent, and report how they ended."""
    startup.load_torch_quietly()
    from torch.distributed.elastic.multiprocessing import SignalException

    from drumline.launch.node.agent import first_failure, run_agent
    from drumline.launch.node.node_rendezvous import Preempted

    # Otherwise the agent would print its own table and traceback below ours.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)

    num_procs = node.num_procs or startup.default_procs()
    limit_threads(num_procs)
    _ignore_in_torch()
    if node.num_nodes > 1:  # from here on the other nodes are informed
        startup.set_handler(signal.SIGINT, signal.default_int_handler)
        startup.set_handler(signal.SIGTERM, signal.SIG_DFL)

    # Whether the user sees this output; otherwise the controller reports.
    is_here = supervision.folder is None
    try:
        result, diagnosis = run_agent(node, num_procs, program, supervision, watch)
    except Preempted as preempted:
        if preempted.was_signalled:
            supervision.report("signalled")
        if preempted.has_saved:
            supervision.report("saved")
        if not preempted.was_reported and is_here:
            print_message(STOPPED_EARLY)
        return ExitCode.PREEMPTED
    except (SignalException, KeyboardInterrupt):
        supervision.report("signalled")
        if is_here:
            # On several nodes it is rank 0's host that has the checkpoints.
            run = Path(program.run) if program.run and node.num_nodes == 1 else None
            print_message(startup.interrupted(run, program.words) if program.run else STOPPED)
        return ExitCode.INTERRUPTED

    if not result.is_failed():
        return ExitCode.SUCCESS

    rank, failure = first_failure(result, diagnosis)
    if is_here:
        report_failure(rank, failure.exitcode, program, diagnosis, watch.current)
    if diagnosis is not None and diagnosis.is_hang:
        return ExitCode.HANG
    return exit_code_of(failure.exitcode, is_task=program.is_task)


def _ignore_in_torch() -> None:
    """Have torch's agent ignore the signals that are ignored here: under nohup it would end with
    the terminal."""
    ending_signals = startup.ENDING_SIGNALS
    handled = [
        number.name for number in ending_signals if signal.getsignal(number) is not signal.SIG_IGN
    ]
    os.environ.setdefault(HANDLED_SIGNALS, ",".join(handled))


def limit_threads(num_procs: int) -> None:
    """Limit CPU threads: ranks that each use all cores would slow each other down."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_procs)))


# How they ended


def exit_code_of(rank_code: int, *, is_task: bool) -> int:
    """The launcher's exit code after a rank exited with this code; a signal is a failure."""
    is_meaningful = rank_code in list(ExitCode) if is_task else rank_code > 0
    return rank_code if is_meaningful else ExitCode.TRAINING_FAILED


def report_failure(
    rank: int,
    code: int,
    program: Program,
    diagnosis: SidecarDiagnosis | None,
    folder: Path | None = None,
) -> None:
    """Print the last message, if the rank could not report its failure. `folder`: of the watch, if
    there is one."""
    if diagnosis is not None and diagnosis.explains_more(code, is_task=program.is_task):
        if not diagnosis.was_printed:
            print_message(diagnosis.sentence)
        if diagnosis.is_hang and program.run:
            print_message(HANG_ENDED)
        write_error(os.environ, ErrorRecord(diagnosis.sentence, None, Place()))
        return

    has_reported = program.is_task and code >= 0
    if has_reported or (folder is not None and not claim_report(folder)):
        return

    how = how_it_ended(code)
    if not program.is_task:
        print_message(
            f"{program.words[0]} failed on rank {rank} ({how}); the other ranks were stopped"
        )
        return

    what = f"rank {rank} was {how}; the others were stopped"
    log = Path(program.run or "", "logs", f"rank-{rank:05d}.log")
    next_step = f"read {log}" if program.run and log.exists() else None
    print_message(what, *([f"try: {next_step}"] if next_step else []))
    write_error(os.environ, ErrorRecord(what, next_step, Place()))
