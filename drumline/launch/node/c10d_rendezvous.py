"""torch's c10d rendezvous without its unsafe parts: wall clocks, and the pickle that holds its
state.

Each node writes its heartbeat by its own wall clock, and torch compares it with the reader's: with
a clock that is 15 s off, or that jumps, a living node counts as dead. Here the age of a heartbeat
is the time since it last changed. The state is JSON under the job's seal: torch itself would
unpickle, and so execute, what anyone has written there.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    Token,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousState,
)

from drumline.rank.sealed_store import SealedStore, document

# How long after the last call to wait for a node that is alive, but has not ended its ranks yet.
LATE_S = 30
LONG_AGO = datetime.min.replace(tzinfo=UTC)
NEVER = datetime.max.replace(tzinfo=UTC)
KEY = "state"
NOTHING = b"{}"
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("participants", "wait_list", "redundancy_list", "last_heartbeats"), list),
    "round": int,
    "complete": bool,
    "deadline": (str, type(None)),
    "closed": bool,
}

# With each poll torch records an event and, for its name, reads the source of every frame on the
# stack: up to 100 ms of CPU time on each waiting node. With several nodes on few cores no poll
# finished in time, and no node could join.
torchs: Any = dynamic_rendezvous
torchs.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def make_c10d_rendezvous(
    store: dist.Store,
    keys: dist.Store,
    settings: RendezvousSettings,
    address: str,
    *,
    secret: str | None,
    count_alive: Callable[[], int],
) -> C10dRendezvous:
    """torch's c10d rendezvous in this store; `address`: this node's, for the others. `keys`: the
    same store over a separate connection, for what nodes write to each other in a round.
    `count_alive`: how many nodes will join the next round."""
    node = DynamicRendezvousHandler._node_desc_generator.generate(address)
    backend = SealedBackend(SealedStore(store, secret, "drumline/rendezvous"))
    holder = RendezvousState(backend, settings, node, count_alive)
    return C10dRendezvous(node, settings, backend.name, keys, holder)


class C10dRendezvous(DynamicRendezvousHandler):
    """While nodes join, torch polls once a second, which adds up to two seconds to each restart.
    This one polls more often, depending on the number of nodes. Torch then waits for the address of
    the round's first node, which is not authenticated; here nodes agree on one with sealed values
    (node_rendezvous.py)."""

    round = 0
    """The last round that this node joined."""

    def next_rendezvous(self) -> RendezvousInfo:
        poll_s = min(1.0, 0.02 + self.settings.max_nodes / 200)
        holder: Any = self._state_holder
        torchs_own = torchs._delay, torchs.RendezvousStoreInfo, holder._cache_duration
        holder._cache_duration = poll_s / 2
        torchs._delay = lambda seconds: time.sleep(poll_s)
        torchs.RendezvousStoreInfo = _NoAddress
        try:
            return super().next_rendezvous()
        finally:
            torchs._delay, torchs.RendezvousStoreInfo, holder._cache_duration = torchs_own

    def _get_store(self) -> dist.Store:
        """As torch's, but reads the round once, since others may begin the next one at any time."""
        self.round = self._state_holder.state.round
        return dist.PrefixStore(
            f"torch.rendezvous.{self._settings.run_id}.{self.round}", self._store
        )


class _NoAddress:
    @staticmethod
    def build(*_: object, **__: object) -> RendezvousStoreInfo:
        return RendezvousStoreInfo("", 0)


class SeenHeartbeat(NamedTuple):
    stamp: datetime
    """By the wall clock of its node."""
    seen_at: float
    """When it was first read here, by this machine's monotonic clock."""


