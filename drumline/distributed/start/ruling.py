"""One rank decides, all hear it: before there is a group, what rank 0 finds wrong must stop every rank alike.

It travels through the store. Rank 0 often runs that store, so it stays until the others have heard.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

from drumline.errors import PreflightError
from drumline.launch.node.sealed_store import SealedStore

HEARING_S = 2.0
POLL_S = 0.02
Ruling = dict[str, Any]


def rule(store: SealedStore, name: str, decide: Callable[[], Any], **more: Any) -> Ruling:
    """On rank 0: decide, and tell the others. `more`: whatever else they should hear, also when it went wrong."""
    try:
        ruling = {**more, "value": decide()}
    except PreflightError as error:
        ruling = {**more, "what": error.what, "next": error.next_step}
    store.set(_key(name), json.dumps(ruling))
    return ruling


def has_ruled(store: SealedStore, name: str) -> bool:
    return store.check([_key(name)])


def hear(store: SealedStore, name: str, *, deadline: float) -> Ruling:
    """On the other ranks: wait for what rank 0 says."""
    store.wait([_key(name)], timedelta(seconds=max(1.0, deadline - time.monotonic())))
    ruling: Ruling = json.loads(store.get(_key(name)))
    return ruling


def follow(store: SealedStore, name: str, ruling: Ruling, *, listeners: Collection[int]) -> Any:
    """What was decided, or the error. `listeners`: on rank 0, the others that are here; it waits for them to hear."""
    if "what" not in ruling:
        return ruling["value"]
    heard = f"{_key(name)}/heard"
    store.add(heard, 0 if listeners else 1)
    until = time.monotonic() + HEARING_S
    while listeners and store.add(heard, 0) < len(listeners) and time.monotonic() < until:
        time.sleep(POLL_S)
    raise PreflightError(ruling["what"], next_step=ruling["next"])


def _key(name: str) -> str:
    return f"ruling/{name}"
