"""An unauthenticated client replays or deletes sealed values of the job: it is restored within
seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from drumline.launch.node.membership import DONE, RUNNING, Membership
from drumline.launch.node.node_rendezvous import NodeRendezvous
from drumline.launch.node_plan import NodePlan
from drumline.rank.sealed_store import SealedStore
from tests.attacks.test_sealed_store import SECRET, two_nodes
from tests.ranks import free_port

LIMIT_S = 30.0
ROUND = "drumline/membership/round"


@pytest.fixture
def base() -> dist.HashStore:
    return dist.HashStore()


def rolls(base: dist.Store) -> list[Membership]:
    made = [
        Membership(base, NodePlan(num_nodes=2, node_rank=rank, endpoint="a:1"), SECRET)
        for rank in range(2)
    ]
    for membership in made:
        membership.check_job()
    return made


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_heartbeat_of_a_node_that_has_exited_does_not_bring_it_back(base: dist.HashStore) -> None:
    first, second = rolls(base)
    recorded = []
    for state in (RUNNING, RUNNING, DONE):
        second.set_state(state)
        recorded.append(base.get("drumline/membership/node/1"))
    base.set("drumline/membership/members", "0 1 ")
    first.read()
    for word in recorded[:2] * 2:
        base.set("drumline/membership/node/1", word)  # type: ignore[arg-type]
        first.read()
        assert not first.is_alive(1, RUNNING)
        assert first.is_alive(1, DONE)


def test_an_old_heartbeat_of_a_node_does_not_make_it_lost(base: dist.HashStore) -> None:
    first, second = rolls(base)
    base.set("drumline/membership/members", "0 1 ")
    second.set_state(RUNNING)
    recorded = base.get("drumline/membership/node/1")
    second.set_state(RUNNING)
    first.read()
    base.set("drumline/membership/node/1", recorded)  # type: ignore[arg-type]
    second.set_state(DONE)
    first.read()
    assert first.is_alive(1, DONE)
    assert not second.was_replaced


def test_a_launcher_that_was_replaced_does_not_oust_the_one_that_came_after(
    base: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drumline.launch.node.membership.MISSED_HEARTBEATS", 0)
    _, earlier = rolls(base)
    earlier.set_state(RUNNING)
    recorded = base.get("drumline/membership/node/1")
    later = Membership(base, earlier.node, SECRET)
    later.check_job()
    later.join()
    later.leave()
    base.set("drumline/membership/node/1", recorded)  # type: ignore[arg-type]
    later.set_state(RUNNING)
    assert not later.was_replaced
    earlier.set_state(RUNNING)
    assert earlier.was_replaced, "that one does not know the other, which lives"


def test_what_is_written_once_is_written_again(base: dist.HashStore) -> None:
    first, second = rolls(base)
    for membership in (first, second):
        membership.join()
    base.delete_key("drumline/membership/members")
    base.set("drumline/membership/job", "another")
    wait_for(lambda: set(base.get("drumline/membership/members").split()) == {b"0", b"1"})
    first.read()
    assert first.is_alive(1)
    wait_for(lambda: base.get("drumline/membership/job") != b"another")
    late = Membership(base, second.node, SECRET)
    late.check_job()
    for membership in (first, second):
        membership.leave()


def test_the_list_of_an_earlier_round_is_not_believed(base: dist.HashStore) -> None:
    nodes = two_nodes(base, SECRET)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(NodeRendezvous.next_rendezvous, nodes))
        recorded = base.get(ROUND)
        first = pool.submit(nodes[0].next_rendezvous)
        second = pool.submit(nodes[1].next_rendezvous)
        while not (first.done() and second.done()):
            base.set(ROUND, recorded)  # type: ignore[arg-type]
            time.sleep(0.7)
        assert (first.result().rank, second.result().rank) == (0, 1)
    (name,) = {node.round.name for node in nodes if node.round}
    assert name not in recorded.decode(errors="replace")
    for node in nodes:
        node.leave()


def last_round(base: dist.HashStore) -> str:
    """The name that is on the current list."""
    _, _, content = base.get(ROUND).partition(b"{")
    name: str = json.loads(b"{" + content)["name"]
    return name


def replay(base: dist.HashStore, key: str, *, source: str, target: str) -> None:
    """Copy a value of one round to another, as soon as that has begun."""
    wait_for(lambda: last_round(base) == target)
    recorded = base.get(f"drumline/round/{source}/{key}")
    base.set(f"drumline/round/{target}/{key}", recorded)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["probed/1", "decision"])
def test_what_nodes_said_in_an_earlier_round_does_not_fit_into_the_next(
    base: dist.HashStore, key: str
) -> None:
    nodes = two_nodes(base, SECRET)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(NodeRendezvous.next_rendezvous, nodes))
        earlier = last_round(base)
        # The node that would write this value is slow, and the other one waits for it.
        writer, reader = nodes if key == "decision" else reversed(nodes)
        card = writer._card({"probe_port": 0, "probe_token": ""}, None)
        writer.membership.join_round(card)
        writer._join_until = time.monotonic() + LIMIT_S
        reading = pool.submit(reader.next_rendezvous)
        joined = writer._lead(card, None) if key == "decision" else writer._follow(card)
        replay(base, key, source=earlier, target=joined.name)
        time.sleep(1)
        assert not reading.done()
        prefix = f"drumline/round/{joined.name}"
        assert writer._check_data_ports(SealedStore(base, writer.secret, prefix), joined)
        assert reading.result().world_size == 2
    for node in nodes:
        node.leave()


def test_a_deleted_value_is_not_waited_for() -> None:
    """In torch's own store, whose `get` waits."""
    server = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    store = SealedStore(server, SECRET)
    assert store.peek("request") is None
    assert store.hint("members") == b""
    store.set("request", "{}")
    assert store.peek("request") == b"{}"
    assert store.peek_all(["request", "decision"]) is None
    store.delete_key("request")
    began = time.monotonic()
    assert store.peek("request") is None
    assert not store.check(["request"])
    assert time.monotonic() - began < store.timeout.total_seconds() / 10
    assert not server.check(["drumline/request"]), "a look leaves nothing behind"
