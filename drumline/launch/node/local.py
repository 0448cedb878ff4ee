"""Starts the ranks of one machine through torchrun's elastic agent, and reports how they ended.

The machine is all of the job, or one node of it. The agent supervises: when one rank fails it ends the others, and
restarts all as often as it may. A rank of a task has reported its error itself; here only what it could not report
(killed by a signal) is added. A script is named with its exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.errors import ExitCode
from drumline.launch.node import guard
from drumline.launch.node.standby import Standby
from drumline.launch.node.watch_folder import SidecarDiagnosis, WatchFolder
from drumline.launch.node_plan import NodePlan, Program, Supervision
from drumline.launch.startup import (
    ENDING_SIGNALS,
    INTERRUPTED_EARLY,
    default_procs,
    exit_handler,
    interrupted,
    load_torch_quietly,
    set_handler,
)
from drumline.net.interfaces import check_is_own
from drumline.terminal import print_message
from drumline.text import signal_name

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# All that a task's rank loads before it knows what to do.
RANK_MODULE = "drumline.cli.train_rank"
# Read by torch's agent: the signals that end it and its ranks.
HANDLED_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
HANG_ENDED = "the job was stopped; rerun the same command to resume from the newest checkpoint"
STOPPED = "interrupted; all ranks were stopped"
STOPPED_EARLY = "stopped before the first step; rerun the same command to resume"


def run_ranks(num_procs: int, arguments: Sequence[str], *, max_restarts: int, run: Path) -> ExitCode:
    """Run `python -m drumline ARGUMENTS` on `num_procs` ranks of this machine, to the end. `run`: the run folder."""
    node = NodePlan(num_procs=num_procs, max_restarts=max_restarts)
    program = Program(tuple(arguments), is_task=True, run=str(run))
    return ExitCode(run_node(node, program, log_dir=run / "logs"))


def run_node(
    node: NodePlan, program: Program, *, log_dir: Path | None = None, supervision: Supervision | None = None
) -> int:
    """Run this node's ranks to the end; the exit code is that of the rank that failed first."""
    if node.num_nodes > 1 and node.node_rank == 0:
        check_is_own(node.endpoint)
    # While there are no ranks yet to hand a signal on to; the guard ends what there is.
    preempted = exit_handler(ExitCode.PREEMPTED, STOPPED_EARLY)
    stopped = exit_handler(ExitCode.INTERRUPTED, INTERRUPTED_EARLY if program.is_task else STOPPED)
    set_handler(signal.SIGINT, stopped)
    set_handler(signal.SIGTERM, preempted if program.is_task else stopped)
    set_handler(signal.SIGUSR1, preempted)
    supervision = supervision or Supervision()
    os.environ[guard.JOB_ENV] = supervision.job
    watch, code = WatchFolder(supervision.job), None
    watcher = guard.Guard(supervision.job, supervision.grace_s, folder=str(watch.root or ""))
    try:
        code = _run_guarded(node, program, log_dir, supervision, watch)
        return code
    finally:
        # The agent's handlers raise, which is of no use any more: from here on the guard does the rest alone.
        for number in (signal.SIGTERM, signal.SIGINT):
            set_handler(number, signal.SIG_DFL)
        watcher.close(has_succeeded=code == ExitCode.SUCCESS)
        watch.close()


