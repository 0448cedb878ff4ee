"""Without ssh, nodes connect to node 0: `join` is a node's side, `DoctorRendezvous` is node 0's.

Nodes may start in any order, so a node retries for a while; a node that cannot connect reports the
reason itself, since node 0 cannot know it. Node 0 listens only at the master's address, and if
there is a secret, a node proves that it knows it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from drumline.base.errors import PreflightError, UsageError
from drumline.base.job_secret import SECRET_ENV
from drumline.launch.hosts import Host
from drumline.launch.ssh.host_connection import HostConnection
from drumline.net.dial import CONNECT_S, Reason, explained, reason_of
from drumline.net.frames import (
    MAX_BYTES,
    SEAL_BYTES,
    FrameError,
    FrameReader,
    Message,
    decode,
    encode,
    write_all,
)
from drumline.net.handshake import (
    MAX_HANDSHAKE_BYTES,
    WRONG_SECRET,
    Agreed,
    RefusedError,
    answer,
    dial,
)
from drumline.net.interfaces import interfaces
from drumline.tools.doctor.machine.machine_facts import HostSettings
from drumline.tools.doctor.pairs.examination import NodeClient, NodeLostError
from drumline.tools.doctor.pairs.node_server import NodeServer
from drumline.tools.doctor.pairs.probe import MAX_NODES

PURPOSE = "doctor"
RETRY_S = 0.3
HANDSHAKE_S = 5.0
PROGRESS_S = 2.0


@dataclass(frozen=True)
class NodeOptions:
    """Which node of how many this is, and where node 0 listens."""

    node: int
    nodes: int
    master: str
    port: int
    secret: str | None
    wait_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.node < self.nodes:
            raise UsageError(
                f"--node-rank is {self.node} of --nodes {self.nodes}",
                next_step=f"give each node a number from 0 to {self.nodes - 1}",
            )

    @property
    def endpoint(self) -> str:
        """Where node 0 listens: `10.0.0.4:29500`."""
        return f"{self.master}:{self.port}"

    @property
    def key(self) -> bytes | None:
        """The job's secret, for the handshake."""
        return None if self.secret is None else self.secret.encode()


# A node


def join(options: NodeOptions, settings: HostSettings) -> Message:
    """Answer node 0 until it ends the check; returns its last frame."""
    with _connect(options) as line:
        line.settimeout(None)
        frames = _prove(line, options)
        last = NodeServer(frames, line.fileno(), settings, here=str(line.getsockname()[0])).serve()

    # without it, node 0 counts this node as lost
    if last is None or "code" not in last:
        raise PreflightError(
            f"node 0 at {options.endpoint} closed the connection before the end",
            next_step="read its output, and start all nodes again",
        )

    return last


def _connect(options: NodeOptions) -> socket.socket:
    """Retry until node 0 listens; PreflightError when the time is over."""
    deadline = time.monotonic() + options.wait_s
    while True:
        try:
            return socket.create_connection((options.master, options.port), timeout=CONNECT_S)
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                raise _no_connection(options, reason_of(error)) from error

        time.sleep(RETRY_S)


def _no_connection(options: NodeOptions, reason: str) -> PreflightError:
    """The error of a node that could not connect:

    node 1 on gpu-02 could not connect to 10.0.0.4:29500 within 60 s: refused ...
    """
    next_step = (
        f"start `drumline doctor --node-rank 0` on {options.master}; open TCP {options.port} there"
    )
    if reason == Reason.UNKNOWN_NAME:
        next_step = "add it to /etc/hosts or DNS, or give --master by address"

    return PreflightError(
        f"node {options.node} on {socket.gethostname()} could not connect to {options.endpoint} within "
        f"{options.wait_s:g} s: {explained(reason)}",
        next_step=next_step,
    )


def _prove(line: socket.socket, options: NodeOptions) -> FrameReader:
    """The handshake; returns the reader of node 0's frames, some of which may already have been
    read.

    what answers at 10.0.0.4:29500 does not know DRUMLINE_SECRET
    """
    frames = FrameReader(line.fileno())
    handshake = dial(options.key, PURPOSE, options.node, 0, nodes=options.nodes)
    message = next(handshake)

    try:
        while True:
            write_all(line.fileno(), frames.session.encode(message or {}))
            message = handshake.send(frames.next(HANDSHAKE_S) or {})
    except StopIteration as done:
        frames.use(done.value.session)
        return frames
    except RefusedError as error:
        what = f"node 0 refuses node {options.node}: {error.what}"
        next_step = error.next_step
        raise PreflightError(what, next_step=next_step) from error
    except (FrameError, OSError) as error:
        if isinstance(error, FrameError) and error.kind == WRONG_SECRET:
            what = f"what answers at {options.endpoint} does not know {SECRET_ENV}"
            next_step = "set the same value on all nodes, and check --master"
        else:
            what = f"what listens at {options.endpoint} is not drumline's doctor"
            next_step = "stop it, or choose another port with --master ADDRESS:PORT"

        raise PreflightError(what, next_step=next_step) from error


# Node 0


