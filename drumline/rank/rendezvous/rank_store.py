"""The store in which ranks join before there is a group, and rank 0 decides. torchrun's agent runs
it, or rank 0.

torch waits for it without a message, and prints its own C++ stack when it gives up. So a plain
socket goes first: it tells a name that does not resolve from a port that refuses and from one that
does not answer, and the wait is reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from drumline.base.errors import PreflightError, summary
from drumline.base.rank_environment import Topology
from drumline.net.dial import CLOSED_S, Reason, explained, wait_for_port
from drumline.rank.sealed_store import SealedStore
from drumline.rank.tcp_store import open_tcp_store, store_binding

UNKNOWN_NAME_S = 30.0  # a pod's name may exist later than the pod
READ_S = 2.0
POLL_S = 0.02
Decision = dict[str, Any]

# By port: a group that was left keeps its store, and the next one uses it too.
_hosted: dict[int, dist.TCPStore] = {}


def open_store(
    topology: Topology,
    *,
    timeout_s: float,
    check: Callable[[], None] | None = None,
) -> SealedStore:
    """Only ranks with the same secret believe each other. `check`: called while this waits; what it
    raises ends the wait."""
    host = topology.master_addr
    port = topology.master_port
    runs_elsewhere = topology.rank > 0 or topology.agent_hosts_store

    store = _hosted.get(port)
    try:
        if runs_elsewhere:
            _wait_until_open(topology, timeout_s=timeout_s, check=check)
            store = open_tcp_store(host, port, timeout_s=timeout_s)
        elif store is None:
            bound = store_binding(host, name="MASTER_ADDR")
            store = open_tcp_store(host, port, timeout_s=timeout_s, bound=bound)
            _hosted[port] = store
    except (RuntimeError, OSError) as error:
        if runs_elsewhere:
            raise _unreachable(topology, timeout_s, summary(error)) from error

        raise PreflightError(
            f"rank 0 could not open its store {host}:{port}: {summary(error)}",
            next_step="choose another MASTER_PORT, and a MASTER_ADDR that is this host",
        ) from error

    return SealedStore(store, topology.secret)


def host_store(address: str, port: int, *, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """The store of this process at that port (0: any that is free), opened if there is none; and
    its port."""
    store = _hosted.get(port) or open_tcp_store(address, port, timeout_s=timeout_s, bound=address)
    _hosted[store.port] = store
    return store, store.port


def _wait_until_open(
    topology: Topology,
    *,
    timeout_s: float,
    check: Callable[[], None] | None,
) -> None:
    """Wait until the store's port answers; raise when that cannot be expected any more."""
    limits: dict[str, float] = {Reason.UNKNOWN_NAME: UNKNOWN_NAME_S}
    if topology.agent_hosts_store:
        # torchrun's agent listens there since before there were ranks: it will not start later.
        limits[Reason.NO_ANSWER] = CLOSED_S

    waiting = ""
    if topology.local_rank == 0:  # all ranks of a host see the same
        waiting = f"rank {topology.rank} on {topology.host} waits for rank 0's store"

    blocked = wait_for_port(
        topology.master_addr,
        topology.master_port,
        timeout_s=timeout_s,
        limits=limits,
        waiting=waiting,
        check=check,
    )

    if blocked is not None:
        waited_s = min(timeout_s, limits.get(blocked.reason, timeout_s))
        raise _unreachable(topology, waited_s, explained(blocked.reason))


def _unreachable(topology: Topology, waited_s: float, why: str) -> PreflightError:
    """This rank found no way to the store."""
    return PreflightError(
        f"rank {topology.rank} on {topology.host} could not reach rank 0's store {topology.master_addr}:"
        f"{topology.master_port} within {waited_s:g} s: {why}",
        next_step="check that rank 0 runs, that MASTER_ADDR is its host as this one knows it, and that no firewall "
        "closes the port",
    )


# What rank 0 decides for all: before there is a group, what it finds wrong must stop every rank
# alike.


def agree(
    store: SealedStore,
    topology: Topology,
    key: str,
    decide: Callable[[], Any],
    *,
    deadline: float,
) -> Any:
    """Collective: what `decide` returns on rank 0; the PreflightError that it raises is raised on
    every rank."""
    if topology.rank == 0:
        return follow(store, key, announce(store, key, decide), num_readers=topology.world_size - 1)

    store.wait([key], timedelta(seconds=max(1.0, deadline - time.monotonic())))
    return follow(store, key, json.loads(store.get(key)))


def announce(store: SealedStore, key: str, decide: Callable[[], Any], **fields: Any) -> Decision:
    """On rank 0: decide, and publish it. `fields`: what the others should know in any
    case."""
    decision = {**fields, **outcome(decide)}
    store.set(key, json.dumps(decision))
    return decision


def follow(
    store: SealedStore,
    key: str,
    decision: Decision,
    *,
    num_readers: int = 0,
    read_s: float = READ_S,
) -> Any:
    """What was decided, or the error. `num_readers`: on rank 0, which often runs the store, how
    many others it waits for, until they have read an error; for `read_s` at most."""
    if "what" in decision:
        read = f"{key}/read"
        store.add(read, 0 if num_readers else 1)
        until = time.monotonic() + read_s
        while num_readers and store.add(read, 0) < num_readers and time.monotonic() < until:
            time.sleep(POLL_S)
    return value_of(decision)


def outcome(make: Callable[[], Any], *, host: str = "") -> Decision:
    """What it returns, or the PreflightError that it raises, for other ranks. `host`: where that
    is."""
    try:
        return {"value": make()}
    except PreflightError as error:
        return {"what": f"{error.what}, on {host}" if host else error.what, "next": error.next_step}


def value_of(decision: Decision) -> Any:
    """The other side of `outcome`: raises the error."""
    if "what" in decision:
        raise PreflightError(decision["what"], next_step=decision["next"])
    return decision["value"]
