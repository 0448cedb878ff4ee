"""The sidecars' own channel: a line between each hub (nodes 0, 1 and 2) and every other node.

The higher number dials the lower one, again and again, so whoever was restarted or cut off comes back by itself. A line
on which nothing was heard for a while is broken; before that, the silent node's port is dialled, to learn how it is
silent. Nothing here waits for a peer, and nothing grows with what a peer or a stranger sends.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.log import log
from drumline.net.connection import MAX_UNSENT_BYTES, Acceptor, PeerConnection, PendingConnections
from drumline.net.frames import FrameError, Message
from drumline.net.handshake import answer, dial
from drumline.net.reasons import Reason, reason_of

NUM_HUBS = 3
PURPOSE = "watch"
CONNECT_S = 1.5
AGAIN_S = 1.0
LOOK_EVERY_S = 0.25
PROBE_AFTER_S = 1.1
"""Of silence; with CONNECT_S it is known within 3 s how a node is silent."""
BREAK_AFTER_S = 6.0
"""Of silence. Long enough for TCP to get over a short gap by itself."""
LATE_S = 0.5
LONG_SILENT_S, SELDOM_S = 30.0, 5.0
"""One that has been silent for long is asked for less often."""
MOST_PROBES = 32
FAREWELL_TURNS = 3
"""Of the event loop: a connection that was being made when the channel was closed is made by then, and ended."""
REPLACED, OVER = "it dialled anew", "the channel was closed"


@dataclass(frozen=True)
class Peer:
    """Where the sidecar of a node listens."""

    node: int
    host: str
    address: str
    port: int


class Channel:
    """This node's lines. `peers` may hold this node too, which is passed over; `listener` is taken over."""

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
        self.peers = {one.node: one for one in peers if one.node != me and min(one.node, me) < NUM_HUBS}
        """Those that there is a line to."""
        self.refused: Counter[str] = Counter()
        """Connections that were cut off for what came over them, by what that was."""
        self._secret, self._on_message = secret, on_message
        self._acceptor = None if listener is None else Acceptor(listener, self._make_connection)
        self._callers = frozenset(node for node in self.peers if node > me)
        self._pending = PendingConnections({one.address for one in peers})
        self._connections: dict[int, PeerConnection] = {}
        self._heard: dict[int, float] = {}
        self._how: dict[int, str] = {}
        self._probed: dict[int, float] = {}
        self._num_probes = 0
        self._all_connections: set[PeerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun = time.monotonic()
        self._is_closed = False

    async def start(self) -> None:
        self._begun = time.monotonic()
        if self._acceptor is not None:
            self._acceptor.open()
        for peer in self.peers.values():
            if peer.node < self.me:
                self._run(self._keep_dialling(peer))
        self._run(self._keep_looking())

    async def close(self) -> None:
        """No task, socket or timer is left. May be called twice."""
        self._is_closed = True
        if self._acceptor is not None:
            await self._acceptor.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(FAREWELL_TURNS):
            for line in list(self._all_connections):
                line.end(OVER)
                await line.ended.wait()
            await asyncio.sleep(0)

    def send(self, node: int, message: dict[str, Any], *, max_unsent: int = MAX_UNSENT_BYTES) -> bool:
        """Never waits. False: there is no line, or it takes no more for now; then the message is dropped. `max_unsent`:
        bytes that may be waiting on the line already."""
        line = self._connections.get(node)
        try:
            return line is not None and line.send(message, max_unsent=max_unsent)
        except FrameError as error:
            log.warning(f"a message to node {node} was not sent: {error.what}")
            return False

    def heartbeat_age_s(self) -> dict[int, float]:
        """By node, how long ago it was last heard; infinite for one that never was."""
        now = time.monotonic()
        return {node: now - self._heard.get(node, -math.inf) for node in self.peers}

    def open_s(self) -> float:
        """For how long this channel has been open: a node that was never heard may not have had its time."""
        return time.monotonic() - self._begun

    def connect_result(self, node: int) -> str:
        """What came of the last try to reach a node that is silent; empty while it is heard."""
        return self._how.get(node, "")

    # Lines tell us

    def connection_made(self, line: PeerConnection) -> None:
        self._all_connections.add(line)
        if self._is_closed:
            line.end(OVER)
        elif not line.is_ours:
            self._pending.add(line)

    def connection_opened(self, line: PeerConnection, node: int) -> None:
        self._pending.remove(line)
        if (old := self._connections.get(node)) is not None:
            old.end(REPLACED)  # it was restarted, or knows better than we do that the old one is dead
        self._connections[node] = line

    def message_received(self, line: PeerConnection, message: Message) -> None:
        node = line.node
        if node is None or self._connections.get(node) is not line:
            return
        self._heard[node] = time.monotonic()
        self._how.pop(node, None)
        try:
            self._on_message(node, message)
        except Exception:
            log.exception(f"a message of node {node} could not be worked on")

    def connection_ended(self, line: PeerConnection) -> None:
        self._pending.remove(line)
        self._all_connections.discard(line)
        if line.is_refused:
            self._count(line)
        if line.node is not None and self._connections.get(line.node) is line:
            del self._connections[line.node]
            if (
                line.why != Reason.NO_ANSWER or line.node not in self._how
            ):  # a try to reach it has said that better
                self._how[line.node] = line.why

    def _count(self, line: PeerConnection) -> None:
        if not self.refused[line.why]:  # once of a kind: a stranger shall not fill the log
            log.warning(f"a connection with {line.address} was cut off: {line.why}")
        self.refused[line.why] += 1

    # Both ways in

    def _make_connection(self) -> PeerConnection:
        return PeerConnection(self, answer(self._secret, PURPOSE, self.me, self._callers), is_ours=False)

    async def _keep_dialling(self, peer: Peer) -> None:
        while True:
            try:
                await self._dial(peer)
            except OSError as error:
                self._how[peer.node] = reason_of(error)
            await asyncio.sleep(AGAIN_S)

    async def _dial(self, peer: Peer) -> None:
        """Until the line has ended."""
        line = PeerConnection(self, dial(self._secret, PURPOSE, self.me, peer.node), is_ours=True)
        call = await _connect(peer)
        await asyncio.get_running_loop().create_connection(lambda: line, sock=call)
        await line.ended.wait()
        if line.node is None:
            self._how[peer.node] = line.why

    # Silence

    async def _keep_looking(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = time.monotonic()
            # When this process itself did not run, what was said meanwhile is still to be read.
            if now - last < LOOK_EVERY_S + LATE_S:
                self._break_silent_lines(now)
                self._probe_silent_nodes(now)
            last = now

    def _break_silent_lines(self, now: float) -> None:
        for node, line in list(self._connections.items()):
            if now - max(line.since, self._heard.get(node, 0.0)) > BREAK_AFTER_S:
                line.end(Reason.NO_ANSWER)

    def _probe_silent_nodes(self, now: float) -> None:
        """But for those that are being dialled anyway. The one that was probed last comes last."""
        due = [
            node
            for node in self.peers
            if now - self._heard.get(node, self._begun) > PROBE_AFTER_S
            and now - self._probed.get(node, -math.inf) > self._probe_every_s(node, now)
            and (node in self._callers or node in self._connections)
        ]
        due.sort(key=lambda node: self._probed.get(node, -math.inf))
        for node in due[: MOST_PROBES - self._num_probes]:
            self._probed[node] = math.inf
            self._num_probes += 1
            self._run(self._probe(self.peers[node]))

    def _probe_every_s(self, node: int, now: float) -> float:
        return SELDOM_S if now - self._heard.get(node, self._begun) > LONG_SILENT_S else AGAIN_S

    async def _probe(self, peer: Peer) -> None:
        """To the peer it is a stranger that hangs up."""
        begun = time.monotonic()
        how: str = Reason.NO_REPLY
        try:
            (await _connect(peer)).close()
        except OSError as error:
            how = reason_of(error)
        self._num_probes -= 1
        self._probed[peer.node] = time.monotonic()
        if self._heard.get(peer.node, -math.inf) < begun:
            self._how[peer.node] = how

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _connect(peer: Peer) -> socket.socket:
    call = socket.socket(socket.AF_INET6 if ":" in peer.address else socket.AF_INET)
    call.setblocking(False)
    try:
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(call, (peer.address, peer.port))
    except BaseException:
        call.close()
        raise
    return call


def known_ages(ages: Mapping[int, float]) -> dict[int, float]:
    """Without nodes that never sent anything."""
    return {node: age for node, age in ages.items() if age < math.inf}
