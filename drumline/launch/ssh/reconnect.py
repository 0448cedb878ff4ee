"""Which host is tried next when a host of a launch is unreachable: the same one, or a spare, and for how long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.launch.hosts import Host
from drumline.launch.ssh.client import SSH_FAILED
from drumline.launch.ssh.host_connection import HANG_UP_S, HEARTBEAT_S
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import LEASE_S, LOST_GRACE_S
from drumline.net.dial import WaitNotice

# How long a lost host may take to answer again.
RECONNECT_S = 60.0
# How long a spare may take to answer, once it may replace a lost host.
SPARE_S = 20.0


@dataclass
class Search:
    notice: WaitNotice = field(default_factory=WaitNotice)
    tries: Counter[Host] = field(default_factory=Counter)
    """Of each host, over all rounds."""
    tried: list[Host] = field(default_factory=list)
    """In this round: each host is tried once."""


class Reconnect:
    """The hosts of one attempt that are not in use or were lost."""

    def __init__(self, job: HostsJob, screen: Screen, last_heard: Mapping[Host, float]) -> None:
        """`last_heard`: the lost hosts of the attempt before, and when their last frame came (monotonic)."""
        self.job = job
        self.screen = screen
        self.spares = list(job.spares)
        self.last_heard = dict(last_heard)

    @property
    def surely_ended_s(self) -> float:
        """After so long without a frame the ranks of a host have ended: a spare may replace it.

        Where only its own packets are lost, its supervisor hears the controller until that hangs up, and then gives
        the ranks their grace period.
        """
        return LEASE_S + HEARTBEAT_S + HANG_UP_S + max(self.job.grace_s, LOST_GRACE_S) + 1.0

    @property
    def limit_s(self) -> float:
        """How long to wait for a host or a spare."""
        return max(RECONNECT_S, self.surely_ended_s + SPARE_S)

    def next_host(self, remote: Remote, search: Search) -> Host | None:
        """After a host that could not be reached: the same one, a spare, or None."""
        connection = remote.connection
        is_broken = connection.ssh_code != SSH_FAILED and not connection.heard_at
        if remote.has_begun or is_broken:
            return None
        if connection.heard_at:  # an open one of the attempt before, closed since: that says nothing about the host
            return remote.host
        if self.job.earlier and search.notice.waited_s > self.limit_s:
            return None
        search.tries[remote.host] += 1
        search.tried.append(remote.host)
        heard_at = self.last_heard.get(remote.host)
        if heard_at is None or time.monotonic() - heard_at > self.surely_ended_s:
            spare = next((host for host in self.spares if host not in search.tried), None)
            if spare is not None:
                self._replace(remote, spare, is_first=not search.tries[spare])
                return spare
        if not self.job.earlier:
            return None
        if search.notice.is_due():
            names = " or ".join(host.address for host in search.tried)
            waited = f"{search.notice.waited_s:.0f} s so far, at most {self.limit_s:g}"
            self.screen.report(f"waiting for {names} to answer again: {waited}", is_error=True)
        search.tried.clear()
        return remote.host

    def _replace(self, remote: Remote, spare: Host, *, is_first: bool) -> None:
        self.spares.remove(spare)
        if self.job.earlier:  # it may be up again when it is needed
            self.spares.append(remote.host)
        if is_first:
            why = next((line for line in reversed(remote.connection.stderr) if line.strip()), "no answer")
            what = f"{spare.address} replaces {remote.name}, which is unreachable ({why})"
            self.screen.report(what, is_error=True)
