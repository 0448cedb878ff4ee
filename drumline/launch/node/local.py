"""Starts the ranks of one machine, through torchrun's own elastic agent, and says how they ended.

The machine is all of the job, or one node of it. The agent supervises: when one rank fails it ends the others, and
starts all again as often as it may. What went wrong with a task was already told by the rank that failed; here only
what a rank could not tell itself (killed by a signal) is added. A script of the user's own is named with its exit code.
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
from drumline.launch.interrupts import (
    ENDING_SIGNALS,
    INTERRUPTED_EARLY,
    Handler,
    exit_handler,
    interrupted,
    set_handler,
)
from drumline.launch.node import guard
from drumline.launch.node.standby import Standby
from drumline.launch.node.supervision import Supervision
from drumline.launch.node.watch_folder import Ruling, WatchFolder
from drumline.launch.node_plan import NodePlan, Program
from drumline.launch.torch_import import LateModule, loading
from drumline.net.interfaces import check_is_own
from drumline.terminal import print_message

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

STORE_LOG = "TORCH_CPP_LOG_LEVEL"
# All that a task's rank loads before it knows what it is to do.
RANK_MODULE = "drumline.cli.train_rank"
# What torch knows of tensors without data takes a third of its import, and is for compilers.
TENSOR_RULES = "torch._meta_registrations"
# Read by torch's agent: what ends it and its ranks.
HEEDED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# Ranks of a task that end so would end so again.
FINAL_CODES = frozenset({ExitCode.USAGE, ExitCode.PREFLIGHT_FAILED, ExitCode.HANG})
ENDED = "the job was ended; the same command goes on from the newest checkpoint"
STOPPED = "interrupted; all ranks were stopped"
TOO_EARLY = "told to leave before the first step; the same command goes on from where the run stood"


def default_procs() -> int:
    """One rank per GPU, or one on a machine without."""
    _load_torch_quietly(computes=True)  # when it is one, that will be this process
    import torch

    return max(1, torch.cuda.device_count())


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
    for number, early in _early_handlers(program).items():
        set_handler(number, early)
    terms = supervision or Supervision()
    os.environ[guard.VARIABLE] = terms.job
    watch, code = WatchFolder(terms.job), None
    watcher = guard.Guard(terms.job, terms.grace_s, folder=str(watch.root or ""))
    try:
        code = _run_guarded(node, program, log_dir, terms, watch)
        return code
    finally:
        # The agent's handlers raise, which is of no use any more: from here on the guard does the rest alone.
        for number in (signal.SIGTERM, signal.SIGINT):
            set_handler(number, signal.SIG_DFL)
        watcher.close(in_order=code == ExitCode.SUCCESS)
        watch.close()


def _run_guarded(
    node: NodePlan, program: Program, log_dir: Path | None, terms: Supervision, watch: WatchFolder
) -> int:
    _load_torch_quietly(computes=False)
    from torch.distributed.elastic.multiprocessing import SignalException

    from drumline.launch.node.leaving_agent import LeftAsTold

    # The agent would add its own table and traceback below ours.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    num_procs = node.num_procs or default_procs()
    _limit_threads(num_procs)
    heeded = [number.name for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    if len(heeded) < len(ENDING_SIGNALS):  # under nohup torch would heed the end of a terminal
        os.environ.setdefault(HEEDED, ",".join(heeded))
    try:
        result, ruling = _run_agent(node, num_procs, program, terms, watch)
    except LeftAsTold as left:
        if not left.has_told and terms.folder is None:
            print_message(TOO_EARLY)
        return ExitCode.PREEMPTED
    except (SignalException, KeyboardInterrupt):
        if terms.folder is None:
            # On several nodes it is rank 0's host that has the checkpoints.
            run = Path(program.run) if program.run and node.num_nodes == 1 else None
            print_message(interrupted(run, program.words) if program.is_task else STOPPED)
        return ExitCode.INTERRUPTED
    if not result.is_failed():
        return ExitCode.SUCCESS
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    if terms.folder is not None:
        code = exit_code_of(failure.exitcode, is_task=program.is_task)  # the controller tells of it
    elif ruling is not None and ruling.tells_more(failure.exitcode, is_task=program.is_task):
        code = _pass_on(ruling, failure.exitcode, is_task=program.is_task)
    elif program.is_task:
        code = _explain(rank, failure.exitcode, log_dir)
    else:
        code = _explain_script(rank, failure.exitcode, program.words[0])
    return ExitCode.HANG if ruling is not None and ruling.is_hang else code


def _early_handlers(program: Program) -> dict[signal.Signals, Handler]:
    """While there are no ranks yet to pass a signal on to; the guard takes away what there is."""
    leave = exit_handler(ExitCode.PREEMPTED, TOO_EARLY)
    message = INTERRUPTED_EARLY if program.is_task else STOPPED
    return {
        signal.SIGINT: exit_handler(ExitCode.INTERRUPTED, message),
        signal.SIGTERM: leave if program.is_task else exit_handler(ExitCode.INTERRUPTED, STOPPED),
        signal.SIGUSR1: leave,
    }


def _run_agent(
    node: NodePlan, num_procs: int, program: Program, terms: Supervision, watch: WatchFolder
) -> tuple[RunResult, Ruling | None]:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.launcher.api import LaunchConfig

    from drumline.launch.node.meeting import address_of, open_rendezvous
    from drumline.launch.node.rendezvous import FixedRanks
    from drumline.launch.node.watched_agent import WatchedAgent

    if node.num_nodes > 1:  # from here on the other nodes are informed
        set_handler(signal.SIGINT, signal.default_int_handler)
        set_handler(signal.SIGTERM, signal.SIG_DFL)
    # For what it knows of this machine: which cores are near which GPU.
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=num_procs)
    rendezvous = open_rendezvous(node, terms.secret)
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
        agent = WatchedAgent(
            spec=spec,
            supervision=terms,
            scratch=scratch,
            watch=watch,
            final_codes=FINAL_CODES if program.is_task else (),
            is_task=program.is_task,
            goes_on="they resume from the newest checkpoint" if program.is_task else "the script begins anew",
        )
        agent.standby = terms.standby
        try:
            result: RunResult = agent.run()
            agent.check_left_as_told(agent.told)
        except SignalException as error:
            agent.last_look()
            # This node may come back: the others' meeting place stays open.
            if isinstance(rendezvous, FixedRanks):
                rendezvous.roll.sign_out()  # a thread in the store as Python ends would abort the process
            agent.check_left_as_told(error.sigval)
            raise
        except BaseException:
            rendezvous.shutdown()
            raise
        finally:
            if agent.standby:
                agent.standby.close()
            if isinstance(rendezvous, FixedRanks):
                rendezvous.remind()
        if isinstance(rendezvous, FixedRanks) and result.is_failed() and not agent.has_left(result):
            rendezvous.tell_failure(*_how_it_failed(result, agent.ruling))
        rendezvous.shutdown()
    return result, agent.ruling


def _limit_threads(num_procs: int) -> None:
    """Several ranks that each take all cores would only fight for them."""
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
    """What a node's agent is made of, before there is anything to run: most of the time it takes to start."""
    _load_torch_quietly(computes=False)
    import drumline.launch.node.watched_agent  # noqa: F401


