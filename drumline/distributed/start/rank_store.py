"""Where ranks meet before there is a group: the store that torchrun's agent or rank 0 runs.

torch waits for it in silence, and prints its own C++ stack when it gives up. So a plain socket goes first: it knows a
name that does not resolve from a port that refuses and from one that is silent, and it can say so on the way.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from drumline.errors import PreflightError
from drumline.launch.node.sealed_store import SealedStore
from drumline.launch.node.sockets import connect_address, listen_for_store, reached_address
from drumline.launch.topology import Topology
from drumline.net.dial import FIRST_NOTICE_S, WaitNotice, wait_for_port
from drumline.net.interfaces import EVERYWHERE, own_binding
from drumline.net.reasons import CLOSED_S, Reason, closed_data_ports, explained
from drumline.terminal import print_message

CONNECT_S = 2.0
NAME_PATIENCE_S = 30.0  # a pod's name may come later than the pod

PREFIX = "drumline"
_hosted: dict[
    int, dist.TCPStore
] = {}  # by port: a group that was left keeps its store, and the next meets there too


def open_store(topology: Topology, *, timeout_s: float) -> SealedStore:
    """Connect to the store that torchrun's agent or rank 0 runs; only ranks with the same secret believe each other."""
    return SealedStore(_connect(topology, timeout_s), topology.secret, PREFIX)


def _connect(topology: Topology, timeout_s: float) -> dist.Store:
    hosts_store = topology.rank == 0 and not topology.agent_hosts_store
    address = f"{topology.master_addr}:{topology.master_port}"
    if hosts_store and topology.master_port in _hosted:
        return _hosted[topology.master_port]
    bound = EVERYWHERE
    if hosts_store:
        _warn_of_a_strange_address(topology)
        bound = own_binding(topology.master_addr)
        if bound == EVERYWHERE != topology.master_addr:
            print_message(
                f"WARNING: MASTER_ADDR {topology.master_addr} does not tell which address of {topology.host} the other "
                "ranks reach: the store listens on all networks. Next: set MASTER_ADDR to an address of that host"
            )
    else:
        _wait_until_open(topology, timeout_s=timeout_s)
    try:
        # Its host needs no name for itself, and may not know the one the others use.
        store = dist.TCPStore(
            connect_address(bound)
            if hosts_store
            else reached_address(topology.master_addr, topology.master_port),
            topology.master_port,
            is_master=hosts_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listen_for_store(bound, topology.master_port)[0] if hosts_store else None,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        if not hosts_store:
            raise _unreachable(topology, f"within {timeout_s:g} s: {_first_line(error)}") from error
        raise PreflightError(
            f"rank 0 could not open its store {address}: {_first_line(error)}",
            next_step="choose another MASTER_PORT, and a MASTER_ADDR that is this host",
        ) from error
    if hosts_store:
        _hosted[topology.master_port] = store
    return store


def _wait_until_open(topology: Topology, *, timeout_s: float) -> None:
    host, port = topology.master_addr, topology.master_port
    notice = WaitNotice(first_s=min(FIRST_NOTICE_S, timeout_s / 4))

    def report(reason: str) -> None:
        # All ranks of a host see the same; one of them reports it.
        if topology.local_rank == 0 and notice.is_due():
            print_message(
                f"rank {topology.rank} on {topology.host} waits for rank 0's store {host}:{port}: "
                f"{explained(reason)} ({notice.waited_s:.0f} s of {timeout_s:g} s)"
            )

    limits: dict[str, float] = {Reason.UNKNOWN_NAME: NAME_PATIENCE_S}
    if topology.agent_hosts_store:
        # torchrun's agent listens there since before there were ranks: it will not start later.
        limits[Reason.NO_ANSWER] = CLOSED_S
    blocked = wait_for_port(
        host, port, timeout_s=timeout_s, connect_s=CONNECT_S, limits=limits, report=report
    )
    if blocked is None:
        return
    if topology.agent_hosts_store and blocked.reason == Reason.NO_ANSWER and blocked.lasted_s >= CLOSED_S:
        raise closed_data_ports([topology.host], host, port=port, reason=blocked.reason)
    within = "" if blocked.reason == Reason.UNKNOWN_NAME else f" within {timeout_s:g} s"
    raise _unreachable(topology, f"{within}: {explained(blocked.reason)}")


def _unreachable(topology: Topology, why: str) -> PreflightError:
    address = f"{topology.master_addr}:{topology.master_port}"
    return PreflightError(
        f"rank {topology.rank} on {topology.host} could not reach rank 0's store {address}{why}",
        next_step="check that rank 0 runs, that MASTER_ADDR is its host as this one knows it, and that no firewall "
        "closes the port",
    )


def _warn_of_a_strange_address(topology: Topology) -> None:
    """A service's address is not its host's either, so that is no error; but mostly it is a mistake."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(topology.master_addr, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(target)
    except OSError as error:
        known = "does not resolve" if isinstance(error, socket.gaierror) else "is no address of this host"
        print_message(
            f"MASTER_ADDR {topology.master_addr} {known}, though rank 0 runs here, on {topology.host}"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
