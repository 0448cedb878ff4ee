"""Hosts of an attempt from which this machine receives no heartbeat: the other hosts and the user
learn which."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from drumline.launch.ssh.host_connection import HEARTBEAT_S
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.remote import Remote
from drumline.launch.ssh.screen import Screen

# The other hosts are told which host sends no frame for this long.
SILENT_S = HEARTBEAT_S + 1.0
# When such a host is named on the screen: the sidecars of a watched job do it sooner, with what is
# blocked.
REPORT_S = 3.0
REPORT_WATCHED_S = 10.0


class WatchedAttempt(Protocol):
    job: HostsJob
    screen: Screen
    remotes: list[Remote]
    has_started: bool

    @property
    def remaining(self) -> Sequence[Remote]: ...


class SilenceWatch:
    def __init__(self, attempt: WatchedAttempt) -> None:
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
                number
                for number, remote in enumerate(self.attempt.remotes)
                if self.silence_s(remote) > SILENT_S
            ]
            if silent_nodes != self.silent_nodes:
                self.silent_nodes = silent_nodes
                for remote in self.attempt.remaining:
                    self.send_silent_nodes(remote)
            self.report()

    def send_silent_nodes(self, remote: Remote) -> None:
        remote.connection.send({"kind": "silent", "nodes": self.silent_nodes})

    def silence_s(self, remote: Remote) -> float:
        """How long a host with running ranks has sent nothing."""
        attempt = self.attempt
        heard_at = remote.connection.heard_at
        has_ranks = attempt.has_started and remote.is_running and remote in attempt.remaining
        return time.monotonic() - heard_at if has_ranks and heard_at else 0.0

    def silent_names(self) -> list[str]:
        remaining = self.attempt.remaining
        return [remote.name for remote in remaining if self.silence_s(remote) > SILENT_S]

    def report(self) -> None:
        program = self.attempt.job.program
        limit_s = REPORT_WATCHED_S if program.is_task or program.is_watched else REPORT_S
        for remote in self.attempt.remaining:
            silence_s = self.silence_s(remote)
            is_named = remote.name in self._named
            if silence_s > limit_s and not is_named:
                self._named.add(remote.name)
                what = f"no heartbeat from {remote.name} for {silence_s:.0f} s on this machine"
                self._print(f"warning: {what}; {self._when_lost()}")
            elif silence_s < SILENT_S and is_named:
                self._named.remove(remote.name)
                self._print(f"{remote.name} sends heartbeats again")

    def _print(self, sentence: str) -> None:
        self.attempt.screen.report(sentence, is_error=True)

    def _when_lost(self) -> str:
        """When a host without a heartbeat counts as lost, for the other nodes and for this
        machine."""
        lease_s = self.attempt.job.lease_s
        node = self.attempt.job.nodes[0]
        if not node.may_shrink:
            return f"it counts as lost after {lease_s:g} s"
        return (
            f"the other nodes continue without it after {node.silence_s} s if they receive none either, "
            f"this machine after {lease_s:g} s"
        )
