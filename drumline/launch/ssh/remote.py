"""The controller's view of the hosts in one attempt: what one of them does, and which is tried next
when one is unreachable."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from drumline.base.errors import ExitCode
from drumline.base.text import how_it_ended
from drumline.base.untrusted import from_json
from drumline.launch.hosts import Host
from drumline.launch.ssh.client import SSH_FAILED, last_line
from drumline.launch.ssh.host_connection import HANG_UP_S, HEARTBEAT_S, HostConnection, RankFailure
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import LOST_GRACE_S
from drumline.net.dial import WaitNotice
from drumline.net.frames import Message
from drumline.watch.watch_folder import SidecarDiagnosis

# How long a lost host may take to answer again.
RECONNECT_S = 60.0
# How long a spare may take to answer, once it may replace a lost host.
SPARE_S = 20.0


@dataclass(eq=False)
class Remote:
    """One host's part of an attempt: from the spec that is sent to the frame `ended`, or the end of
    the connection."""

    connection: HostConnection
    spec: Message = field(repr=False)
    screen: Screen
    on_frame: Callable[[Remote, Message], None]
    """Called for each frame that is not about output."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_refused: bool = False
    own_address: str = ""
    """At which ssh has reached it."""
    unknown_names: tuple[str, ...] = ()
    """The names of hosts that it does not resolve."""
    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    """How many ranks the job had when these were started; others may have been restarted since."""
    num_starts: int = 0
    """How often ranks were started here, over all attempts of the launch."""
    restarts_left: int | None = None
    """As counted by its agent; None: it has not started ranks yet."""
    reached_step: int = 0
    """The furthest step of its ranks, over all attempts; 0 where steps are not known."""
    counted_step: int = 0
    """The furthest step when its ranks were last started."""
    failures: list[RankFailure] = field(default_factory=list)
    """Failures since the ranks were last started."""
    diagnosis: SidecarDiagnosis | None = None
    code: int | None = None
    """The exit code of the node's agent."""
    end_reason: str = ""
    """Why the supervisor ended it by itself; empty: it did not."""
    agent_lines: list[str] = field(default_factory=list)
    """The agent's last lines of output, when it failed."""

    @property
    def host(self) -> Host:
        """Where this part of the job runs."""
        return self.connection.host

    @property
    def name(self) -> str:
        """As messages call it."""
        return self.host.address

    @property
    def has_begun(self) -> bool:
        """Whether the supervisor has answered."""
        return self.begun.is_set()

    @property
    def is_running(self) -> bool:
        """Whether its part has not ended, as far as we know."""
        return self.connection.ssh_code is None and self.code is None

    @property
    def was_preempted(self) -> bool:
        """Whether its ranks were preempted. An agent that exits long after them is ended by the
        controller."""
        rank_codes = {failure.code for failure in self.failures}
        return self.code == ExitCode.PREEMPTED or rank_codes == {ExitCode.PREEMPTED}

    async def run(self) -> None:
        """Run it under the supervisor, to the end."""
        self.connection.on_frame = self._receive
        closed = await self.connection.open()
        self.connection.send(self.spec)

        ended = asyncio.create_task(self.ended.wait())
        await asyncio.wait({closed, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if closed.done():
            closed.result()  # raises what a frame's handler raised

    def end(self, grace_s: float) -> None:
        """Ask the host to end its ranks; without a supervisor there are none."""
        if self.has_begun:
            self.connection.send({"kind": "end", "grace_s": grace_s})
        else:
            self.connection.hang_up()

    def give_up(self) -> None:
        """Close the connection if the host's part has not ended."""
        if self.is_running:
            self.connection.hang_up()

    def end_lines(self) -> tuple[str, ...]:
        """How its part of the job ended, when no rank was the cause."""
        if self.end_reason:
            return (
                f"drumline ended the job on {self.name}: {self.end_reason}",
                f"try: read the log of {self.name}",
            )

        code = self.code or 0
        if code < 0:
            return (
                f"the launcher's agent on {self.name} was {how_it_ended(code)}, which ended its ranks",
                f"try: find out who killed it: an operator, a batch system, or the OOM killer (dmesg on {self.name})",
            )

        what = f"the job failed on {self.name} ({how_it_ended(code)})"
        return (f"{what}:", *self.agent_lines) if self.agent_lines else (what,)

    def _receive(self, frame: Message) -> None:
        """Each frame of the host: output goes to the screen, all others are noted and passed on."""
        if frame["kind"] == "lines":
            place = {"host": self.name, "rank": frame["rank"]}
            if frame["rank"] is None:
                del place["rank"]
            self.screen.show(place, frame["lines"], is_error=frame["stream"] == "err")
        else:
            self._remember(frame)
            self.on_frame(self, frame)

    def _remember(self, frame: Message) -> None:
        """Note what a frame says of the host."""
        match frame["kind"]:
            case "hello":
                self.begun.set()
                self.own_address = frame.get("address", "")
                self.unknown_names = tuple(frame.get("unknown_names", []))
                self.connection.stderr.clear()  # a banner, most likely
            case "refused":
                self.was_refused = True
                self.ended.set()
            case "started":
                self.ranks = frame["ranks"]
                self.world_size = frame["world_size"]
                self.failures = []
                self.num_starts = frame["start"] + 1
                self.restarts_left = frame["restarts_left"]
                self.diagnosis = None
            case "progress":
                self.reached_step = frame["reached_step"]
                self.counted_step = frame["counted_step"]
            case "diagnosis":
                self.diagnosis = from_json(SidecarDiagnosis, frame)
            case "ended":
                self.code = frame["code"]
                self.agent_lines = frame["last_lines"]
                self.end_reason = str(frame.get("end_reason", ""))
                self.ended.set()
            case "failed":
                self._remember_failure(from_json(RankFailure, frame))

    def _remember_failure(self, failure: RankFailure) -> None:
        """An agent may report a failure again, with those that came after it."""
        if any(failure.rank == earlier.rank for earlier in self.failures):
            return

        self.restarts_left = failure.restarts_left
        failed_at = failure.failed_at - self.connection.clock_ahead_s
        self.failures.append(replace(failure, host=self.name, failed_at=failed_at))


@dataclass
class Search:
    """For a host that answers, for one host's part of an attempt."""

    notice: WaitNotice = field(default_factory=WaitNotice)
    tried: list[Host] = field(default_factory=list)
    """The hosts of this round: each is tried once."""
    named: set[Host] = field(default_factory=set)
    """The spares that were reported."""


class Reconnect:
    """The spare and the lost hosts of one attempt."""

    def __init__(self, job: HostsJob, screen: Screen, last_heard: Mapping[Host, float]) -> None:
        """`last_heard`: the lost hosts of the previous attempt, and when their last frame arrived
        (monotonic)."""
        self.job = job
        self.screen = screen
        self.spares = list(job.spares)
        self.last_heard = dict(last_heard)

    @property
    def surely_ended_s(self) -> float:
        """After this long without a frame the ranks of a host have ended: its supervisor may
        receive heartbeats until the controller hangs up, and then gives the ranks their grace
        period."""
        grace_s = max(self.job.grace_s, LOST_GRACE_S)
        return self.job.lease_s + HEARTBEAT_S + HANG_UP_S + grace_s + 1.0

    @property
    def limit_s(self) -> float:
        """How long to try a lost host, and then the spares."""
        return max(RECONNECT_S, self.surely_ended_s + SPARE_S)

    def next_host(self, remote: Remote, search: Search) -> Host | None:
        """After a host that could not be reached: the same one, a spare, or None."""
        if remote.has_begun or remote.connection.ssh_code != SSH_FAILED:
            return None
        if self.job.earlier and search.notice.waited_s > self.limit_s:
            return None

        search.tried.append(remote.host)
        lost_at = self.last_heard.get(remote.host, float("-inf"))
        spare = next((host for host in self.spares if host not in search.tried), None)
        if spare is not None and time.monotonic() - lost_at > self.surely_ended_s:
            self._replace(remote, spare, search)
            return spare

        if not self.job.earlier:
            return None

        if search.notice.is_due():
            names = " or ".join(host.address for host in search.tried)
            waited = f"{search.notice.waited_s:.0f} s so far, at most {self.limit_s:g}"
            self.screen.report(f"waiting for {names} to answer again: {waited}", is_error=True)

        search.tried.clear()
        return remote.host

    def _replace(self, remote: Remote, spare: Host, search: Search) -> None:
        """The host and the spare change places."""
        self.spares.remove(spare)
        if self.job.earlier:  # it may be up again when it is needed
            self.spares.append(remote.host)

        if spare not in search.named:
            why = last_line(remote.connection.stderr) or "no answer"
            what = f"{spare.address} replaces {remote.name}, which is unreachable ({why})"
            self.screen.report(what, is_error=True)

        search.named |= {spare, remote.host}
