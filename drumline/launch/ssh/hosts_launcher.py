"""Runs a job on several hosts from one command: attempt after attempt, then the last lines and the
exit code.

The agents of the hosts restart ranks without this process. When an agent, a supervisor or a host is
lost, so is the rendezvous: then the attempt ends on all hosts, and the next one begins if a restart
is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from drumline.base.errors import ExitCode
from drumline.base.startup import interrupted
from drumline.base.text import plural
from drumline.launch.keep_going import next_pause_s, waiting_sentence
from drumline.launch.node.local import STOPPED, STOPPED_BETWEEN, exit_code_of
from drumline.launch.ssh.client import last_line
from drumline.launch.ssh.controller import PREEMPT_SIGNALS, Controller
from drumline.launch.ssh.host_connection import RankFailure
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.screen import Screen

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGHUP, *PREEMPT_SIGNALS)


def run_on_hosts(job: HostsJob) -> int:
    """Run the job to its end; returns the exit code, when everything is printed."""
    return with_screen(lambda screen: run_attempts(job, screen))


def with_screen(run: Callable[[Screen], Coroutine[Any, Any, T]]) -> T:
    """Returns when everything is printed."""
    sys.stdout.flush()
    screen = Screen()
    try:
        return asyncio.run(run(screen))
    finally:
        screen.close()


@contextlib.contextmanager
def handling(
    numbers: Iterable[signal.Signals], handle: Callable[[signal.Signals], None]
) -> Iterator[None]:
    """Have these signals call it. Under nohup SIGHUP stays ignored."""
    loop = asyncio.get_running_loop()
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def run_attempts(job: HostsJob, screen: Screen) -> int:
    """Run attempts until one ends by itself, or another could not help."""
    screen.report(f"{plural(len(job.hosts), 'host')}; logs in {job.logs} on each")
    current = Controller(job, screen)
    was_signalled = asyncio.Event()

    def handle(number: signal.Signals) -> None:
        """For the attempt of that moment, and for the pause before the next."""
        current.interrupted(number)
        was_signalled.set()

    with handling(SIGNALS, handle):
        await current.run()
        pause_s = 0.0
        while current.end_signal is None:
            if not current.lost:
                why = why_to_resume(current) if job.keep_going else ""
                if not why:
                    break

                screen.report(why, is_error=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(was_signalled.wait(), pause_s)

            await current.close()
            if was_signalled.is_set():
                break

            if current.lost:
                current = _restarted(current)
            else:  # it counts as no restart
                restarts_used = current.job.nodes[0].restarts_used
                current = _next_attempt(current, restarts_used, _full_disks(current))

            begun_at = time.monotonic()
            await current.run()
            pause_s = next_pause_s(pause_s, time.monotonic() - begun_at)

        # a signal while connections close does not change how it ended
        code = conclude(current)
        await current.close()
    return code


def why_to_resume(ended: Controller) -> str:
    """With --keep-going: why an attempt that ended may be followed by another, on the same hosts;
    empty: it may not."""
    if ended.end_signal is not None or ended.problems or not ended.job.program.is_task:
        return ""
    if all(remote.was_preempted for remote in ended.remaining):
        return "warning: preempted by a signal or a notice to a rank, and saved; resuming on the same hosts"

    for host, folder in _full_disks(ended).items():
        return waiting_sentence(folder, host=host)

    return ""


def _full_disks(ended: Controller) -> dict[str, str]:
    """By the address of a host: the folder whose disk was full."""
    failures = [failure for remote in ended.remaining for failure in remote.failures]
    return {failure.host: failure.full_disk for failure in failures if failure.full_disk}


def _restarted(lost: Controller) -> Controller:
    """The next attempt, after a host or its agent was lost."""
    max_restarts = lost.job.nodes[0].max_restarts
    used = max_restarts - lost.restarts_left + 1
    how = "the script starts from the beginning"
    if lost.job.program.is_task:
        how = "resuming from the newest checkpoint"
    lost.warn(f"{lost.lost}; restarting all ranks (restart {used} of {max_restarts}), {how}")
    return _next_attempt(lost, used, {})


def _next_attempt(
    ended: Controller, restarts_used: int, full_disks: Mapping[str, str]
) -> Controller:
    """On the hosts that the ended attempt had last."""
    num_starts = [remote.num_starts for remote in ended.remotes]
    job = ended.job.again(
        [remote.host for remote in ended.remotes],
        ended.reconnect.spares,
        restarts_used=restarts_used,
        reached_step=ended.reached_step,
        first_start=max(ended.job.first_start, *num_starts),
        full_disks=full_disks,
    )
    return Controller(job, ended.screen, ended.reconnect.last_heard)


# How it ended


def conclude(controller: Controller) -> int:
    """Print the last lines; returns the exit code."""
    code = _report_end(controller)
    if code:
        controller.screen.report_last(f"logs in {controller.job.logs} on each host")
    else:
        controller.screen.report(f"done; logs in {controller.job.logs} on each host")
    return code


def _report_end(controller: Controller) -> int:
    """Print how it ended; the exit code."""
    for error in controller.problems:
        what, *further_lines = error.lines()
        controller.screen.report_last(f"error: {what}", *further_lines)

    stopped_code = _report_stop(controller)
    if stopped_code is not None:
        return stopped_code

    failed_code = _report_failures(controller)
    if failed_code is not None:
        return failed_code

    if controller.problems:
        return controller.problems[0].exit_code

    first = controller.ended_first
    if first is None or first.code is None:
        return ExitCode.SUCCESS

    if not any(remote.failures for remote in controller.remaining):
        controller.screen.report_last(*first.end_lines())
    return exit_code_of(first.code, is_task=True)


def _report_stop(controller: Controller) -> int | None:
    """The exit code of a job that was preempted or interrupted; None: it was not."""
    screen = controller.screen
    program = controller.job.program
    end_signal = controller.end_signal
    # All ranks of a task have saved and exited, on whichever host the signal came. Ctrl-C asks for
    # no save.
    have_saved = program.is_task and all(remote.was_preempted for remote in controller.remaining)
    if have_saved and end_signal in (None, *PREEMPT_SIGNALS):
        source = end_signal.name if end_signal else "a signal or a notice to a rank"
        screen.report_last(
            f"preempted by {source}; the ranks have saved: rerun the same command to resume"
        )
        return ExitCode.PREEMPTED

    if end_signal is None:
        return None

    if program.is_task and end_signal in PREEMPT_SIGNALS and _is_between_starts(controller):
        screen.report_last(STOPPED_BETWEEN)
        return ExitCode.PREEMPTED

    screen.report_last(interrupted(None, program.words) if program.is_task else STOPPED)
    return ExitCode.INTERRUPTED


def _report_failures(controller: Controller) -> int | None:
    """The exit code of the rank that failed first; None: no rank failed, or a host was lost
    before."""
    remaining = controller.remaining
    is_task = controller.job.program.is_task
    diagnoses = [remote.diagnosis for remote in remaining if remote.diagnosis is not None]
    diagnosis = next(iter(diagnoses), None)
    failures = in_order(
        [failure for remote in remaining for failure in remote.failures],
        blamed=diagnosis.rank if diagnosis else None,
    )
    if not failures:
        return None

    first_code = failures[0].code
    # A rank's own last lines remain the last.
    if diagnosis is not None and diagnosis.explains_more(first_code, is_task=True):
        controller.screen.report_last(diagnosis.sentence)
        return ExitCode.HANG if diagnosis.is_hang else exit_code_of(first_code, is_task=is_task)

    # A lost host was lost some time after its last frame.
    heard_at = [remote.connection.heard_at for remote in remaining if remote.code is None]
    lost_first = bool(controller.problems and heard_at) and min(heard_at) <= failures[0].failed_at
    for lines in last_messages(failures, controller.num_ranks, lost_first=lost_first):
        controller.screen.report_last(*lines)

    return None if lost_first else exit_code_of(first_code, is_task=is_task)


def _is_between_starts(controller: Controller) -> bool:
    """With --keep-going: whether no rank runs, because a disk is full, or because the next attempt
    has not begun."""
    job = controller.job
    has_begun = controller.has_started or not job.earlier
    return job.keep_going and (not has_begun or bool(_full_disks(controller)))


def in_order(failures: Sequence[RankFailure], *, blamed: int | None = None) -> list[RankFailure]:
    """Sorted, the first failure first: the rank that a diagnosis blames, then by what ranks of a
    task report about each other, then by time."""
    return sorted(
        failures,
        key=lambda failure: (
            failure.rank != blamed,
            failure.is_follower,
            failure.failed_at,
            failure.rank,
        ),
    )


def last_messages(
    failures: Sequence[RankFailure], num_ranks: int, *, lost_first: bool = False
) -> Iterator[tuple[str, ...]]:
    """What the user reads last: the first failure with its error, and all others in one line.
    `failures`: the first one first. `lost_first`: a lost host, which was reported already, came
    first."""
    later = list(failures)
    if not lost_first:
        first = later.pop(0)
        if error := first.error or last_line(first.last_lines):
            above = f"try: read the lines above that begin with [{first.host} {first.rank}]"
            yield f"{first} failed first: {error}", above
        else:
            yield (f"{first} failed first",)

    parts = [f"{failure} failed after it" for failure in later[:3]]
    if len(later) > 3:
        parts.append(f"{len(later) - 3} more failed")
    if (stopped := num_ranks - len(failures)) > 0:
        parts.append(f"{plural(stopped, 'rank')} {'were' if stopped > 1 else 'was'} stopped")
    if parts:
        yield (f"the others: {'; '.join(parts)}",)
