"""Channels of several nodes in one event loop, each on a loopback address of its own, over real
sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from drumline.watch.sidecar.sidecar_network import SidecarNetwork
from drumline.watch.sidecar.sidecar_options import Peer

SECRET = b"a secret of these tests"
PULSE_S = 0.1


def listeners(num_nodes: int) -> list[socket.socket]:
    return [socket.create_server((f"127.0.0.{node + 1}", 0)) for node in range(num_nodes)]


def peers_of(sockets: list[socket.socket]) -> list[Peer]:
    return [
        Peer(node, f"host-{node}", *listener.getsockname()) for node, listener in enumerate(sockets)
    ]


class Node:
    """One sidecar's network. It sends pulses to all that it has a line to, and keeps what it
    hears."""

    def __init__(
        self, me: int, peers: list[Peer], listener: socket.socket, *, secret: bytes = SECRET
    ) -> None:
        self.me = me
        self.peers = peers
        self.listener = listener
        # As a sidecar has it: the rank that started it keeps the socket itself.
        self.network = SidecarNetwork(
            me=me, peers=peers, secret=secret, on_message=self._take, listener=listener.dup()
        )
        self.heard: dict[int, list[dict[str, Any]]] = {}
        self.pulsing: asyncio.Task[None] | None = None

    async def start(self, *, pulses: bool = True) -> Node:
        await self.network.start()
        if pulses:
            self.pulsing = asyncio.create_task(self._pulse())
        return self

    async def close(self) -> None:
        if self.pulsing is not None:
            self.pulsing.cancel()
            await asyncio.gather(self.pulsing, return_exceptions=True)
        await self.network.close()

    def num_heard(self, node: int) -> int:
        return len(self.heard.get(node, ()))

    def _take(self, node: int, message: dict[str, Any]) -> None:
        self.heard.setdefault(node, []).append(message)

    async def _pulse(self) -> None:
        while True:
            for peer in self.peers:
                self.network.send(
                    peer.node, {"from": self.me, "heartbeat_age_s": self.network.heartbeat_ages()}
                )
            await asyncio.sleep(PULSE_S)


@contextlib.asynccontextmanager
async def nodes(num_nodes: int) -> AsyncIterator[list[Node]]:
    """All of them up and talking; nothing is left of them after."""
    sockets = listeners(num_nodes)
    peers = peers_of(sockets)
    all_nodes = [Node(me, peers, listener) for me, listener in enumerate(sockets)]
    try:
        for node in all_nodes:
            await node.start()
        yield all_nodes
    finally:
        for node in all_nodes:
            await node.close()
        for connection in sockets:
            connection.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def until(condition: Callable[[], object], what: str, *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def until_all_talk(all_nodes: list[Node]) -> None:
    """From now on, each hears one more of every other that it has a line to."""
    before = {(a.me, b): a.num_heard(b) for a in all_nodes for b in a.network.peers}

    def all_more() -> bool:
        return all(a.num_heard(b) > before[a.me, b] for a in all_nodes for b in a.network.peers)

    await until(
        all_more,
        f"not all hear each other: {[(a.me, a.network.heartbeat_ages()) for a in all_nodes]}",
    )