def _load_torch_quietly(*, computes: bool) -> None:
    """PyTorch's store tells of a lost connection with a stack of its own code; ours is one sentence. Ranks, which are
    told nothing of this, speak as before. `computes`: whether this process may come to work on tensors."""
    if "torch" in sys.modules:
        return
    if not computes:
        sys.modules[TENSOR_RULES] = LateModule(TENSOR_RULES)
    is_ours = STORE_LOG not in os.environ
    os.environ.setdefault(STORE_LOG, "ERROR")
    with loading():
        import torch.distributed.launcher.api  # noqa: F401

    if is_ours:
        del os.environ[STORE_LOG]


def _how_it_failed(result: RunResult, ruling: Ruling | None) -> tuple[str, ExitCode]:
    """For the other nodes."""
    if ruling is not None and ruling.is_hang:
        return ruling.sentence, ExitCode.HANG
    rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
    return f"rank {rank} failed ({how_it_ended(failure.exitcode)})", ExitCode.TRAINING_FAILED


def how_it_ended(code: int) -> str:
    """`exit code 7`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"killed by {known.get(-code, f'signal {-code}')}"


def _pass_on(ruling: Ruling, rank_code: int, *, is_task: bool) -> int:
    if not ruling.was_told:
        print_message(ruling.sentence)
    if ruling.is_hang and is_task:
        print_message(ENDED)
    return exit_code_of(rank_code, is_task=is_task)


def _explain(rank: int, exit_code: int, log_dir: Path | None) -> ExitCode:
    if exit_code < 0:
        log = None if log_dir is None else log_dir / f"rank-{rank:05d}.log"
        hint = [f"next: see {log}"] if log is not None and log.exists() else []
        print_message(f"rank {rank} was {how_it_ended(exit_code)}; the others were stopped", *hint)
    return ExitCode(exit_code_of(exit_code, is_task=True))


def exit_code_of(rank_code: int, *, is_task: bool) -> int:
    """What the launcher ends with after a rank ended with this; a signal is a failure like others."""
    known = rank_code in list(ExitCode) if is_task else rank_code > 0
    return rank_code if known else ExitCode.TRAINING_FAILED


def _explain_script(rank: int, exit_code: int, script: str) -> int:
    print_message(f"{script} failed on rank {rank} ({how_it_ended(exit_code)}); the other ranks were stopped")
    return exit_code_of(exit_code, is_task=False)