class RendezvousState(_BackendRendezvousStateHolder):
    """The shared state as torch reads and writes it. Only its times are changed here."""

    def __init__(
        self,
        backend: RendezvousBackend,
        settings: RendezvousSettings,
        node: _NodeDesc,
        count_alive: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(backend, settings)
        self._node = node
        self._count_alive = count_alive
        self._seen: dict[_NodeDesc, SeenHeartbeat] = {}
        """Each node's last heartbeat."""
        self._last_call: float | None = None
        """When the minimum number of nodes was first seen here."""

    def _sanitize(self) -> None:
        """After each exchange with the store: remove dead nodes, and convert times to this host's
        clock."""
        now = time.monotonic()
        written = self._state.last_heartbeats
        self._note_heartbeats(written, now)
        wall = datetime.now(UTC)
        self._state.last_heartbeats = {
            node: wall - timedelta(seconds=now - heartbeat.seen_at)
            for node, heartbeat in self._seen.items()
        }
        super()._sanitize()
        # This node must not write back a change of another's heartbeat; from its own, torch decides
        # when to send one.
        self._state.last_heartbeats = {
            node: stamp if node == self._node else written[node]
            for node, stamp in self._state.last_heartbeats.items()
        }
        self._convert_deadline(now)

    def _note_heartbeats(self, written: Mapping[_NodeDesc, datetime], now: float) -> None:
        previous = self._seen
        self._seen = {}
        for node, stamp in written.items():
            heartbeat = previous.get(node)
            if heartbeat is None or heartbeat.stamp != stamp:
                heartbeat = SeenHeartbeat(stamp, now)
            self._seen[node] = heartbeat
        # Without CPU time the heartbeat of this node is late, but it is not dead.
        if self._node in self._seen:
            stamp, seen_at = self._seen[self._node]
            late_s = 1.5 * self._settings.keep_alive_interval.total_seconds()
            self._seen[self._node] = SeenHeartbeat(stamp, max(seen_at, now - late_s))

    def _convert_deadline(self, now: float) -> None:
        """A deadline of another clock becomes one that is over, or never is."""
        if self._state.deadline is None:
            self._last_call = None
            return
        self._last_call = self._last_call or now
        timeout = self._settings.timeout
        limit_s = timeout.last_call.total_seconds()
        # A living node would join right after this round, and all ranks would restart.
        if len(self._state.participants) < self._count_alive():
            limit_s += min(LATE_S, (timeout.join - timeout.last_call).total_seconds() / 2)
        is_over = now - self._last_call > limit_s
        self._state.deadline = LONG_AGO if is_over else NEVER


class SealedBackend(RendezvousBackend):
    """Restores the state as this node knew it last, if another client overwrites or deletes it."""

    def __init__(self, store: SealedStore) -> None:
        self._store = store
        self._last = NOTHING
        self._version = 0

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return self._accept(self._put(b"", self._last))

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        new_state = pickle.loads(state)  # noqa: S301  # written by torch in this process
        encoded = encode(new_state, self._version + 1)
        stored = self._put(token if isinstance(token, bytes) else NOTHING, encoded)
        current = self._accept(stored)
        if current is None:
            return None
        accepted, new_token = current
        return accepted, new_token, new_token == encoded

    def _put(self, expected: bytes, desired: bytes) -> bytes:
        try:
            return self._store.compare_set(KEY, expected, desired)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the connection to the store has failed") from error

    def _accept(self, encoded: bytes) -> tuple[bytes, Token] | None:
        """The state as torch reads it, and its token; None: there is none yet."""
        state = decode(encoded)
        # Without a secret anyone can write there; with one they can still replay recorded values.
        if (state is None and encoded != NOTHING) or version_of(encoded) < self._version:
            encoded = self._put(encoded, self._last)
            state = decode(encoded)
        if state is None:
            return None
        self._last = encoded
        self._version = version_of(encoded)
        return pickle.dumps(state), encoded


def version_of(text: bytes) -> int:
    """The number of earlier states in this launch."""
    fields = document(text, version=int)
    return fields["version"] if fields else 0


def encode(state: _RendezvousState, version: int = 0) -> bytes:
    """All fields of torch's state; fields that a later torch adds must be JSON values."""
    fields: dict[str, Any] = {
        **vars(state),
        "version": version,
        "deadline": None if state.deadline is None else state.deadline.isoformat(),
        "participants": [[*astuple(node), rank] for node, rank in state.participants.items()],
        "wait_list": [astuple(node) for node in sorted(state.wait_list)],
        "redundancy_list": [astuple(node) for node in sorted(state.redundancy_list)],
        "last_heartbeats": [
            [*astuple(node), beat_at.isoformat()] for node, beat_at in state.last_heartbeats.items()
        ],
    }
    return json.dumps(fields).encode()


def decode(text: bytes) -> _RendezvousState | None:
    """None if the text is not a state."""
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


def _rank(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def _time(text: Any) -> datetime:
    parsed = datetime.fromisoformat(text)
    if parsed.tzinfo is None:
        raise ValueError
    return parsed
