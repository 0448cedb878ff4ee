"""A group of nodes that train together, their stores, and who is in the next group.

The first rank of each node runs a store, and all know them. Of the nodes that are left, the lowest
one that still runs decides. A node that was lost, or is new, finds the run at the first node's
endpoint, and waits in the store of the one that decides until the others have finished a round.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from drumline.base.errors import TrainingError
from drumline.base.rank_environment import Topology
from drumline.base.text import join_names
from drumline.rank.rendezvous.rank_store import host_store
from drumline.rank.sealed_store import SealedStore, decoded
from drumline.rank.tcp_store import break_dead_connections, open_tcp_store

CONNECT_S = 3.0

# A host that loses its power closes no connection: without an answer for so long it is lost.
SILENT_S = 15
POLL_S = 0.05
WATCH_S = 0.25


@dataclass(frozen=True)
class LiveNode:
    """A node that trains, or waits to."""

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
    def decode(cls, text: bytes | None) -> NodeGroup | None:
        return decoded(cls, text)


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
        """Starts of nodes that another start has followed."""

        self._connected: dict[str, SealedStore] = {}

    def host(self, address: str, port: int, *, timeout_s: float) -> None:
        """Open this node's store there."""
        base, port = host_store(address, port, timeout_s=timeout_s)
        self.own_store = SealedStore(base, self._topology.secret)
        self.card = replace(self.card, address=address, port=port)
        self.own_store.set("process", self.process)

    def host_for(self, peer: LiveNode, *, timeout_s: float) -> None:
        """At the address by which this node reaches that one; the first node's is at its
        endpoint."""
        if self.own_store is not None:
            return
        if self.card.number == 0:
            self.host(self._topology.master_addr, self._topology.master_port, timeout_s=timeout_s)
            return

        endpoint = (peer.address, peer.port)
        with socket.create_connection(endpoint, timeout=CONNECT_S) as connection:
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
            store = self._connected.get(member.process)
            if store is None:
                store = self._open(member.address, member.port)
                break_dead_connections(member.port, after_s=SILENT_S)
                self._connected[member.process] = store

            if store.peek("process") == member.process.encode():
                return store
            self.dead_processes.add(member.process)
        except (OSError, RuntimeError):
            self._connected.pop(member.process, None)

        return None

    def _open(self, address: str, port: int) -> SealedStore:
        """Connect to the store there."""
        base = open_tcp_store(address, port, timeout_s=CONNECT_S)
        return SealedStore(base, self._topology.secret)

    def redirect_first_node(self, group: NodeGroup) -> None:
        """A first node that was started again finds nobody at its own endpoint: redirect it to the
        run."""
        endpoint = (self._topology.master_addr, self._topology.master_port)
        with contextlib.suppress(OSError, RuntimeError):
            socket.create_connection(endpoint, timeout=CONNECT_S).close()
            self._open(*endpoint).set(self.REDIRECT, group.encode())

    def lobby(self, store: SealedStore) -> list[LiveNode]:
        """The nodes that wait to join, in the store of the one that decides."""
        count = self._topology.world_size // self._topology.local_world_size
        texts = store.there([f"lobby/{number}" for number in range(count)]).values()
        joiners = [decoded(LiveNode, text) for text in texts]
        return [joiner for joiner in joiners if joiner is not None]


