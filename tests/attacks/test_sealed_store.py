"""Whoever reaches a job's store reads and writes it as they like: nothing of it is believed, and
nothing ends by it."""

from __future__ import annotations

import hashlib
import json
import pickle
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import get_type_hints

import pytest
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from drumline.base.errors import Place, PreflightError
from drumline.base.job_secret import derived, keyed_hash, new_secret
from drumline.base.rank_environment import Topology
from drumline.launch.node.membership import RUNNING, Membership, NodeHeartbeat
from drumline.launch.node.node_rendezvous import NodeRendezvous, Round
from drumline.launch.node_plan import NodePlan
from drumline.net.key_exchange import KeyPair
from drumline.rank.failure import Failure, claim_failure
from drumline.rank.rendezvous.rank_rendezvous import Opening, StartOptions, join_rendezvous
from drumline.rank.rendezvous.reachability import NodeCard
from drumline.rank.sealed_store import SealedStore, decoded
from drumline.rank.stop_vote import StopVote

SECRET = "a secret of more than sixteen letters"
GARBAGE = [
    b"",
    b"\xff\x00\xfe",
    b"null",
    b"[" * 5000,
    b"9" * 5000,
    b'{"signal": "SIGTERM", "host": "x", "rank": 0, "time": 0}',
    b"sealed ",
    b"sealed " + b"0" * 64 + b"1",
    pickle.dumps(print),
]
NAMES = [value[:12].decode(errors="backslashreplace") for value in GARBAGE]


@pytest.fixture
def base() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    return store


