"""Runs a job on several hosts to its end, from one command; where a host's part was lost, once more on all of them.

What the ranks of hosts that are there can mend, their agents do among themselves. When an agent, a supervisor or a host
is lost, there is nobody to meet: then the attempt ends everywhere and the next one begins, while restarts are left.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from drumline.launch.ssh.conclusion import conclude
from drumline.launch.ssh.controller import LEAVING, Controller
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.screen import Screen

SIGNALS = (signal.SIGINT, signal.SIGHUP, *LEAVING)


def run_on_hosts(job: HostsJob) -> int:
    """To the end; returns the exit code, when all that can be said has been said."""
    sys.stdout.flush()
    screen = Screen()
    try:
        return asyncio.run(run_attempts(job, screen))
    finally:
        screen.close()


async def run_attempts(job: HostsJob, screen: Screen) -> int:
    """Until one has ended by itself, or cannot be helped by another."""
    count, max_restarts = len(job.hosts), job.nodes[0].max_restarts
    screen.say(f"{count} host{'s' if count > 1 else ''}; logs in {job.logs} on each")
    current = Controller(job, screen)
    loop = asyncio.get_running_loop()
    # Under nohup, a terminal that goes away is none of our business.
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def heed(number: signal.Signals) -> None:
        current.interrupted(number)

    for number in heeded:
        loop.add_signal_handler(number, heed, number)
    await current.run()
    while current.lost and current.told is None:
        current = _next(current, max_restarts)
        await current.run()
    code = conclude(current)  # a signal while the connections close does not change how it ended
    await current.close()
    for number in heeded:
        loop.remove_signal_handler(number)
    return code


def _next(lost: Controller, max_restarts: int) -> Controller:
    """The next attempt, on the same hosts, as far as they answer."""
    left = lost.restarts_left - 1
    how = (
        "resuming from the newest checkpoint"
        if lost.job.program.is_task
        else "the script starts from the beginning"
    )
    lost.screen.say(
        f"WARNING: {lost.lost}; restarting all ranks (restart {max_restarts - left} of {max_restarts}), {how}",
        is_error=True,
    )
    job = lost.job.again(
        [remote.host for remote in lost.remotes],
        lost.reconnect.spares,
        restarts_left=left,
        first_start=max(lost.job.first_start, *(remote.num_starts for remote in lost.remotes)),
    )
    return Controller(job, lost.screen, lost)
