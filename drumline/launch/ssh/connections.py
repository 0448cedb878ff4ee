"""The ssh connections of a launch, one for each host, which the attempts use one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from drumline.launch.hosts import Host
from drumline.launch.ssh.client import ALIVE_INTERVAL_S, CONNECT_TIMEOUT_S, remote_module, ssh_words
from drumline.launch.ssh.host_connection import HostConnection
from drumline.launch.ssh.hosts_job import HostsJob
from drumline.launch.ssh.screen import Screen


class Connections:
    def __init__(self, screen: Screen, connections: Iterable[HostConnection] = ()) -> None:
        self._screen = screen
        self._connections = list(connections)

    def still_open(self) -> Connections:
        """For the next attempt."""
        return Connections(
            self._screen, [connection for connection in self._connections if connection.is_open]
        )

    def to(self, host: Host, job: HostsJob, *, tries: int) -> HostConnection:
        """The connection to this host that has not ended, or a new one, which is not open yet."""
        for connection in self._connections:
            if connection.host == host and connection.ssh_code is None:
                return connection
        connection = HostConnection(
            host,
            _command(host, job, tries=tries),
            job.nodes[0].join_timeout_s,
            partial(self._screen.report, is_error=True),
            lease_s=job.lease_s,
        )
        self._connections.append(connection)
        return connection

    def remove(self, connection: HostConnection) -> None:
        self._connections.remove(connection)

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))


def _command(host: Host, job: HostsJob, *, tries: int) -> list[str]:
    """The local command that runs a supervisor there."""
    client = list(job.client)
    if job.earlier:
        # A host that answered before is tried often. ssh uses the first option of a name.
        client += ["-o", f"ConnectTimeout={min(2 + tries, CONNECT_TIMEOUT_S)}"]
    # Our own heartbeats notice a cut before ssh does.
    client += ["-o", f"ServerAliveCountMax={round(job.lease_s / ALIVE_INTERVAL_S) + 2}"]
    supervisor = remote_module("drumline.launch.ssh.supervisor", job.python, job.python_path)
    return ssh_words(client, host, supervisor, cwd=job.cwd)