class DoctorRendezvous:
    """Node 0's side: which nodes have joined, and why others were refused."""

    def __init__(self, options: NodeOptions) -> None:
        self.options = options
        self.address = ""
        self.joined: dict[int, NodeClient] = {}
        self.addresses: dict[int, str] = {}
        self.refused: dict[int, str] = {}
        self._joining: set[int] = set()
        self._is_complete = asyncio.Event()

    async def wait(self, progress: Callable[[str], None]) -> None:
        """Wait until all nodes have joined, or their time is over."""
        listener = listen(self.options)
        self.address = listener.getsockname()[0]
        server = await asyncio.start_server(
            self._accept, sock=listener, limit=MAX_BYTES + SEAL_BYTES + 1
        )

        try:
            left = self.options.wait_s
            while left > 0 and not self._is_complete.is_set():
                missing = ", ".join(map(str, self.missing()))
                where = f"{self.address}:{self.options.port}"
                progress(f"waiting for node {missing} at {where} ({left:.0f} s left)")

                try:
                    await asyncio.wait_for(self._is_complete.wait(), min(PROGRESS_S, left))
                except TimeoutError:
                    left -= PROGRESS_S
        finally:
            server.close()  # nodes that have joined stay connected

    def missing(self) -> list[int]:
        """The numbers of the nodes that are not connected."""
        return [number for number in range(1, self.options.nodes) if not self._has_joined(number)]

    def _has_joined(self, number: int) -> bool:
        """Whether it is connected; a node that was lost may join again."""
        return number in self.joined and self.joined[number].lost is None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection to node 0: a node that joins, or none of this job."""
        try:
            number = await asyncio.wait_for(self._admit(reader, writer), HANDSHAKE_S)
        except RefusedError as error:
            writer.write(encode({"refused": error.what, "next": error.next_step}) + b"\n")
            writer.close()
        except (TimeoutError, OSError, ValueError, FrameError, NodeLostError):
            writer.close()  # not a node of this job
        else:
            self.addresses[number] = writer.get_extra_info("peername")[0]
            self.refused.pop(number, None)
            if not self.missing():
                self._is_complete.set()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """The handshake; returns the number of the node, which has joined."""

        async def read() -> Message:
            """One line of the handshake."""
            line = await reader.readline()
            return decode(line.removesuffix(b"\n"), max_bytes=MAX_HANDSHAKE_BYTES)

        handshake = answer(self.options.key, PURPOSE, 0, range(MAX_NODES), self._check)
        next(handshake)
        hello = await read()

        try:
            writer.write(encode(handshake.send(hello) or {}) + b"\n")
            handshake.send(await read())
        except StopIteration as done:
            await self._add(reader, writer, done.value)
        except RefusedError as error:
            if not self._has_joined(hello["node"]):
                self.refused[hello["node"]] = error.what

            raise

        return int(hello["node"])

    async def _add(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, agreed: Agreed
    ) -> None:
        """It has joined when its hello has arrived: from then on its exit is noticed."""
        number = agreed.node
        connection = HostConnection(
            Host(f"node {number}"),
            [],
            HANDSHAKE_S,
            session=agreed.session,
            reader=reader,
            writer=writer,
        )
        self._joining.add(number)

        try:
            writer.write(encode(agreed.last or {}) + b"\n")
            client = NodeClient(connection)
            await client.open()
            self.joined[number] = client
        finally:
            self._joining.discard(number)

    def _check(self, hello: Message) -> None:
        """RefusedError for a node with another plan, or a number that is taken."""
        nodes = self.options.nodes
        number = hello["node"]
        if hello.get("nodes") != nodes:
            what = f"it has --nodes {hello.get('nodes')}, node 0 has {nodes}"
            raise RefusedError(what, next_step="give the same --nodes on all nodes")

        if not 0 < number < nodes or number in self._joining or self._has_joined(number):
            next_step = f"give each node its own --node-rank, 0 to {nodes - 1}"
            raise RefusedError(f"there is a node {number} already", next_step=next_step)


def listen(options: NodeOptions) -> socket.socket:
    """A socket at the master's address, which must be one of this machine.

    --master gpu-01 resolves to 127.0.1.1 on gpu-01, which no other host reaches
    """
    master = f"--master {options.master}"
    here = socket.gethostname()
    outer = [interface.address for interface in interfaces() if not interface.is_loopback]
    own_addresses = ", ".join(filter(None, outer)) or "none"

    try:
        resolved = socket.getaddrinfo(
            options.master, options.port, socket.AF_INET, socket.SOCK_STREAM
        )
        address = str(resolved[0][4][0])
        # Debian maps a host to 127.0.1.1 in its own /etc/hosts, which other hosts cannot reach.
        if address.startswith("127.") and not options.master.startswith(("127.", "localhost")):
            what = f"{master} resolves to {address} on {here}, which no other host reaches"
            raise PreflightError(what, next_step=f"give the address instead: {own_addresses}")

        return socket.create_server((address, options.port), backlog=1024)
    except OSError as error:
        what = f"node 0 cannot listen at {master}:{options.port} on {here}: {error.strerror}"
        next_step = f"give an address of this machine ({own_addresses}) and a port that is free: "
        next_step += f"ss -ltnp 'sport = :{options.port}' shows the process that has it"

        raise PreflightError(what, next_step=next_step) from error
