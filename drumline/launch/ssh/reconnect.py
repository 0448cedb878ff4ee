"""Who is asked when a host of a launch is unreachable: the same host again, or a spare, and for how long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from drumline.launch.hosts import Host
from drumline.launch.ssh.client import SSH_FAILED
from drumline.launch.ssh.connection import BEAT_S, HANG_UP_S
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import LEASE_S, LOST_GRACE_S
from drumline.net.dial import WaitNotice

# How long a host that was lost may take to answer again.
RECONNECT_S = 60.0
# How long a spare may take to answer, once it is allowed to replace a lost host.
SPARE_S = 20.0


@dataclass
class Search:
    """For a host that runs one node's part of the job."""

    notice: WaitNotice = field(default_factory=WaitNotice)
    tries: Counter[Host] = field(default_factory=Counter)
    """Of each host, over all rounds."""
    tried: list[Host] = field(default_factory=list)
    """In this round: no host is asked twice in one."""


class Reconnect:
    """The hosts of one attempt that are not in use or were lost."""

    def __init__(self, job: HostsJob, screen: Screen, last_heard: Mapping[Host, float]) -> None:
        """`last_heard`: hosts of the attempt before that are lost, and when they were last heard (monotonic)."""
        self.job = job
        self.screen = screen
        self.spares = list(job.spares)
        self.last_heard = dict(last_heard)

    @property
    def surely_ended_s(self) -> float:
        """When nothing was heard of a host for so long, its ranks have ended: a spare may replace it.

        Where only its packets are lost, its supervisor hears the controller until that hangs up, and then gives the
        ranks their grace.
        """
        return LEASE_S + BEAT_S + HANG_UP_S + max(self.job.grace_s, LOST_GRACE_S) + 1.0

    @property
    def limit_s(self) -> float:
        """How long a host or a spare is waited for."""
        return max(RECONNECT_S, self.surely_ended_s + SPARE_S)

    def next_host(self, remote: Remote, search: Search) -> Host | None:
        """Who is asked after a host that could not be reached: the same one, a spare, or nobody."""
        connection = remote.connection
        is_lacking = connection.ssh_code != SSH_FAILED and not connection.heard_at
        if remote.has_begun or is_lacking:
            return None
        if (
            connection.heard_at
        ):  # kept from the attempt before, and ended since: that says nothing of the host
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
            self.screen.say(f"waiting for {names} to answer again: {waited}", is_error=True)
        search.tried.clear()
        return remote.host

    def _replace(self, remote: Remote, spare: Host, *, is_first: bool) -> None:
        self.spares.remove(spare)
        if self.job.earlier:  # it may be there again when it is needed
            self.spares.append(remote.host)
        if is_first:
            why = next((line for line in reversed(remote.connection.said) if line.strip()), "no answer")
            what = f"{spare.address} replaces {remote.name}, which is unreachable ({why})"
            self.screen.say(what, is_error=True)
