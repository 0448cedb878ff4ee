"""One attempt of a job on several hosts: starts a supervisor on each, shows the output of all
ranks, ends all of them.

A host that fails or is lost ends the attempt on the others, and so does a signal to this process;
`hosts_launcher.py` decides whether there is another attempt. If this process is killed or cut off,
each supervisor ends its own part.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from drumline.base.errors import DrumlineError, ExitCode, PreflightError, TrainingError
from drumline.base.text import how_it_ended, plural
from drumline.launch.hosts import Host, wrong_name
from drumline.launch.ssh.client import no_client, not_reached, was_lost
from drumline.launch.ssh.host_connection import HEARTBEAT_S, HostConnection
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.remote import Reconnect, Remote, Search
from drumline.launch.ssh.screen import Screen
from drumline.watch.watch_folder import DIAGNOSIS_S

# After a rank has failed, wait this long for others that fail with it before all are ended.
SETTLE_S = 1.0
# How long after the grace period hosts that do not answer are given up.
ENDING_S = 5.0
# A jump host's sshd rejects connections at random when too many arrive at once.
MAX_LOGGING_IN = 10
# The pause between two tries to reach a host.
RETRY_S = 0.5
# The pause between two tries to reach a lost host that the job continues without.
JOIN_AGAIN_S = 5.0
# The other hosts are told which host sends no frame for this long.
SILENT_S = HEARTBEAT_S + 1.0
# When such a host is named on the screen: the sidecars of a watched job do it sooner.
REPORT_S = 10.0
# Exit codes of an agent after which a restart may help: a signal ended it, or its rendezvous
# failed.
RESTARTABLE = (ExitCode.TRAINING_FAILED, ExitCode.INTERRUPTED)
# A supervisor of another version refuses without a reason.
OTHER_VERSION = ("it has another version of drumline", "install the same version on all hosts")
# Signals that ask a run to save and stop; other signals only end it.
PREEMPT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass
class DiagnosisNotice:
    """The sidecars' diagnosis on the screen, once: every host reports the same, and one may have
    printed it."""

    screen: Screen
    waiting: str = ""
    printed: str = ""
    printed_start: int = 0
    """The start of ranks that it is about: the hosts number them alike."""

    def add(self, frame: Mapping[str, Any], start: int) -> bool:
        """Whether it is to be printed before ranks are restarted."""
        if frame["was_printed"]:
            self.printed = frame["sentence"]
            self.printed_start = max(self.printed_start, start)
            return False

        # A host that was cut off reports late what the others have reported.
        is_late = start <= self.printed_start
        if frame["is_last"] or is_late:
            return False

        self.printed_start = start
        self.waiting = frame["sentence"]
        return True

    def print_waiting(self) -> None:
        """Print it, unless a host has printed it meanwhile."""
        sentence = self.waiting
        self.waiting = ""
        if sentence and sentence != self.printed:
            self.printed = sentence
            self.screen.report(sentence, is_error=True)


class SilenceWatch:
    """Which hosts have sent nothing for some time."""

    def __init__(self, attempt: Controller) -> None:
        self.attempt = attempt
        self.silent_nodes: list[int] = []
        """As the hosts know them."""
        self._named: set[str] = set()
        """Silent hosts that are named on the screen."""

    async def watch(self) -> None:
        """Tell all hosts which ones are silent: of two that do not reach each other, this machine
        may hear one."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            silent_nodes = [
                self.attempt.remotes.index(remote) for remote in self.silent_hosts(SILENT_S)
            ]
            if silent_nodes != self.silent_nodes:
                self.silent_nodes = silent_nodes
                for remote in self.attempt.remaining:
                    self.send_silent_nodes(remote)

            self._report()

    def send_silent_nodes(self, remote: Remote) -> None:
        """For the sidecars there: which end of a cut link is cut off."""
        remote.connection.send({"kind": "silent", "nodes": self.silent_nodes})

    def silent_hosts(self, limit_s: float) -> list[Remote]:
        """Hosts with running ranks that have sent nothing for so long."""
        if not self.attempt.has_started:
            return []

        begin = time.monotonic() - limit_s
        return [
            remote
            for remote in self.attempt.remaining
            if remote.is_running and 0 < remote.connection.heard_at < begin
        ]

    def _report(self) -> None:
        """Name each of them once on the screen."""
        for remote in self.silent_hosts(REPORT_S):
            if remote.name not in self._named:
                self._named.add(remote.name)
                silence_s = time.monotonic() - remote.connection.heard_at
                self.attempt.warn(
                    f"no heartbeat from {remote.name} for {silence_s:.0f} s on this machine; "
                    f"it counts as lost after {self.attempt.job.lease_s:g} s"
                )


