"""torch's c10d rendezvous without what is unsafe in it: its wall clocks, and the pickle in which its state travels.

Each node writes its heartbeat by its own wall clock, and torch compares that with the reader's: a clock that is 15 s
off or that jumps makes a living node dead. Here a heartbeat is as old as the time since it was last seen to change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousSettings,
    _BackendRendezvousStateHolder,
    _NodeDesc,
)

from drumline.launch.node.sealed_backend import SealedBackend
from drumline.launch.node.sealed_store import SealedStore

# How much longer than the last call a node is waited for that lives, and has not ended its ranks yet.
LATE_S = 30
LONG_AGO, NEVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def make_handler(
    store: dist.Store,
    keys: dist.Store,
    settings: RendezvousSettings,
    address: str,
    *,
    secret: str | None,
    count_living: Callable[[], int],
) -> QuickHandler:
    """torch's c10d rendezvous in this store; `address` is what the other nodes call this one. `keys`: the same store,
    over a connection of its own, for what nodes write to each other in a round. `count_living`: how many nodes will
    come to the next round."""
    node = DynamicRendezvousHandler._node_desc_generator.generate(address)
    backend = SealedBackend(SealedStore(store, secret, "drumline/rendezvous"))
    holder = ObservedState(backend, settings, node, count_living)
    return QuickHandler(node, settings, backend.name, keys, holder)


class QuickHandler(DynamicRendezvousHandler):
    """While nodes meet, torch looks once a second who is there: up to two seconds of each restart. This one looks more
    often; the more nodes there are, the less often the one store is asked. Torch then waits for the address of the
    round's first node, which anybody can write; here nodes agree on one under their seal (rendezvous.py)."""

    round = 0
    """Which one this node has joined last."""

    def next_rendezvous(self) -> RendezvousInfo:
        poll_s = min(1.0, 0.02 + self.settings.max_nodes / 200)
        holder: Any = self._state_holder
        torchs: Any = dynamic_rendezvous
        torchs_own = torchs._delay, torchs.RendezvousStoreInfo, holder._cache_duration
        holder._cache_duration = poll_s / 2
        torchs._delay, torchs.RendezvousStoreInfo = lambda seconds: time.sleep(poll_s), _NoAddress
        try:
            return super().next_rendezvous()
        finally:
            torchs._delay, torchs.RendezvousStoreInfo, holder._cache_duration = torchs_own

    def _get_store(self) -> dist.Store:
        """As torch's; the round is read once, since others may begin the next at any time."""
        self.round = self._state_holder.state.round
        return dist.PrefixStore(f"torch.rendezvous.{self._settings.run_id}.{self.round}", self._store)


class _NoAddress:
    @staticmethod
    def build(*_: object, **__: object) -> RendezvousStoreInfo:
        return RendezvousStoreInfo("", 0)


class ObservedState(_BackendRendezvousStateHolder):
    """The shared state as torch reads and writes it. Only its times are judged here."""

    def __init__(
        self,
        backend: RendezvousBackend,
        settings: RendezvousSettings,
        node: _NodeDesc,
        count_living: Callable[[], int] = lambda: 0,
    ) -> None:
        super().__init__(backend, settings)
        self._node, self._count_living = node, count_living
        self._seen: dict[_NodeDesc, tuple[datetime, float]] = {}
        """Each node's last heartbeat, and when it was new here."""
        self._last_call: float | None = None
        """When the minimum of nodes was first seen here."""

    def _sanitize(self) -> None:
        """After each exchange with the store: remove dead nodes, and show torch times that fit its own clock."""
        state, now = self._state, time.monotonic()
        written = state.last_heartbeats
        self._seen = {node: self._observe(node, stamp, now) for node, stamp in written.items()}
        if self._node in self._seen:  # without CPU for a while it is late with its heartbeat, not dead
            stamp, at = self._seen[self._node]
            late_s = 1.5 * self._settings.keep_alive_interval.total_seconds()
            self._seen[self._node] = stamp, max(at, now - late_s)
        state.last_heartbeats = {node: self._by_wall_clock(at) for node, (_, at) in self._seen.items()}
        super()._sanitize()
        # What this node writes back must not look like another's heartbeat; by its own torch sees when to send one.
        state.last_heartbeats = {
            node: stamp if node == self._node else written[node]
            for node, stamp in state.last_heartbeats.items()
        }
        if state.deadline is None:
            self._last_call = None
        else:
            self._last_call = self._last_call or now
            over_s = now - self._last_call - self._settings.timeout.last_call.total_seconds()
            # A node that lives would come right after this round, and have all ranks started again.
            timeout = self._settings.timeout
            late_s = min(LATE_S, (timeout.join - timeout.last_call).total_seconds() / 2)
            is_over = over_s > (late_s if len(state.participants) < self._count_living() else 0)
            state.deadline = LONG_AGO if is_over else NEVER

    def _observe(self, node: _NodeDesc, stamp: datetime, now: float) -> tuple[datetime, float]:
        seen = self._seen.get(node)
        return seen if seen is not None and seen[0] == stamp else (stamp, now)

    @staticmethod
    def _by_wall_clock(at: float) -> datetime:
        return datetime.now(UTC) - timedelta(seconds=time.monotonic() - at)
