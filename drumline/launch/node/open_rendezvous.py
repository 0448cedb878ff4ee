"""Opens the rendezvous of a node, in the store that the first node's launcher runs."""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from drumline.base.errors import PreflightError
from drumline.base.job_secret import SECRET_ENV, derived, new_secret
from drumline.base.text import print_message
from drumline.launch.node.membership import Membership
from drumline.launch.node.node_rendezvous import AgentRendezvous, NodeRendezvous
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import (
    CLOSED_S,
    OPEN_RENDEZVOUS,
    Reason,
    explained,
    explained_closed,
    wait_for_port,
)
from drumline.net.interfaces import LOOPBACK, own_address
from drumline.rank.sealed_store import SealedStore
from drumline.rank.tcp_store import (
    break_dead_connections,
    local_address,
    open_tcp_store,
    store_binding,
)

STORE_TIMEOUT_S = 30
# torch's default.
LOCAL_STORE_TIMEOUT_S = 300
# How long a reason may last between hosts that are up; a launcher that refuses connections may
# still be loading torch.
LIMITS_S: dict[str, float] = {
    Reason.NO_ANSWER: CLOSED_S,
    Reason.NO_ROUTE: CLOSED_S,
    Reason.UNKNOWN_NAME: CLOSED_S,
    Reason.REFUSED: 60.0,
}


class SingleNodeRendezvous(AgentRendezvous):
    """For a job on one machine: every attempt gets a new store, which only this machine can
    reach."""

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        # Any user of this machine can reach the store.
        self.ranks_secret = new_secret()
        store = open_tcp_store(LOOPBACK, 0, timeout_s=LOCAL_STORE_TIMEOUT_S, bound=LOOPBACK)
        # The agent's own part, too: ranks read their numbers from it.
        agents: Any = SealedStore(store, self.ranks_secret, "drumline/agents")
        return RendezvousInfo(agents, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def is_closed(self) -> bool:
        return False

    def num_nodes_waiting(self) -> int:
        return 0

    def set_closed(self) -> None: ...

    def shutdown(self) -> bool:
        return True


class OwnRendezvous(SingleNodeRendezvous):
    """For a node whose ranks find those of the others themselves (`--dist.on_lost_node continue`):
    its launcher never waits for another, and restarts no ranks because of one."""

    def __init__(self, node: NodePlan, secret: str | None) -> None:
        super().__init__(node)
        self._secret = secret

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        local_info = super().next_rendezvous()
        self.ranks_secret = ""
        if self._secret is not None:
            self.ranks_secret = derived(self._secret, "ranks of nodes that continue")
        place = RendezvousStoreInfo(self.node.master_addr, self.node.master_port)
        return RendezvousInfo(local_info.store, 0, 1, place)


def open_rendezvous(
    node: NodePlan, secret: str | None, *, continues: bool = False
) -> AgentRendezvous:
    """The rendezvous of this node's job; node 0 runs its store. `secret`: the one that all nodes
    were given. `continues`: its ranks do not need those of other nodes."""
    if node.num_nodes == 1:
        return SingleNodeRendezvous(node)
    if continues:
        _warn_without_secret(node, secret)
        return OwnRendezvous(node, secret)

    if node.node_rank > 0:
        # A controller that reached all hosts knows that they are up.
        are_up = node.job and not node.may_shrink and not node.may_be_rebooting
        hosts = (node.peers[node.node_rank], node.peers[0]) if are_up else None
        wait_for_first_node(node.endpoint, timeout_s=node.join_timeout_s, hosts=hosts)

    address = address_of(node)
    host = node.master_addr
    bound = None
    if node.node_rank == 0:
        bound = store_binding(host, name="the first node's address")
    store = _open_store(node, host, bound=bound)

    # A separate connection: a call that waits in the other does not block heartbeats.
    heartbeats = _open_store(node, local_address(bound) if bound else host)
    membership = Membership(heartbeats, node, secret)
    break_dead_connections(node.master_port, after_s=node.silence_s)
    membership.check_job()
    membership.join()
    _warn_without_secret(node, secret)
    return NodeRendezvous(store, node, address, membership)


def _warn_without_secret(node: NodePlan, secret: str | None) -> None:
    """Jobs of several nodes listen on the network."""
    if secret is None:
        print_message(
            f"warning: {SECRET_ENV} is not set: whoever reaches {node.endpoint} can end or misdirect this job. Try: "
            "set it to one value on all nodes"
        )


def wait_for_first_node(
    endpoint: str,
    *,
    timeout_s: float,
    hosts: tuple[str, str] | None = None,
    limits: Mapping[str, float] = LIMITS_S,
) -> None:
    """Return when the first node listens. `hosts`: this one and the first, if both are up: then
    `limits` apply."""
    host, _, port = endpoint.rpartition(":")
    limits = limits if hosts else {}
    waiting = "waiting for the first node at"
    blocked = wait_for_port(host, int(port), timeout_s=timeout_s, limits=limits, waiting=waiting)
    if blocked is None:
        return

    if hosts is None or blocked.lasted_s < limits.get(blocked.reason, math.inf):
        raise PreflightError(
            f"the first node did not answer at {endpoint} within {timeout_s:g} s: {explained(blocked.reason)}",
            next_step="start the node with NODE_RANK 0 there, and open that port to this machine",
        )

    source, target = hosts
    if blocked.reason == Reason.UNKNOWN_NAME:
        raise PreflightError(
            f"the name {host} of the first host does not resolve on {source}",
            next_step=f"add {host} to DNS, or to /etc/hosts on {source}; or give an address in --hosts",
        )

    reason = explained_closed(blocked.reason)
    raise PreflightError(
        f"the rendezvous port {port} is closed from {source} to {target} ({reason})",
        next_step=OPEN_RENDEZVOUS.format(port=port, host=target),
    )


def _open_store(node: NodePlan, host: str, *, bound: str | None = None) -> dist.TCPStore:
    """`bound`: on the first node, the only address at which it listens."""
    timeout_s = max(STORE_TIMEOUT_S, 2 * node.silence_s)
    try:
        return open_tcp_store(host, node.master_port, timeout_s=timeout_s, bound=bound)
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PreflightError(
                f"the rendezvous port {node.master_port} of {socket.gethostname()} is in use",
                next_step="end the process that uses it (another job, or an earlier start of this one?), or choose "
                "another: --port, --master ADDRESS:PORT or MASTER_PORT",
            ) from error

        reason = str(error).strip().splitlines()[0]
        failed = PreflightError(
            f"no store could be opened at {node.endpoint}: {reason}",
            next_step="check what listens there: it must be the launcher of the node with NODE_RANK 0",
        )
        failed.lost_first_node = node.node_rank > 0
        raise failed from error


def address_of(node: NodePlan) -> str:
    """Where the other nodes reach this one."""
    return LOOPBACK if node.num_nodes == 1 else node.known_address or own_address(node.master_addr)
