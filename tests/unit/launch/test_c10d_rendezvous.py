"""Which nodes are alive does not depend on their wall clocks; compared with torch's own state
holder."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
    _BackendRendezvousStateHolder,
    _NodeDesc,
    _RendezvousContext,
    _should_keep_alive,
)

from drumline.launch.node import c10d_rendezvous
from drumline.launch.node.c10d_rendezvous import (
    RendezvousState,
    SealedBackend,
    make_c10d_rendezvous,
)
from drumline.launch.node_plan import OWN_STORE_ENV
from drumline.rank.sealed_store import SealedStore

LIMIT_S = 0.6
SETTINGS = RendezvousSettings(
    "job",
    1,
    2,
    RendezvousTimeout(last_call=timedelta(seconds=LIMIT_S)),
    keep_alive_interval=timedelta(seconds=LIMIT_S / 3),
    keep_alive_max_attempt=3,
)
MINE = _NodeDesc("a", 1, 0)
OTHER = _NodeDesc("b", 2, 0)
HOUR = timedelta(hours=1)


class Nodes:
    """Two nodes' views of one store."""

    def __init__(self) -> None:
        store = dist.HashStore()
        backends = [SealedBackend(SealedStore(store, "secret")) for _ in range(3)]
        self.mine = RendezvousState(backends[0], SETTINGS, MINE)
        self.other = RendezvousState(backends[1], SETTINGS, OTHER)
        self.plain = _BackendRendezvousStateHolder(backends[2], SETTINGS)
        for holder in (self.mine, self.other, self.plain):
            holder._cache_duration = 0

    def write(self, holder: Any, node: _NodeDesc, stamp: datetime) -> None:
        holder.sync()
        holder.state.participants[node] = 0
        holder.state.last_heartbeats[node] = stamp
        holder.mark_dirty()
        assert holder.sync()


@pytest.mark.parametrize("shift", [HOUR, -HOUR, timedelta(seconds=-12)])
def test_a_node_lives_while_its_heartbeat_changes_and_no_longer(shift: timedelta) -> None:
    nodes = Nodes()
    begun = time.monotonic()
    while time.monotonic() - begun < 2 * LIMIT_S:
        nodes.write(nodes.mine, MINE, datetime.now(UTC))
        nodes.write(nodes.other, OTHER, datetime.now(UTC) + shift)
        nodes.mine.sync()
        assert OTHER in nodes.mine.state.participants
        assert MINE in nodes.other.state.participants
        time.sleep(0.02)
    if shift < timedelta(0):
        nodes.plain.sync()
        assert OTHER not in nodes.plain.state.participants, "torch itself compares the clocks"
    # It is silent now; that this node still writes the shared state is no heartbeat of it.
    deadline = time.monotonic() + 20 * LIMIT_S
    while OTHER in nodes.mine.state.participants and time.monotonic() < deadline:
        nodes.write(nodes.mine, MINE, datetime.now(UTC))
        time.sleep(0.02)
    assert set(nodes.mine.state.participants) == {MINE}
    assert OTHER not in nodes.mine.state.last_heartbeats


def test_a_node_without_cpu_time_is_late_to_itself_and_lost_to_others() -> None:
    nodes = Nodes()
    for holder, node in ((nodes.mine, MINE), (nodes.other, OTHER)):
        nodes.write(holder, node, datetime.now(UTC))
    nodes.mine.sync()
    time.sleep(1.5 * LIMIT_S)
    nodes.mine.sync()
    assert set(nodes.mine.state.participants) == {MINE}
    assert _should_keep_alive(_RendezvousContext(MINE, nodes.mine.state, SETTINGS))


def test_a_clock_that_jumps_back_does_not_silence_this_node() -> None:
    nodes = Nodes()
    nodes.write(nodes.mine, MINE, datetime.now(UTC) + HOUR)  # as written before the jump
    deadline = time.monotonic() + 20 * LIMIT_S
    while not _should_keep_alive(_RendezvousContext(MINE, nodes.mine.state, SETTINGS)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
        nodes.mine.sync()
    assert MINE in nodes.mine.state.participants


@pytest.mark.parametrize("shift", [HOUR, -HOUR])
def test_the_last_call_is_as_long_as_asked_for_by_every_clock(shift: timedelta) -> None:
    nodes = Nodes()
    nodes.write(nodes.other, OTHER, datetime.now(UTC))
    nodes.other.state.deadline = datetime.now(UTC) + shift + SETTINGS.timeout.last_call
    nodes.other.mark_dirty()
    nodes.other.sync()
    begun = time.monotonic()
    nodes.mine.sync()
    while _deadline(nodes.mine) > datetime.now(UTC):
        nodes.write(nodes.mine, MINE, datetime.now(UTC))  # does not put it off for the other
        nodes.write(nodes.other, OTHER, datetime.now(UTC))
        assert time.monotonic() - begun < 20 * LIMIT_S
        time.sleep(0.02)
    assert time.monotonic() - begun > LIMIT_S
    nodes.other.sync()
    assert _deadline(nodes.other) < datetime.now(UTC)


def test_a_node_that_lives_is_waited_for_beyond_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(c10d_rendezvous, "LATE_S", 3 * LIMIT_S)
    nodes = Nodes()
    living = 2
    nodes.mine._count_alive = lambda: living
    begun = time.monotonic()
    nodes.write(nodes.mine, MINE, datetime.now(UTC))
    nodes.mine.state.deadline = datetime.now(UTC)
    nodes.mine.mark_dirty()
    nodes.mine.sync()
    assert _deadline(nodes.mine) > datetime.now(UTC)
    time.sleep(1.5 * LIMIT_S)
    nodes.write(nodes.mine, MINE, datetime.now(UTC))
    assert _deadline(nodes.mine) > datetime.now(UTC), "the other lives, and has not come"
    living = 1
    nodes.mine.sync()
    assert _deadline(nodes.mine) < datetime.now(UTC)
    living = 2
    while _deadline(nodes.mine) > datetime.now(UTC):
        nodes.write(nodes.mine, MINE, datetime.now(UTC))
        assert time.monotonic() - begun < 20 * LIMIT_S, "not for ever"
        time.sleep(0.02)


def test_a_poll_does_not_read_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    names = []
    monkeypatch.setattr(
        "inspect.stack", lambda *_: pytest.fail("torch reads the source of every frame")
    )
    monkeypatch.setattr(
        dynamic_rendezvous, "construct_and_record_rdzv_event", lambda name, **_: names.append(name)
    )
    monkeypatch.setenv(OWN_STORE_ENV, "1")
    handler = make_c10d_rendezvous(
        store, store, SETTINGS, "a", secret="secret", count_alive=lambda: 1
    )
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()
    assert "_DistributedRendezvousOpExecutor.run" in names, "as torch names them"


def _deadline(holder: RendezvousState) -> datetime:
    deadline = holder.state.deadline
    assert deadline is not None
    return deadline
