"""A group of nodes that train together, and their stores: the first rank of each node runs one, and
all know them."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

from drumline.base.background import in_background
from drumline.base.topology import Topology
from drumline.rank.rendezvous.rank_store import host_store
from drumline.rank.sealed_store import SealedStore, document
from drumline.rank.tcp_store import break_dead_connections, open_tcp_store

CONNECT_S = 3.0
# A host that loses its power closes no connection: without an answer for so long it is lost.
SILENT_S = 15
T = TypeVar("T")


@dataclass(frozen=True)
class LiveNode:
    number: int
    """As the launcher counts; it keeps it when it joins again."""
    host: str
    address: str
    port: int
    """Of its store."""
    process: str
    """Tells this start of its ranks from any other."""

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"

    def probe(self) -> str:
        """Whether something listens there: `open`, or `refused` by its host. `silent`: the host is
        lost, or a network is cut; then the node may still train."""
        try:
            socket.create_connection((self.address, self.port), timeout=CONNECT_S).close()
        except ConnectionError:
            return "refused"
        except OSError:
            return "silent"
        return "open"


@dataclass(eq=False)
class Redirected(Exception):  # noqa: N818  # no error
    """The job that this rank would start runs already, without its node."""

    text: bytes


class RunIsOver(Exception):  # noqa: N818  # no error
    """The run that this rank would start or join has finished without its node."""


@dataclass(eq=False)
class NodesChanged(BaseException):
    """Not an error: the group is left, and the next one continues from `state`, what this rank has
    in memory."""

    state: Any


@dataclass(frozen=True)
class NodeGroup:
    """Who trains together, as the lowest of the nodes that were left decided; and the change since
    the group before."""

    generation: int
    members: tuple[LiveNode, ...]
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    def longest_change_s(self, patience_s: float) -> float:
        """Until a node has left this group, has waited for others, and knows of each that does not
        answer."""
        return 2 * (patience_s + SILENT_S * len(self.members))

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> NodeGroup | None:
        content = document(text, generation=int, members=list, lost=list, joined=list)
        if content is None:
            return None
        try:
            members = tuple(LiveNode(**card) for card in content["members"])
        except TypeError:  # not the fields of a node
            return None
        return cls(content["generation"], members, tuple(content["lost"]), tuple(content["joined"]))


def answered(call: Callable[[], T]) -> T:
    """What it returns or raises; TimeoutError after SILENT_S. A process that is stopped keeps its
    connections, and a call to its store would wait forever; it waits on in a thread."""
    return in_background(call, name="drumline-ask").result(timeout=SILENT_S)


class NodeStores:
    """The stores of all nodes, as one rank uses them."""

    OVER = "over"
    REDIRECT = "redirect"
    FACTS = "facts"
    """In a store: the run has ended; which nodes train already; and what with."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.process = topology.node_start or secrets.token_hex(8)
        self.own_store: SealedStore | None = None
        """The store of this node."""
        self.card = LiveNode(
            topology.rank // topology.local_world_size, topology.host, "", 0, self.process
        )
        """This node, once its first rank, which is this one, has a store."""
        self.dead_processes: set[str] = set()
        """Starts of nodes that another start has followed, or that do not answer although their
        host does."""
        self._connected: dict[str, SealedStore] = {}
        self._announcing: Future[None] | None = None

    def host(self, address: str, port: int, *, timeout_s: float) -> None:
        base, port = host_store(address, port, timeout_s=timeout_s)
        self.own_store = SealedStore(base, self._topology.secret)
        self.card = replace(self.card, address=address, port=port)
        self.own_store.set("process", self.process)

    def host_for(self, peer: LiveNode, *, timeout_s: float) -> None:
        """At the address by which this node reaches that one; the first node's is at its
        endpoint."""
        if self.own_store is None and self.card.number == 0:
            self.host(self._topology.master_addr, self._topology.master_port, timeout_s=timeout_s)
        elif self.own_store is None:
            with socket.create_connection(
                (peer.address, peer.port), timeout=CONNECT_S
            ) as connection:
                address = str(connection.getsockname()[0])
            self.host(address, 0, timeout_s=timeout_s)

    def connect(self, member: LiveNode) -> SealedStore | None:
        """The store of a node; None: the node is lost, or was started again."""
        if member.process in self.dead_processes:
            return None
        # First: a store that has lost its connection prints torch's own stack.
        if member.probe() != "open":
            self._connected.pop(member.process, None)
            return None
        try:
            return answered(partial(self._open, member))
        except (OSError, RuntimeError) as error:
            if isinstance(error, TimeoutError):
                self.dead_processes.add(member.process)
            self._connected.pop(member.process, None)
            return None

    def _open(self, member: LiveNode) -> SealedStore | None:
        store = self._connected.get(member.process)
        if store is None:
            base = open_tcp_store(member.address, member.port, timeout_s=CONNECT_S)
            break_dead_connections(member.port, after_s=SILENT_S)
            store = SealedStore(base, self._topology.secret)
            self._connected[member.process] = store
        if store.peek("process") != member.process.encode():
            self.dead_processes.add(member.process)
            return None
        return store

    def redirect_first_node(self, group: NodeGroup) -> None:
        """A first node that was started again finds nobody at its own endpoint: redirect it to the
        run. In a thread: one that is stopped takes the connection, and never answers."""
        if self._announcing is None or self._announcing.done():
            self._announcing = in_background(
                partial(self._announce, group), name="drumline-announce"
            )

    def _announce(self, group: NodeGroup) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            host = self._topology.master_addr
            port = self._topology.master_port
            socket.create_connection((host, port), timeout=CONNECT_S).close()
            base = open_tcp_store(host, port, timeout_s=CONNECT_S)
            store = SealedStore(base, self._topology.secret)
            store.set(self.REDIRECT, group.encode())

    def lobby(self, store: SealedStore) -> list[LiveNode]:
        """The nodes that wait to join, in the store of the one that decides."""
        count = self._topology.world_size // self._topology.local_world_size
        nodes = []
        for number in range(count):
            text = store.peek(f"lobby/{number}") or b""  # it may be deleted meanwhile
            card = document(text, number=int, host=str, address=str, port=int, process=str)
            if card is not None:
                nodes.append(LiveNode(**card))
        return nodes
