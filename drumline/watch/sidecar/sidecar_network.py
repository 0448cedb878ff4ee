"""The sidecars' network: a connection between each hub (nodes 0, 1 and 2) and every other node.
Nothing here blocks on a peer, and memory is bounded whatever a peer, or any other client, sends."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from drumline.base.errors import log
from drumline.net.connection import MAX_UNSENT_BYTES, Acceptor, PeerConnection, PendingConnections
from drumline.net.dial import Reason, reason_of
from drumline.net.frames import FrameError, Message
from drumline.net.handshake import answer, dial
from drumline.watch.sidecar.sidecar_options import Peer

NUM_HUBS = 3
PURPOSE = "watch"
DIAL_S = 1.5
RETRY_S = 1.0
CHECK_S = 0.25
PROBE_AFTER_S = 1.1  # without a message; with DIAL_S the reason is known within 3 s

# without a message; long enough for TCP to recover from a short cut
CLOSE_AFTER_S = 6.0
LATE_S = 0.5
MAX_PROBES = 32  # at once: sockets are few
CLOSING_TURNS = 3
"""Turns of the event loop after which a connection that was being made at the close is made, and
ended."""

REPLACED = "it connected again"
CLOSED = "the network was closed"


class SidecarNetwork:
    """This node's connections. `peers` may include this node, which is skipped; it owns
    `listener`."""

    def __init__(
        self,
        *,
        me: int,
        peers: Sequence[Peer],
        secret: bytes,
        on_message: Callable[[int, Message], None],
        listener: socket.socket | None,
    ) -> None:
        self.me = me
        self.peers = {
            peer.node: peer for peer in peers if peer.node != me and min(peer.node, me) < NUM_HUBS
        }
        """The nodes that this node is connected with."""

        self.refused: Counter[str] = Counter()
        """Connections that were closed for what arrived on them, by the reason."""

        self._unsendable: set[tuple[str | None, str]] = set()
        """The kinds of messages and errors that were warned about."""

        self._secret = secret
        self._on_message = on_message
        self._started_at = time.monotonic()
        self._is_closed = False

        self._acceptor = None if listener is None else Acceptor(listener, self._make_connection)
        self._diallers = frozenset(node for node in self.peers if node > me)
        """The nodes that connect to this one."""

        self._pending = PendingConnections({peer.address for peer in peers})
        self._connections: dict[int, PeerConnection] = {}
        self._all_connections: set[PeerConnection] = set()
        """With those that are not, or no longer, the connection of a node."""

        self._heard_at: dict[int, float] = {}
        """By node: when its last message arrived."""

        self._results: dict[int, str] = {}
        """By node: why no connection could be made."""

        self._probed_at: dict[int, float] = {}
        """By node; infinity: it is being probed."""

        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, connect to the hubs, and watch over the connections."""
        self._started_at = time.monotonic()
        if self._acceptor is not None:
            self._acceptor.open()

        for peer in self.peers.values():
            if peer.node < self.me:
                self._run(self._keep_connected(peer))

        if self.peers:
            self._run(self._keep_checking())

    async def close(self) -> None:
        """Close everything: no task, socket or timer is left. May be called twice."""
        self._is_closed = True
        if self._acceptor is not None:
            await self._acceptor.close()

        for task in self._tasks:
            task.cancel()

        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(CLOSING_TURNS):
            for connection in list(self._all_connections):
                connection.end(CLOSED)
                await connection.ended.wait()

            await asyncio.sleep(0)

    def send(
        self,
        node: int,
        message: dict[str, Any],
        *,
        max_unsent: int = MAX_UNSENT_BYTES,
    ) -> bool:
        """Never blocks. False: the message is dropped, because there is no connection or its buffer
        is full; one that is too long is dropped with a warning. `max_unsent`: bytes that may
        already wait on the connection."""
        connection = self._connections.get(node)
        if connection is None:
            return False

        try:
            return connection.send(message, max_unsent=max_unsent)
        except FrameError as error:
            self._warn_unsendable(node, message, error)
            return True

    def _warn_unsendable(self, node: int, message: Mapping[str, Any], error: FrameError) -> None:
        """Once for each kind: a script's report is sent again with each comparison."""
        kinds = (message.get("kind"), error.kind)
        if kinds in self._unsendable:
            return

        self._unsendable.add(kinds)
        rank = message.get("rank")
        what = "a message" if rank is None else f"a report of rank {rank}"
        log.warning(f"{what} to node {node} was not sent: {error.what}")

    def send_to_all(self, message: dict[str, Any]) -> None:
        """To every node that this one is connected with."""
        for node in self.peers:
            self.send(node, message)

    def heartbeat_ages(self) -> dict[int, float]:
        """By node, how many seconds ago its last message arrived; without nodes that never sent
        one."""
        now = time.monotonic()
        return {node: now - heard_at for node, heard_at in self._heard_at.items()}

    def open_s(self) -> float:
        """How long it has been open: a node may not have had time to connect."""
        return time.monotonic() - self._started_at

    def connect_result(self, node: int) -> str:
        """The result of the last attempt to connect to a lost node; empty while messages arrive."""
        return self._results.get(node, "")

    # Called by connections

    def connection_made(self, connection: PeerConnection) -> None:
        """Before the handshake: anyone may have connected."""
        self._all_connections.add(connection)
        if self._is_closed:
            connection.end(CLOSED)
        elif not connection.is_ours:
            self._pending.add(connection)

    def connection_opened(self, connection: PeerConnection, node: int) -> None:
        """After the handshake: this is that node."""
        self._pending.remove(connection)
        if (old := self._connections.get(node)) is not None:
            # the node was restarted, or has found that the old connection is dead
            old.end(REPLACED)

        self._connections[node] = connection

    def message_received(self, connection: PeerConnection, message: Message) -> None:
        """Messages on a connection that was replaced are dropped."""
        node = connection.node
        if node is None or self._connections.get(node) is not connection:
            return

        self._heard_at[node] = time.monotonic()
        self._results.pop(node, None)

        try:
            self._on_message(node, message)
        except Exception:
            log.exception(f"a message of node {node} could not be handled")

    def connection_ended(self, connection: PeerConnection) -> None:
        """Note why, for the diagnosis of a lost node."""
        self._pending.remove(connection)
        self._all_connections.discard(connection)
        node = connection.node
        why = connection.why

        if connection.is_refused:
            # once per reason: a client must not be able to fill the log
            if not self.refused[why]:
                log.warning(f"a connection with {connection.address} was closed: {why}")
            self.refused[why] += 1

        if node is not None and self._connections.get(node) is connection:
            del self._connections[node]
            # A probe finds a better reason than "no answer".
            if why != Reason.NO_ANSWER or node not in self._results:
                self._results[node] = why

    # Connecting

    def _make_connection(self) -> PeerConnection:
        """For one that connects to this node."""
        handshake = answer(self._secret, PURPOSE, self.me, self._diallers)
        return PeerConnection(self, handshake, is_ours=False)

    async def _keep_connected(self, peer: Peer) -> None:
        """The node with the higher number connects to the lower one, and reconnects after a restart
        or a cut."""
        while True:
            try:
                await self._connected(peer)
            except OSError as error:
                self._results[peer.node] = reason_of(error)

            await asyncio.sleep(RETRY_S)

    async def _connected(self, peer: Peer) -> None:
        """Until the connection ends."""
        handshake = dial(self._secret, PURPOSE, self.me, peer.node)
        connection = PeerConnection(self, handshake, is_ours=True)
        call = await _connect(peer)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=call)
        await connection.ended.wait()
        if connection.node is None:
            self._results[peer.node] = connection.why

    # Lost nodes

    async def _keep_checking(self) -> None:
        """Close dead connections, and find out why nodes are lost."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()

            # If this process had no CPU time, messages that arrived meanwhile must be read first.
            if now - last < CHECK_S + LATE_S:
                self._close_dead_connections(now)
                self._probe_lost_nodes(now)

            last = now

    def _close_dead_connections(self, now: float) -> None:
        """Those on which nothing has arrived for long."""
        for node, connection in list(self._connections.items()):
            heard_at = self._heard_at.get(node, 0.0)
            if now - max(connection.since, heard_at) > CLOSE_AFTER_S:
                connection.end(Reason.NO_ANSWER)

    def _probe_lost_nodes(self, now: float) -> None:
        """Find out why lost nodes are unreachable; except those that are being connected to
        anyway."""
        for node, peer in self.peers.items():
            is_lost = now - self._heard_at.get(node, self._started_at) > PROBE_AFTER_S
            is_due = now - self._probed_at.get(node, -math.inf) > RETRY_S
            is_connecting = node not in self._diallers and node not in self._connections
            if not is_lost or not is_due or is_connecting:
                continue

            num_probes = list(self._probed_at.values()).count(math.inf)
            if num_probes < MAX_PROBES:
                self._probed_at[node] = math.inf
                self._run(self._probe(peer))

    async def _probe(self, peer: Peer) -> None:
        """Connect and close; to the peer this is an unknown client."""
        begun = time.monotonic()
        result: str = Reason.NO_REPLY
        try:
            (await _connect(peer)).close()
        except OSError as error:
            result = reason_of(error)

        self._probed_at[peer.node] = time.monotonic()
        if self._heard_at.get(peer.node, -math.inf) < begun:
            self._results[peer.node] = result

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Until it ends, or the network is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _connect(peer: Peer) -> socket.socket:
    """A connected socket; OSError or TimeoutError if that fails."""
    call = socket.socket(socket.AF_INET6 if ":" in peer.address else socket.AF_INET)
    call.setblocking(False)

    try:
        async with asyncio.timeout(DIAL_S):
            await asyncio.get_running_loop().sock_connect(call, (peer.address, peer.port))
    except BaseException:
        call.close()
        raise

    return call
