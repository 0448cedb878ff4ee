"""Where torch's c10d rendezvous keeps its state: as JSON under the job's seal. torch itself would unpickle, and so run,
what anybody has written there."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import astuple
from datetime import datetime
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    _NodeDesc,
    _RendezvousState,
)

from drumline.launch.node.sealed_store import SealedStore, document

KEY = "state"
NOTHING = b"{}"
KINDS: dict[str, type | tuple[type, ...]] = {
    "round": int,
    "complete": bool,
    "deadline": (str, type(None)),
    "closed": bool,
    "participants": list,
    "wait_list": list,
    "redundancy_list": list,
    "last_heartbeats": list,
}


class SealedBackend(RendezvousBackend):
    """What a stranger writes over the state, or deletes, is put back as this node knew it last."""

    def __init__(self, store: SealedStore) -> None:
        self._store = store
        self._last, self._version = NOTHING, 0

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._known(self._put(b"", self._last))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        ours = pickle.loads(state)  # noqa: S301  # of this process: torch has pickled it for us
        mine = encode(ours, self._version + 1)
        found = self._put(token if isinstance(token, bytes) else NOTHING, mine)
        known = self._known(found)
        return None if known is None else (*known, known[1] == mine)

    def _put(self, expected: bytes, desired: bytes) -> bytes:
        try:
            return self._store.compare_set(KEY, expected, desired)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the connection to the store has failed") from error

    def _known(self, found: bytes) -> tuple[bytes, Token] | None:
        state = decode(found)
        # No secret keeps strangers out; with one they can put back what they have recorded.
        if (state is None and found != NOTHING) or version_of(found) < self._version:
            found = self._put(found, self._last)
            state = decode(found)
        if state is None:
            return None
        self._last, self._version = found, version_of(found)
        return pickle.dumps(state), found


def version_of(text: bytes) -> int:
    """How many states came before it in this launch."""
    found = document(text, version=int)
    return found["version"] if found else 0


def encode(state: _RendezvousState, version: int = 0) -> bytes:
    """All that torch keeps of it; what a later torch adds must be JSON already."""
    fields: dict[str, Any] = {
        **vars(state),
        "version": version,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "participants": [[*astuple(node), rank] for node, rank in state.participants.items()],
        "wait_list": [astuple(node) for node in sorted(state.wait_list)],
        "redundancy_list": [astuple(node) for node in sorted(state.redundancy_list)],
        "last_heartbeats": [[*astuple(node), at.isoformat()] for node, at in state.last_heartbeats.items()],
    }
    return json.dumps(fields).encode()


def decode(text: bytes) -> _RendezvousState | None:
    """None for what is no state."""
    fields = document(text, **KINDS)
    if fields is None:
        return None
    try:
        fields["participants"] = _by_node(fields["participants"], _rank)
        fields["last_heartbeats"] = _by_node(fields["last_heartbeats"], _time)
        for name in ("wait_list", "redundancy_list"):
            fields[name] = {_node(*entry) for entry in fields[name]}
        fields["deadline"] = None if fields["deadline"] is None else _time(fields["deadline"])
    except (LookupError, TypeError, ValueError):
        return None
    state = _RendezvousState()
    vars(state).update({name: fields[name] for name in vars(state) if name in fields})
    return state


def _by_node(entries: Iterable[list[Any]], value: Callable[[Any], Any]) -> dict[_NodeDesc, Any]:
    return {_node(*entry[:3]): value(*entry[3:]) for entry in entries}


def _node(address: Any, pid: Any, number: Any) -> _NodeDesc:
    if not isinstance(address, str) or type(pid) is not int or type(number) is not int:
        raise TypeError
    return _NodeDesc(address, pid, number)


def _rank(given: Any) -> int:
    if type(given) is not int:
        raise TypeError
    return given


def _time(text: Any) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError
    return at
