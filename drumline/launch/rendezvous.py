"""Where the nodes of a job meet: torchrun's c10d rendezvous, with the node ranks that the user gave.

c10d numbers nodes by the order of their addresses. A person who wrote NODE_RANK into a file per machine expects rank 0,
which prints and saves, on the node with 0: so once all have met, each says who it is, and that number counts.
"""

from __future__ import annotations

import socket

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from drumline.errors import PreflightError
from drumline.launch.addresses import JOIN_TIMEOUT_S, LOOPBACK, own_address, wait_for_port
from drumline.launch.torchrun import RUN_ID, Node


class FixedRanks(RendezvousHandler):
    """The rendezvous below, in which a node keeps the rank it was given."""

    def __init__(self, inner: RendezvousHandler, node_rank: int, address: str) -> None:
        self.inner = inner
        self.node_rank = node_rank
        self.address = address

    def get_backend(self) -> str:
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """Never: rank 0 opens a store for each attempt, so that none finds what an earlier one left there."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        info = self.inner.next_rendezvous()
        store = dist.PrefixStore("drumline/nodes", info.store)
        self._claim_rank(store, info)
        place = RendezvousStoreInfo.build(self.node_rank, store, local_addr=self.address)
        return RendezvousInfo(info.store, self.node_rank, info.world_size, place)

    def _claim_rank(self, store: dist.Store, info: RendezvousInfo) -> None:
        """Collective: every node says its rank, and hears all others', so that all refuse ranks that do not fit."""
        store.set(f"claim/{info.rank}", f"{self.node_rank} {socket.gethostname()}")
        claims = [store.get(f"claim/{number}").decode().split(" ", 1) for number in range(info.world_size)]
        if sorted(int(rank) for rank, _ in claims) != list(range(info.world_size)):
            listed = ", ".join(f"{rank} on {host}" for rank, host in sorted(claims))
            raise PreflightError(
                f"the {info.world_size} nodes have NODE_RANK {listed}",
                next_step=f"give each node a NODE_RANK of its own, from 0 to {info.world_size - 1}",
            )

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self.inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        return self.inner.shutdown()


def open_rendezvous(node: Node) -> RendezvousHandler:
    """The meeting place of this node's job; the node with rank 0 keeps it."""
    address = address_of(node)
    if node.node_rank > 0:
        wait_for_port(node.endpoint)
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=node.endpoint or f"{LOOPBACK}:0",
        run_id=RUN_ID,
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        local_addr=address,
        is_host=node.node_rank == 0,
        timeout=JOIN_TIMEOUT_S,
    )
    inner = get_rendezvous_handler(parameters)
    # Alone there is nothing to settle, and the agent's store serves: a single agent's count of restarts is the job's.
    return inner if node.num_nodes == 1 else FixedRanks(inner, node.node_rank, address)


def address_of(node: Node) -> str:
    """What the other nodes call this one."""
    if node.num_nodes == 1:
        return LOOPBACK
    return node.address or own_address(node.endpoint)
