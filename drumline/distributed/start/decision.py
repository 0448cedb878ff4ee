"""Rank 0 decides and all ranks get the result: before there is a group, what it finds wrong must stop every rank alike.

The result travels through the store. Rank 0 often runs that store, so on an error it waits until the others have read
it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from drumline.errors import PreflightError
from drumline.launch.topology import Topology
from drumline.net.sealed_store import SealedStore

READ_S = 2.0
POLL_S = 0.02
Decision = dict[str, Any]


def agree(store: SealedStore, topology: Topology, name: str, decide: Callable[[], Any], *, deadline: float) -> Any:
    """Collective: what `decide` returns on rank 0; the PreflightError that it raises is raised on every rank."""
    if topology.rank > 0:
        return follow(store, name, wait_for(store, name, deadline=deadline), readers=())
    return follow(store, name, announce(store, name, decide), readers=range(1, topology.world_size))


def announce(store: SealedStore, name: str, decide: Callable[[], Any], **more: Any) -> Decision:
    """On rank 0: decide, and publish it. `more`: what the others should know in any case."""
    try:
        decision = {**more, "value": decide()}
    except PreflightError as error:
        decision = {**more, "what": error.what, "next": error.next_step}
    store.set(_key(name), json.dumps(decision))
    return decision


def is_announced(store: SealedStore, name: str) -> bool:
    return store.check([_key(name)])


def wait_for(store: SealedStore, name: str, *, deadline: float) -> Decision:
    """On the other ranks."""
    store.wait([_key(name)], timedelta(seconds=max(1.0, deadline - time.monotonic())))
    decision: Decision = json.loads(store.get(_key(name)))
    return decision


def follow(store: SealedStore, name: str, decision: Decision, *, readers: Collection[int]) -> Any:
    """What was decided, or the error. `readers`: on rank 0, the others that are there; it waits until they have read an
    error."""
    if "what" not in decision:
        return decision["value"]
    read = f"{_key(name)}/read"
    store.add(read, 0 if readers else 1)
    until = time.monotonic() + READ_S
    while readers and store.add(read, 0) < len(readers) and time.monotonic() < until:
        time.sleep(POLL_S)
    raise PreflightError(decision["what"], next_step=decision["next"])


def _key(name: str) -> str:
    return f"decision/{name}"