class Controller:
    """One attempt, from the first login to the end of all hosts' parts."""

    def __init__(
        self,
        job: HostsJob,
        screen: Screen,
        last_heard: Mapping[Host, float] | None = None,
    ) -> None:
        """`last_heard`: the lost hosts of the previous attempt, and when their last frame
        arrived."""
        self.job = job
        self.screen = screen
        self._connections: list[HostConnection] = []
        self.remotes = [self._remote(number, host) for number, host in enumerate(job.hosts)]
        self.reconnect = Reconnect(job, screen, last_heard or {})
        self.silence = SilenceWatch(self)
        self.diagnoses = DiagnosisNotice(screen)
        self.lost = ""
        """Why the job is to be restarted on all hosts; empty: it is not."""
        self.has_started = False
        self.problems: list[DrumlineError] = []
        self.ended_first: Remote | None = None
        """The host whose part of the job failed first, before we ended it."""
        self.dropped: list[Remote] = []
        """Lost hosts without which the job continues, until they answer again."""
        self._is_over = asyncio.Event()
        """Set when no host is left that a lost one could join."""
        self.end_signal: signal.Signals | None = None
        self.is_ending = False
        self.num_ranks = 0
        self._logging_in = asyncio.Semaphore(MAX_LOGGING_IN)
        self._agent_ended = ""
        """How an agent ended too early; the other hosts may report the cause."""

    @property
    def remaining(self) -> list[Remote]:
        """The hosts that the job needs, or continues with."""
        return [remote for remote in self.remotes if remote not in self.dropped]

    async def run(self) -> None:
        """Until no host has anything left to do."""
        watching = asyncio.create_task(self.silence.watch())
        try:
            await asyncio.gather(*(self._run_node(number) for number in range(len(self.remotes))))
        finally:
            watching.cancel()
        self._restart_all(self._agent_ended)  # the others may have been done before

    async def close(self) -> None:
        """Close all connections, also those of hosts that were replaced."""
        await asyncio.gather(*(connection.close() for connection in self._connections))

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        self.screen.report(f"warning: {text}", is_error=True)

    # Reaching the hosts

    def _remote(self, number: int, host: Host, job: HostsJob | None = None) -> Remote:
        """`job`: what runs there, if it is not what runs on all."""
        job = job or self.job
        connection = HostConnection(
            host,
            job.supervisor_command(host),
            job.nodes[0].join_timeout_s,
            partial(self.screen.report, is_error=True),
            lease_s=job.lease_s,
        )
        self._connections.append(connection)
        return Remote(connection, job.spec(job.nodes[number]), self.screen, self._receive)

    async def _run_node(self, number: int) -> None:
        """One host's part of the job: on the host itself, then on those that replace it."""
        search = Search()
        while True:
            remote = self.remotes[number]
            await self._run_remote(remote)
            self._check_over()
            if remote.code is not None or remote.was_refused:
                return

            is_given_up = self.is_ending or remote in self.dropped
            host = None if is_given_up else self.reconnect.next_host(remote, search)
            if host is not None:
                await asyncio.sleep(RETRY_S)
                self.remotes[number] = self._remote(number, host)
                continue

            if remote not in self.dropped:
                self._lost(remote)
            if not await self._may_join_again(remote):
                return

            self.remotes[number] = self._joining_again(number, remote)

    async def _may_join_again(self, lost: Remote) -> bool:
        """After a pause, while others continue without this host: whether to try whether it answers
        again."""
        if not self.job.program.continues or lost not in self.dropped:
            return False

        self._check_over()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), JOIN_AGAIN_S)

        return not self._is_over.is_set()

    def _joining_again(self, number: int, lost: Remote) -> Remote:
        """Its ranks find the others themselves. Until it answers, the job continues without it as
        before."""
        job = self.job.joining_again(lost.num_starts)
        remote = self._remote(number, lost.host, job)
        remote.num_starts = lost.num_starts
        self.dropped[self.dropped.index(lost)] = remote
        return remote

    def _check_over(self) -> None:
        """The job is over when all hosts but those that are lost have ended their part: nobody
        waits for these. A host that is tried again has not."""
        have_ended = all(remote.code is not None or remote.was_refused for remote in self.remaining)
        if not self.is_ending and not have_ended:
            return

        self._is_over.set()
        for remote in self.dropped:
            remote.give_up()

    async def _run_remote(self, remote: Remote) -> None:
        """Run it from the login to the end of its part, or of the connection."""
        async with self._logging_in:
            is_too_late = remote in self.dropped and self._is_over.is_set()
            if self.is_ending or is_too_late:  # before its turn came
                remote.was_refused = True
                return

            running = asyncio.create_task(remote.run())
            begun = asyncio.create_task(remote.begun.wait())
            await asyncio.wait({running, begun}, return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()

        try:
            await running
        except OSError as error:
            remote.connection.ssh_code = -1
            remote.was_refused = True
            self._fail(no_client(self.job.client[0], error))

    def _start_all(self) -> None:
        """Start the ranks, when every host has answered and has ended the processes of earlier
        attempts."""
        have_answered = all(remote.has_begun for remote in self.remaining)
        if self.has_started or self.is_ending or not have_answered:
            return

        self.has_started = True
        for remote in self.remotes:
            if remote.is_running:
                self._send_start(remote)

    def _send_start(self, remote: Remote) -> None:
        """With the hosts that have answered, some of which may be spares."""
        hosts = self.hosts_with_addresses()
        node = self.job.placed(hosts)[self.remotes.index(remote)]
        names = [host.name for host in hosts]
        remote.connection.send({"kind": "start", "node": asdict(node), "hosts": names})

    def hosts_with_addresses(self) -> list[Host]:
        """A host whose name another one does not resolve, as with an alias of ssh's config, has the
        address at which ssh has reached it."""
        unknown_names = {name for remote in self.remotes for name in remote.unknown_names}
        return [
            replace(remote.host, inner_address=remote.own_address)
            if remote.host.address in unknown_names and not wrong_name(remote.own_address)
            else remote.host
            for remote in self.remotes
        ]

    # What they report

    def _receive(self, remote: Remote, frame: Mapping[str, Any]) -> None:
        """Act on a frame of a host, which the host's `Remote` has noted already."""
        match frame["kind"]:
            case "hello" if remote in self.dropped:
                self._join_again(remote)
            case "hello":
                self._start_all()
            case "refused":
                self._refuses(remote, frame["problems"] or [OTHER_VERSION])
            case "started":
                self.diagnoses.print_waiting()  # a restart may take less than SETTLE_S
                self._started(frame["world_size"])
            case "ended" if frame["code"] and not self.is_ending:
                self._agent_failed(remote, frame["code"])
            case "failed" if not frame["restarts_left"] and not self.job.program.continues:
                settle_s = SETTLE_S + (DIAGNOSIS_S if frame.get("is_watched") else 0)
                self._later(settle_s, self._end, self.job.grace_s)
            case "notice":
                self.screen.report(frame["text"], is_error=True)
            case "diagnosis":
                is_new = self.diagnoses.add(frame, remote.num_starts)
                if is_new:
                    self._later(SETTLE_S, self.diagnoses.print_waiting)

    def _refuses(self, remote: Remote, problems: Sequence[tuple[str, str]]) -> None:
        """`problems`: for each what is wrong, and what to do."""
        for what, next_step in problems:
            if remote in self.dropped:
                self.warn(f"{remote.name} cannot join again: {what}")
            else:
                self._fail(PreflightError(f"{remote.name}: {what}", next_step=next_step))

    def _join_again(self, remote: Remote) -> None:
        """A lost host that answers: its ranks start, and join the others."""
        self.dropped.remove(remote)
        self.screen.report(f"{remote.name} answers again; its ranks join the others")
        self._send_start(remote)
        # Its supervisor is a new one; later it gets the changes.
        self.silence.send_silent_nodes(remote)

    def _later(self, seconds: float, call: Any, *args: Any) -> None:
        """Without waiting for it."""
        asyncio.get_running_loop().call_later(seconds, call, *args)

    def _started(self, num_ranks: int) -> None:
        """Report it once, when all ranks of the group have started."""
        running = [remote for remote in self.remaining if remote.is_running]
        members = [remote for remote in running if remote.world_size == num_ranks]
        num_started = sum(len(remote.ranks) for remote in members)
        if num_started < num_ranks or num_ranks == self.num_ranks:
            return

        self.num_ranks = num_ranks
        names = f" ({_names(members)})" if self.job.spares else ""
        self.screen.report(f"{num_ranks} ranks run on {plural(len(members), 'host')}{names}")

    def _agent_failed(self, remote: Remote, code: int) -> None:
        """A signal that ended the agent, as when its host is shut down, affects only that host."""
        by_signal = code < 0 or code == ExitCode.INTERRUPTED or self.job.program.continues
        if by_signal and self._continues_without(remote, f"the job was ended on {remote.name}"):
            return

        self.ended_first = self.ended_first or remote
        if remote.end_reason:
            self._restart_all(f"drumline ended the job on {remote.name}: {remote.end_reason}")
        elif code < 0:
            how = how_it_ended(code)
            self._restart_all(f"the launcher's agent on {remote.name} was {how}")

        if self.is_ending:
            return

        if code in RESTARTABLE and self.may_restart:
            self._agent_ended = f"the job ended on {remote.name} with exit code {code}"
            if silent := self.silence.silent_hosts(SILENT_S):  # that is why
                self._agent_ended = f"no heartbeat from {_names(silent)} on this machine"
            self._later(SETTLE_S, self._restart_all, self._agent_ended)
        else:
            self._later(SETTLE_S, self._end, self.job.grace_s)

    def _lost(self, remote: Remote) -> None:
        """ssh has ended before the node's job, as far as we know."""
        if remote.has_begun:
            self.reconnect.last_heard[remote.host] = remote.connection.heard_at
        elif self.is_ending:
            return

        error = self._loss_of(remote)
        if self._continues_without(remote, error.what):
            self._start_all()
            return

        if remote.has_begun:
            self._restart_all(error.what)
        if not self.lost:
            self._fail(error)

    def _loss_of(self, remote: Remote) -> DrumlineError:
        """The error for a host whose connection has ended, perhaps before a supervisor answered."""
        connection = remote.connection
        if remote.has_begun:
            return was_lost(remote.host, connection.ssh_code, list(connection.stderr))

        error = not_reached(
            remote.host,
            connection.ssh_code or 0,
            list(connection.stderr) or list(connection.stdout),
            python=self.job.python,
            cwd=str(self.job.cwd),
            is_stuck=connection.is_stuck,
        )
        if not self.job.earlier:
            return error

        # It answered before.
        what = f"no answer for {self.reconnect.limit_s:g} s: {error.what}"
        return TrainingError(what, next_step=error.next_step)

    def _continues_without(self, remote: Remote, why: str) -> bool:
        """Whether the other hosts are enough; if so, that is reported."""
        peers = [peer for peer in self.remaining if peer is not remote]
        running = [peer for peer in peers if peer.is_running]
        left = [*running, *(peer for peer in peers if peer.code == 0)]
        least = 1 if self.job.program.continues else self.job.min_nodes
        is_needed = remote is self.remotes[0] and not self.job.program.continues
        if least is None or is_needed or self.is_ending or len(left) < least:
            return False

        self.dropped.append(remote)
        outlook = f"the job continues with {_names(running)}" if running else "the others are done"
        self.warn(f"{why}; {outlook}")
        return True

    # Ending

    @property
    def reached_step(self) -> int:
        """The furthest step of all hosts, over all attempts."""
        steps = [remote.reached_step for remote in self.remotes]
        return max(self.job.nodes[0].reached_step, *steps)

    @property
    def restarts_left(self) -> int:
        """As counted by the agents, for all hosts together: those that have seen a failure know
        whether it can be helped. A host that is lost after progress leaves all of them."""
        node = self.job.nodes[0]
        failed = [remote for remote in self.remotes if remote.failures]
        counted_steps = [remote.counted_step for remote in self.remotes]
        if not failed and self.reached_step > max(node.reached_step, *counted_steps):
            return node.max_restarts

        counts = [remote.restarts_left for remote in failed or self.remotes]
        known_counts = [count for count in counts if count is not None]
        return min(known_counts, default=node.max_restarts - node.restarts_used)

    @property
    def may_restart(self) -> bool:
        """Whether another attempt is allowed, and is not known to fail in the same way."""
        if self.end_signal is not None or self.problems:
            return False

        diagnoses = [remote.diagnosis for remote in self.remotes]
        is_final = any(diagnosis and diagnosis.is_final for diagnosis in diagnoses)
        return not is_final and self.restarts_left > 0

    def _restart_all(self, why: str) -> None:
        """End this attempt on all hosts at once, before the next. Ranks cannot save without the
        others."""
        if why and not self.is_ending and self.may_restart:
            self.lost = why
            self._end(0)

    def _fail(self, error: DrumlineError) -> None:
        """End the job; the error is printed last."""
        self.problems.append(error)
        self._end(self.job.grace_s)

    def interrupted(self, number: signal.Signals) -> None:
        """A signal to this process: end the job; at the second one at once."""
        if self.end_signal is not None:
            self.screen.report("ending all ranks at once", is_error=True)
            self._end(0)
            return

        self.end_signal = number
        why = f"preempted by {number.name}" if number in PREEMPT_SIGNALS else "interrupted"
        # Not in the pause between two attempts.
        if any(remote.is_running for remote in self.remotes):
            grace = f"they have {self.job.grace_s:g} s; once more to end them at once"
            self.screen.report(f"{why}; ending the ranks ({grace})", is_error=True)

        self._end(self.job.grace_s)

    def _end(self, grace_s: float) -> None:
        """Ask all running hosts to end; those that do not answer in time are given up."""
        if self.is_ending and grace_s:
            return

        self.is_ending = True
        self._is_over.set()
        for remote in self.remotes:
            if remote.is_running:
                remote.end(grace_s)
                self._later(grace_s + ENDING_S, remote.give_up)


def _names(remotes: Iterable[Remote]) -> str:
    """For a message."""
    return ", ".join(remote.name for remote in remotes)