@pytest.mark.parametrize("value", GARBAGE, ids=NAMES)
def test_what_an_unauthenticated_client_writes_is_not_there(
    base: dist.HashStore, value: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    store = SealedStore(base, SECRET, "drumline/part")
    base.set("drumline/part/key", value)  # type: ignore[arg-type]
    assert not store.check(["key"])
    for read in (lambda: store.get("key"), lambda: store.wait(["key"], timedelta(seconds=0.1))):
        with pytest.raises(
            dist.DistStoreError, match="no value of this job is at drumline/part/key"
        ):
            read()
    assert store.there(["key", "other"]) == {}
    store.under("x").check(["y"])
    assert capsys.readouterr().err == (
        "drumline: warning: drumline/part/key in the store was not written by this job, and is ignored. Try: set the "
        "same DRUMLINE_SECRET on all nodes; if it is set, find out who else reaches that port\n"
    ), "it is reported once"
    assert store.compare_set("key", "", "ours") == b"ours", "nor does it keep the place"
    assert (store.check(["key"]), store.get("key"), store.there(["key"])) == (
        True,
        b"ours",
        {"key": b"ours"},
    )


def test_what_was_written_elsewhere_or_earlier_is_not_taken(base: dist.HashStore) -> None:
    sealed = SealedStore(base, SECRET, "drumline")
    sealed.set("key", "word")
    recorded = base.get("drumline/key")
    base.set("drumline/other", recorded)  # type: ignore[arg-type]
    base.set("drumline/room/key", recorded)  # type: ignore[arg-type]
    assert (
        sealed.check(["key"]),
        sealed.check(["other"]),
        sealed.under("room").check(["key"]),
    ) == (True, False, False)
    assert not SealedStore(base, SECRET + "?", "drumline").check(["key"])
    assert not sealed.resealed(derived(SECRET, "ranks", "the next round")).check(["key"])


def test_one_side_without_the_secret_is_reported(base: dist.HashStore) -> None:
    Membership(base, NodePlan(num_nodes=2, endpoint="a:1"), SECRET).check_job()
    with pytest.raises(PreflightError) as caught:
        Membership(base, NodePlan(num_nodes=2, node_rank=1, endpoint="a:1")).check_job()
    assert str(caught.value) == (
        f"DRUMLINE_SECRET is set for node 0, and not on {socket.gethostname()}\n"
        "  try: set it to one value on all nodes, or on none"
    )
    SealedStore(base, SECRET).set("rendezvous", "{}")
    topology = Topology(rank=1, world_size=2)
    with pytest.raises(PreflightError, match="DRUMLINE_SECRET is set for rank 0, and not on"):
        join_rendezvous(SealedStore(base, None), topology, StartOptions(timeout_s=60))


def test_what_was_recorded_of_an_earlier_launch_with_the_same_secret_does_not_fit(
    base: dist.HashStore,
) -> None:
    nodes = [NodePlan(num_nodes=2, node_rank=rank, endpoint="a:1") for rank in range(2)]
    earlier = Membership(base, nodes[0], SECRET)
    earlier.check_job()
    earlier.publish_failure("gave up", 1)
    first = Membership(base, nodes[0], SECRET)
    second = Membership(base, nodes[1], SECRET)
    first.check_job()
    second.check_job()
    assert (first.failure(), second.failure()) == (None, None)
    second.publish_failure("lost", 1)
    assert "lost" in str(first.failure())


@pytest.mark.parametrize("value", GARBAGE, ids=NAMES)
@pytest.mark.parametrize("key", ["request", "decision", "proposal/0", "position/0/1"])
def test_no_unknown_client_stops_a_run_and_it_obeys_a_signal(
    base: dist.HashStore, key: str, value: bytes
) -> None:
    store = SealedStore(base, SECRET, "drumline/room")
    votes = [StopVote(store, rank=rank, world_size=2, step=lambda: 7) for rank in range(2)]
    base.set(f"drumline/room/preemption/{key}", value)  # type: ignore[arg-type]
    for vote in votes:
        assert not vote.tick()
        assert (vote.cause, vote.stop, vote.is_decided) == (None, None, False)
    votes[1].request({"signal": "SIGTERM", "rank": 1})
    for _ in range(6):
        for vote in votes:
            vote.tick()
    assert all(vote.is_decided and vote.stop == 7 and vote.cause for vote in votes)


@pytest.mark.parametrize("value", GARBAGE, ids=NAMES)
def test_a_failure_is_claimed_by_a_rank_and_by_no_other(base: dist.HashStore, value: bytes) -> None:
    store = SealedStore(base, SECRET, "drumline/room")
    base.set("drumline/room/failure/first", value)  # type: ignore[arg-type]
    failure = Failure(Place(host="a", rank=1), "ValueError: x", 1)
    assert claim_failure(store, failure, ValueError("x"), rank_0_hosts_store=True) is None
    later = claim_failure(
        store, Failure(Place(host="b", rank=0), "y", 1), ValueError("y"), rank_0_hosts_store=False
    )
    assert later is not None
    assert (later.place.rank, later.error) == (1, "ValueError: x")


class Touch:
    """A pickle of an attacker: it records that it was loaded."""

    was_loaded = False

    @staticmethod
    def load() -> None:
        Touch.was_loaded = True

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return Touch.load, ()


def two_nodes(base: dist.Store, secret: str | None) -> list[NodeRendezvous]:
    nodes = []
    for rank in range(2):
        plan = NodePlan(num_nodes=2, node_rank=rank, endpoint="a:1")
        membership = Membership(base, plan, secret)
        membership.check_job()
        membership.join()
        nodes.append(NodeRendezvous(base, plan, "127.0.0.1", membership))
    return nodes


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a secret", "without"])
@pytest.mark.parametrize("value", [*GARBAGE, pickle.dumps(Touch()), "deleted"])
def test_the_list_of_a_round_is_never_unpickled_and_is_put_back(
    base: dist.HashStore, value: bytes | str, secret: str | None
) -> None:
    nodes = two_nodes(base, secret)
    nodes[0].membership.publish("round", {"name": "a", "cards": {}})
    published = base.get("drumline/membership/round")
    if value == "deleted":
        base.delete_key("drumline/membership/round")
    else:
        base.set("drumline/membership/round", value)  # type: ignore[arg-type]
    assert decoded(Round, nodes[1].membership.store.peek("round") or b"") is None
    deadline = time.monotonic() + 30
    while not base.check(["drumline/membership/round"]) or (
        base.get("drumline/membership/round") != published
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with ThreadPoolExecutor(2) as pool:
        assert [info.rank for info in pool.map(NodeRendezvous.next_rendezvous, nodes)] == [0, 1]
    assert not Touch.was_loaded
    for node in nodes:
        node.leave()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_whatever_json_an_unauthenticated_client_writes_is_a_round_or_none(value: object) -> None:
    examples = {int: 0, str: ""}
    card = {name: examples[kind] for name, kind in get_type_hints(NodeCard).items()}
    whole = {"name": "a", "cards": {0: card}, "keys": None}
    assert decoded(Round, json.dumps(whole).encode()) is not None
    decoded(Round, json.dumps(value).encode())
    for name in whole:
        decoded(Round, json.dumps({**whole, name: value}).encode())
    for name in card:
        decoded(Round, json.dumps({**whole, "cards": {0: {**card, name: value}}}).encode())


@given(JSON)
def test_whatever_json_is_a_heartbeat_or_none(value: object) -> None:
    whole = json.loads(NodeHeartbeat("a", "x").encode())
    for name in whole:
        decoded(NodeHeartbeat, json.dumps({**whole, name: value}).encode())


@given(st.binary() | st.text().map(str.encode))
def test_whatever_bytes_are_a_document_or_none(text: bytes) -> None:
    assert decoded(Opening, text) is None


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a secret", "without"])
@pytest.mark.parametrize("value", GARBAGE, ids=NAMES)
@pytest.mark.parametrize("key", ["members", "node/0", "node/1", "failed"])
def test_the_list_of_nodes_outlives_what_an_unauthenticated_client_writes(
    base: dist.HashStore, key: str, value: bytes, secret: str | None
) -> None:
    first, second = (
        Membership(base, NodePlan(num_nodes=2, node_rank=rank, endpoint="a:1"), secret)
        for rank in range(2)
    )
    first.check_job()
    second.check_job()
    for membership in (first, second):
        membership.join()
    first.read()
    base.set(f"drumline/membership/{key}", value)  # type: ignore[arg-type]
    for membership in (first, second):
        membership.set_state(RUNNING)
    first.read()
    assert first.is_alive(1, RUNNING)
    assert not first.was_replaced
    assert not second.was_replaced
    assert first.failure() is None
    for membership in (first, second):
        assert membership._thread.is_alive()
        membership.leave()


def test_only_with_the_secret_can_a_client_end_the_job_of_others(base: dist.HashStore) -> None:
    membership = Membership(base, NodePlan(num_nodes=2, node_rank=0, endpoint="a:1"), SECRET)
    base.set("drumline/membership/failed", '{"sentence": "node 1 ended the job", "code": 1}')
    assert membership.failure() is None


def test_who_listens_in_place_of_the_first_node_is_found_out(base: dist.HashStore) -> None:
    base.set("drumline/membership/job", json.dumps({"job": "", "num_nodes": 2}))
    with pytest.raises(PreflightError) as caught:
        Membership(base, NodePlan(num_nodes=2, node_rank=1, endpoint="a:1"), SECRET).check_job()
    assert str(caught.value) == (
        "what listens at a:1 is not the launcher of node 0 of this job: its "
        "DRUMLINE_SECRET differs\n  try: set the same DRUMLINE_SECRET on all nodes, and check what listens there"
    )


def test_a_secret_is_wrapped_for_one_alone() -> None:
    sender = KeyPair()
    receiver = KeyPair()
    attacker = KeyPair()
    secret = new_secret()
    wrapped = sender.wrap(secret, receiver.public, "for the receiver")
    assert wrapped is not None
    assert receiver.wrap(wrapped, sender.public, "for the receiver") == secret
    for public in (sender.public, receiver.public):
        assert attacker.wrap(wrapped, public, "for the receiver") != secret
    assert receiver.wrap(wrapped, sender.public, "for another purpose") != secret


@pytest.mark.parametrize(
    "public", [None, 2, "", "x" * 64, "00" * 32, "01" + "00" * 31, "00" * 31, "00" * 33, "f" * 6000]
)
def test_a_key_that_gives_the_secret_away_is_refused(public: object) -> None:
    assert KeyPair().wrap(new_secret(), public) is None


@pytest.mark.parametrize(
    ("scalar", "point", "product"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_the_vectors_of_rfc_7748(scalar: str, point: str, product: str) -> None:
    pair = KeyPair()
    pair._private = X25519PrivateKey.from_private_bytes(bytes.fromhex(scalar))
    shared_key = hashlib.sha256(bytes.fromhex(product)).digest()
    pad = keyed_hash(shared_key, "drumline key exchange", "for a peer")
    assert pair.wrap("00" * 32, point, "for a peer") == pad.hex()