@dataclass
class NextGroup:
    """One node's part, by its first rank, when it has left the group `before`."""

    before: NodeGroup
    stores: NodeStores
    own_store: SealedStore
    """That of this node."""

    patience_s: float

    def __post_init__(self) -> None:
        self._number = self.stores.card.number
        self._key = f"decision/{self.before.generation}"

    def agree(self) -> NodeGroup:
        """Collective over the first ranks of the nodes that are left."""
        for peer in self._peers():
            store = self.stores.connect(peer)
            if store is not None:
                with contextlib.suppress(RuntimeError):
                    store.set(f"broken/{self.before.generation}", "1")

        while (decided := self._ask_lower_nodes() or self.decide()) is None:
            pass

        # For other ranks here, and nodes whose decider is lost.
        self.own_store.set(self._key, decided.encode())
        return decided

    def _peers(self) -> list[LiveNode]:
        """The other nodes of the group before."""
        members = self.before.members
        return [member for member in members if member.process != self.stores.process]

    def _ask_lower_nodes(self) -> NodeGroup | None:
        """The decision of the lowest node that answers; None: this one is the lowest."""
        for member in self.before.members:
            if member.number < self._number:
                decided = self._ask(member)
                if decided is not None:
                    return decided
        return None

    def _ask(self, member: LiveNode) -> NodeGroup | None:
        """The decision of a lower node; None: it is lost."""
        until = time.monotonic() + self.before.longest_change_s(self.patience_s)
        while (store := self.stores.connect(member)) is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"arrived/{self.before.generation}/{self._number}", self.stores.process)
                decision = store.peek(self._key)
                if decision is not None:
                    return NodeGroup.decode(decision)

            if time.monotonic() > until:
                raise TrainingError(
                    f"{member} has not left the group that lost a node, and decides who continues",
                    next_step=f"find out what {member} waits for (drumline watch), or end it: the others then continue",
                )
            time.sleep(POLL_S)

        return None

    def decide(self) -> NodeGroup | None:
        """As the lowest node that is left: wait for the others, or until it is known that they are
        lost. None: a lower one answers again."""
        arrived = [self.stores.card]
        silent = []
        waiting = self._peers()

        until = time.monotonic() + self.patience_s
        while waiting and time.monotonic() < until:
            for peer in list(waiting):
                if self._has_arrived(peer):
                    arrived.append(peer)
                    waiting.remove(peer)
                    continue

                store = self.stores.connect(peer)
                if store is not None:
                    if peer.number < self._number:
                        return None

                    with contextlib.suppress(RuntimeError):
                        decision = store.peek(self._key)
                        # it could not reach this node meanwhile
                        if decision is not None:
                            return NodeGroup.decode(decision)

                    continue

                is_dead = peer.process in self.stores.dead_processes
                state = "refused" if is_dead else peer.probe()

                # otherwise there was no connection for a moment only
                if state != "open":
                    waiting.remove(peer)
                if state == "silent":
                    silent.append(peer)

            time.sleep(POLL_S)

        self._check_majority(arrived, silent)
        return self._group_of(arrived)

    def _has_arrived(self, peer: LiveNode) -> bool:
        """Whether that node waits for this one's decision."""
        process = self.own_store.peek(f"arrived/{self.before.generation}/{peer.number}")
        return process == peer.process.encode()

    def _group_of(self, arrived: list[LiveNode]) -> NodeGroup:
        """The nodes that arrived, and those that wait to join them, which are told so."""
        lobby = self.stores.lobby(self.own_store)
        joining = [joiner for joiner in lobby if self.stores.connect(joiner) is not None]
        joining_numbers = {joiner.number for joiner in joining}
        staying = [member for member in arrived if member.number not in joining_numbers]
        lost = [member for member in self.before.members if member not in staying]

        decided = NodeGroup(
            generation=self.before.generation + 1,
            members=tuple(sorted([*staying, *joining], key=lambda member: member.number)),
            lost=tuple(map(str, lost)),
            joined=tuple(map(str, joining)),
        )

        for joiner in joining:
            self.own_store.set(f"joined/{joiner.process}", decided.encode())
            self.own_store.delete_key(f"lobby/{joiner.number}")

        return decided

    def _check_majority(self, arrived: list[LiveNode], silent: list[LiveNode]) -> None:
        """Refuse to continue beside others that may do so, too, in another part of a network that
        was cut."""
        if silent and _precedence(arrived) < _precedence(silent):
            raise TrainingError(
                f"{join_names(silent)} cannot be reached, and may continue without "
                f"{join_names(arrived)}, which ends",
                next_step="check the network between them; then start this node again, and it joins the others",
            )


def _precedence(side: list[LiveNode]) -> tuple[int, int]:
    """Of the two sides of a cut network, the one with more nodes continues; of equals, the one with
    the lowest node."""
    return len(side), -min(node.number for node in side)