def _run_guarded(
    node: NodePlan, program: Program, log_dir: Path | None, supervision: Supervision, watch: WatchFolder
) -> int:
    load_torch_quietly(computes=False)
    from torch.distributed.elastic.multiprocessing import SignalException

    from drumline.launch.node.agent import Preempted

    # The agent would add its own table and traceback below ours.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    num_procs = node.num_procs or default_procs()
    _limit_threads(num_procs)
    handled = [number.name for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    if len(handled) < len(ENDING_SIGNALS):  # under nohup torch would end with the terminal
        os.environ.setdefault(HANDLED_SIGNALS, ",".join(handled))
    is_here = supervision.folder is None  # the user reads this output; else the controller reports
    try:
        result, diagnosis = _run_agent(node, num_procs, program, supervision, watch)
    except Preempted as preempted:
        if not preempted.was_reported and is_here:
            print_message(STOPPED_EARLY)
        return ExitCode.PREEMPTED
    except (SignalException, KeyboardInterrupt):
        if is_here:
            # On several nodes it is rank 0's host that has the checkpoints.
            run = Path(program.run) if program.run and node.num_nodes == 1 else None
            print_message(interrupted(run, program.words) if program.is_task else STOPPED)
        return ExitCode.INTERRUPTED
    if not result.is_failed():
        return ExitCode.SUCCESS
    rank, failure = _first_failure(result)
    if is_here:
        report_failure(rank, failure.exitcode, program, diagnosis, log_dir)
    if diagnosis is not None and diagnosis.is_hang:
        return ExitCode.HANG
    return exit_code_of(failure.exitcode, is_task=program.is_task)


def _run_agent(
    node: NodePlan, num_procs: int, program: Program, supervision: Supervision, watch: WatchFolder
) -> tuple[RunResult, SidecarDiagnosis | None]:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher.api import LaunchConfig

    from drumline.launch.node.agent import NodeAgent
    from drumline.launch.node.open_rendezvous import address_of, open_rendezvous

    if node.num_nodes > 1:  # from here on the other nodes are informed
        set_handler(signal.SIGINT, signal.default_int_handler)
        set_handler(signal.SIGTERM, signal.SIG_DFL)
    # For what it knows of this machine: which cores are near which GPU.
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=num_procs)
    rendezvous = open_rendezvous(node, supervision.secret)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=num_procs,
        entrypoint=sys.executable,
        args=tuple(program.python_arguments()),
        rdzv_handler=rendezvous,
        max_restarts=node.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=address_of(node),
        numa_options=config.numa_options,
    )
    with tempfile.TemporaryDirectory(prefix="drumline-agent-") as scratch:
        agent = NodeAgent(spec=spec, is_task=program.is_task, supervision=supervision, scratch=scratch, watch=watch)
        try:
            result: RunResult = agent.run()
            agent.check_preempted(agent.preempt_signal)
        except SignalException as error:
            agent.read_last_diagnosis()
            rendezvous.leave()  # and no more: this node may come back, and the others' rendezvous stays open
            agent.check_preempted(error.sigval)
            raise
        except BaseException:
            rendezvous.shutdown()
            raise
        finally:
            if supervision.standby:
                supervision.standby.close()
            rendezvous.warn_of_missing_nodes()
        if result.is_failed() and not agent.has_saved(result):
            rank, failure = _first_failure(result)
            what, code = f"rank {rank} failed ({how_it_ended(failure.exitcode)})", ExitCode.TRAINING_FAILED
            if agent.diagnosis is not None and agent.diagnosis.is_hang:
                what, code = agent.diagnosis.sentence, ExitCode.HANG
            rendezvous.publish_failure(what, code)
        rendezvous.shutdown()
    return result, agent.diagnosis


def _first_failure(result: RunResult) -> tuple[int, ProcessFailure]:
    return min(result.failures.items(), key=lambda item: item[1].timestamp)


def _limit_threads(num_procs: int) -> None:
    """Ranks that each use all cores would only slow each other down."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_procs)))


def standby_for(program: Program, num_procs: int | None, *, at_once: bool) -> Standby | None:
    """The processes in which a task's ranks will begin; `at_once`: already started, so they load torch while the agent
    does. None for a script, and where the number of ranks is not known before torch is loaded."""
    if not program.is_task or num_procs is None:
        return None
    _limit_threads(num_procs)
    standby = Standby(program.python_arguments(), module=RANK_MODULE, count=num_procs)
    if at_once:
        standby.fill(at_once=True)
    return standby


def load_agent() -> None:
    """Import what a node's agent needs, before there is anything to run: most of the time it takes to start."""
    load_torch_quietly(computes=False)
    import drumline.launch.node.agent  # noqa: F401


# How they ended


def how_it_ended(code: int) -> str:
    """`exit code 7`, or `killed by SIGKILL`."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal_name(-code)}"


def exit_code_of(rank_code: int, *, is_task: bool) -> int:
    """The launcher's exit code after a rank exited with this; a signal is a failure like others."""
    known = rank_code in list(ExitCode) if is_task else rank_code > 0
    return rank_code if known else ExitCode.TRAINING_FAILED


def report_failure(
    rank: int, code: int, program: Program, diagnosis: SidecarDiagnosis | None, log_dir: Path | None
) -> None:
    """What the user reads last, where the rank could not report it."""
    if diagnosis is not None and diagnosis.explains_more(code, is_task=program.is_task):
        if not diagnosis.was_printed:
            print_message(diagnosis.sentence)
        if diagnosis.is_hang and program.is_task:
            print_message(HANG_ENDED)
    elif not program.is_task:
        script, how = program.words[0], how_it_ended(code)
        print_message(f"{script} failed on rank {rank} ({how}); the other ranks were stopped")
    elif code < 0:
        log = None if log_dir is None else log_dir / f"rank-{rank:05d}.log"
        hint = [f"next: see {log}"] if log is not None and log.exists() else []
        print_message(f"rank {rank} was {how_it_ended(code)}; the others were stopped", *hint)
