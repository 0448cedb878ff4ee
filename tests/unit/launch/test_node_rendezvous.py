"""How nodes are numbered, who is in a round, and the messages when some do not join; real hosts are
in `tests/multinode`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo

from drumline.base.errors import DrumlineError, ExitCode, HangError, PreflightError, TrainingError
from drumline.launch.node import membership as membership_module
from drumline.launch.node import node_rendezvous
from drumline.launch.node.membership import DONE, JOINING, RUNNING, Membership
from drumline.launch.node.node_rendezvous import NodeRendezvous, Preempted, Round
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import Reason, WaitNotice
from drumline.rank.sealed_store import SealedStore, decoded


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "HEARTBEAT_S", 0.05)


@pytest.fixture
def nodes() -> Iterator[list[NodeRendezvous]]:
    """Nodes that the test has made; they leave at its end."""
    made: list[NodeRendezvous] = []
    yield made
    for rendezvous in made:
        rendezvous.leave()


def node_of(rank: int, num_nodes: int, peers: tuple[str, ...] = ()) -> NodePlan:
    return NodePlan(num_nodes=num_nodes, node_rank=rank, endpoint="a:1", peers=peers)


def handler(store: dist.Store, node: NodePlan, secret: str | None = None) -> NodeRendezvous:
    membership = Membership(store, node, secret)
    return NodeRendezvous(store, node, "127.0.0.1", membership)


def join_all(nodes: list[NodeRendezvous]) -> list[RendezvousInfo]:
    """Collective: the next round of these nodes."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(NodeRendezvous.next_rendezvous, nodes))


def round_of(*ranks: int) -> Round:
    return Round("a round", {rank: {} for rank in ranks}, None)


def test_nodes_keep_the_ranks_they_were_given(
    nodes: list[NodeRendezvous], capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    for rank in (2, 0, 1):
        nodes.append(handler(store, node_of(rank, 3)))
        nodes[-1].membership.join()
    infos = join_all(nodes)
    assert [info.rank for info in infos] == [2, 0, 1]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"127.0.0.1"}
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    assert capfd.readouterr().err == ""


def test_nodes_agree_on_a_secret_that_is_not_in_the_store_and_count_restarts_together(
    nodes: list[NodeRendezvous],
) -> None:
    secrets = []
    for common_secret in (None, "the secret of all"):
        store = dist.HashStore()
        group = [handler(store, node_of(rank, 3), common_secret) for rank in range(3)]
        nodes += group
        for rank, rendezvous in enumerate(group):
            rendezvous.membership.join()
            rendezvous.restarts_used = rank
        for _ in range(2):
            join_all(group)
            (secret,) = {rendezvous.ranks_secret for rendezvous in group}
            secrets.append(secret)
            keys = ["round", *(f"node/{rank}" for rank in range(3))]
            written = [store.get(f"drumline/membership/{key}") for key in keys]
            assert not any(secret.encode() in value for value in written)
            assert [rendezvous.restarts_used for rendezvous in group] == [2, 2, 2]
            assert len({rendezvous.sidecars for rendezvous in group}) == 1
            assert len(group[0].sidecars) == 3
    assert len(set(secrets)) == 4, "each round has a secret of its own"


@pytest.mark.parametrize(("reached_step", "restarts_used"), [(40, 3), (41, 1)])
def test_a_restart_after_progress_of_any_node_is_the_first_for_all(
    nodes: list[NodeRendezvous], reached_step: int, restarts_used: int
) -> None:
    store = dist.HashStore()
    for rank in range(3):
        plan = replace(node_of(rank, 3), restarts_used=rank + 1, reached_step=40)
        nodes.append(handler(store, plan))
        nodes[-1].membership.join()
    nodes[1].reached_step = reached_step
    join_all(nodes)
    assert [node.restarts_used for node in nodes] == [restarts_used] * 3
    assert {(node.counted_step, node.reached_step) for node in nodes} == {
        (reached_step, reached_step)
    }


def test_fewer_nodes_keep_their_order_without_a_gap_and_name_the_missing(
    nodes: list[NodeRendezvous], capfd: pytest.CaptureFixture[str]
) -> None:
    store = dist.HashStore()
    for rank in (3, 0):
        plan = node_of(rank, 4, ("a", "b", "c", "d"))
        nodes.append(handler(store, replace(plan, min_nodes=2, last_call_s=0)))
        nodes[-1].membership.join()
    assert [info.rank for info in join_all(nodes)] == [1, 0]
    warning = (
        "drumline: warning: training continues on 2 of 4 nodes, without node 1 (b), node 2 (c)\n"
    )
    assert capfd.readouterr().err == 2 * warning
    nodes[0].warn_of_missing_nodes()
    assert capfd.readouterr().err == (
        "drumline: warning: the job ended on 2 of 4 nodes, without node 1 (b), node 2 (c)\n"
    )


def test_a_node_that_lives_is_waited_for_beyond_the_last_call(
    nodes: list[NodeRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rendezvous, "LATE_S", 0.8)
    store = dist.HashStore()
    for rank in range(2):
        nodes.append(handler(store, replace(node_of(rank, 2), min_nodes=1, last_call_s=0)))
        nodes[-1].membership.join()
    nodes[1].membership.set_state(RUNNING)
    begun = time.monotonic()
    assert nodes[0].next_rendezvous().world_size == 1
    assert time.monotonic() - begun > 0.8
    nodes[1].membership.set_state(DONE)
    nodes[0].next_rendezvous()


def test_nodes_join_again_when_one_is_lost_before_the_ports_are_checked(
    nodes: list[NodeRendezvous],
) -> None:
    store = dist.HashStore()
    plans = [
        replace(node_of(rank, 2), min_nodes=1, last_call_s=0, lost_after_s=1) for rank in range(2)
    ]
    nodes += [handler(store, plan) for plan in plans]
    for rendezvous in nodes:
        rendezvous.membership.join()
    # It joins the round, and then it is killed.
    nodes[1].membership.join_round(nodes[1]._card({"probe_port": 0, "probe_token": ""}, None))
    nodes[1].membership.read()
    nodes[0].membership.read()
    nodes[1].leave()
    assert nodes[0].next_rendezvous().world_size == 1
    assert nodes[0].missing == [1]


def listed_card(rendezvous: NodeRendezvous) -> object:
    """The card of this node on the last list of node 0."""
    joined = decoded(Round, rendezvous.membership.store.peek("round") or b"")
    return None if joined is None else joined.cards.get(rendezvous.node.node_rank)


def renew_card(rendezvous: NodeRendezvous) -> dict[str, Any]:
    """As a node that joins and is started again before it has probed the others."""
    card = rendezvous._card({"probe_port": 0, "probe_token": ""}, None)
    rendezvous.membership.join_round(card)
    return card


def wait_until_listed(rendezvous: NodeRendezvous, card: dict[str, Any]) -> None:
    deadline = time.monotonic() + 30
    while listed_card(rendezvous) != card:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_key(store: SealedStore, key: str) -> None:
    deadline = time.monotonic() + 30
    while not store.check([key]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_cards_of_a_dismissed_round_are_not_on_the_next_list(
    nodes: list[NodeRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    nodes += [handler(store, node_of(rank, 3)) for rank in range(3)]
    for node in nodes:
        node.membership.join()
    first, slow, renewing = nodes
    slow._poll_s = 0.4
    rounds = []
    publish = first.membership.publish

    def note_round(key: str, content: dict[str, Any]) -> None:
        rounds.append(content["name"])
        publish(key, content)

    monkeypatch.setattr(first.membership, "publish", note_round)
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(node.next_rendezvous) for node in (first, slow)]
        wait_until_listed(renewing, renew_card(renewing))
        joined = SealedStore(store, None, f"drumline/round/{rounds[0]}")
        wait_for_key(joined, "probed/1")
        renewing.next_rendezvous()
        assert [other.result().world_size for other in others] == [3, 3]
    assert len(rounds) == 2


def test_the_join_timeout_is_for_all_rounds_together(nodes: list[NodeRendezvous]) -> None:
    store = dist.HashStore()
    plans = [replace(node_of(rank, 2), join_timeout_s=1, lost_after_s=1) for rank in range(2)]
    nodes += [handler(store, plan) for plan in plans]
    first, renewing = nodes
    for node in nodes:
        node.membership.join()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(first.next_rendezvous)
        until = time.monotonic() + 10
        while not joining.done() and time.monotonic() < until:
            renew_card(renewing)
            time.sleep(0.02)
        assert time.monotonic() < until
        with pytest.raises(PreflightError, match="node 0 waited 1 s at a:1"):
            joining.result()


def joined_by_hand(nodes: list[NodeRendezvous]) -> tuple[Round, SealedStore]:
    """A round of these nodes, whose ports have not been checked; and its store."""
    for node in nodes:
        node.membership.join()
    cards = {node.node.node_rank: renew_card(node) for node in nodes}
    return Round("a round", cards, None), SealedStore(nodes[0].store, None, "drumline/round/a")


def test_all_nodes_report_a_closed_data_port(nodes: list[NodeRendezvous]) -> None:
    shared = dist.HashStore()
    nodes += [handler(shared, node_of(rank, 3, ("a", "b", "c"))) for rank in range(3)]
    joined, store = joined_by_hand(nodes)
    for rank in (1, 2):
        store.set(f"probed/{rank}", json.dumps({"0": Reason.REFUSED}))
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(nodes[0]._check_data_ports, store, joined)
        wait_for_key(store, "decision")
        time.sleep(2.5)
        assert not leading.done(), "it waits until the others have read it"
        for node in nodes[1:]:
            with pytest.raises(PreflightError, match="a takes data on the wrong network, 127"):
                node._check_data_ports(store, joined)
            node.shutdown()
        with pytest.raises(PreflightError, match="a takes data on the wrong network, 127"):
            leading.result()


def test_a_decision_is_waited_for_beyond_a_short_join_timeout(nodes: list[NodeRendezvous]) -> None:
    shared = dist.HashStore()
    plans = [replace(node_of(rank, 2), join_timeout_s=0) for rank in range(2)]
    nodes += [handler(shared, plan) for plan in plans]
    joined, store = joined_by_hand(nodes)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(nodes[1]._check_data_ports, store, joined)
        time.sleep(0.3)
        assert nodes[0]._check_data_ports(store, joined)
        assert following.result()


def test_a_job_that_ends_before_the_ports_are_checked_is_over_for_the_first_node(
    nodes: list[NodeRendezvous],
) -> None:
    shared = dist.HashStore()
    nodes += [handler(shared, replace(node_of(rank, 2), lost_after_s=10)) for rank in range(2)]
    for node in nodes:
        node.membership.join()
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(nodes[0].next_rendezvous)
        wait_until_listed(nodes[1], renew_card(nodes[1]))
        nodes[1].shutdown()
        with pytest.raises(PreflightError, match="another node ended it; node 0 cannot join it"):
            joining.result(timeout=10)


def test_a_node_that_exits_before_the_ports_are_checked_is_not_waited_for(
    nodes: list[NodeRendezvous],
) -> None:
    shared = dist.HashStore()
    for rank in range(2):
        plan = replace(node_of(rank, 2), min_nodes=1, last_call_s=0)
        nodes.append(handler(shared, plan))
        nodes[rank].membership.join()
    card = renew_card(nodes[1])
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(nodes[0].next_rendezvous)
        wait_until_listed(nodes[1], card)
        nodes[1].membership.set_state(DONE)
        assert joining.result(timeout=10).world_size == 1


def test_a_launcher_that_was_replaced_does_not_end_the_job_of_the_other(
    nodes: list[NodeRendezvous],
) -> None:
    shared = dist.HashStore()
    nodes += [handler(shared, node_of(1, 2)) for _ in range(2)]
    replaced, later = nodes
    replaced.membership.join()
    replaced.leave()
    later.membership.join()
    with pytest.raises(PreflightError, match="another launcher has taken NODE_RANK 1 from this"):
        replaced.next_rendezvous()
    replaced.publish_failure("rank 0 failed", ExitCode.TRAINING_FAILED)
    replaced.shutdown()
    assert not later.is_closed()
    assert later.membership.failure() is None
    later.shutdown()
    assert later.is_closed()


def test_a_job_that_is_over_is_reported_also_when_its_store_has_closed(
    nodes: list[NodeRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.append(handler(dist.HashStore(), node_of(1, 2)))
    nodes[0].membership.join()
    nodes[0].set_closed()

    def lose_store() -> None:
        raise dist.DistNetworkError

    monkeypatch.setattr(nodes[0].membership, "failure", lose_store)
    with pytest.raises(PreflightError, match="the job is over, or another node ended it"):
        nodes[0].next_rendezvous()


def test_a_node_that_is_lost_is_a_reason_to_start_again(
    nodes: list[NodeRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    nodes += [handler(store, node_of(rank, 3, ("a", "b", "c"))) for rank in range(3)]
    for node in nodes:
        node.membership.join()
    join_all(nodes)
    here = nodes[0]
    here._ask = WaitNotice(first_s=0, growth=0)
    here._ask.interval_s = 0
    assert here.num_nodes_waiting() == 0
    nodes[2].leave()
    here.node = replace(here.node, min_nodes=1, lost_after_s=1)
    deadline = time.monotonic() + 30
    while here.num_nodes_waiting() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (here.num_nodes_waiting(), here.restart_reason) == (1, "node 2 (c) is lost")
    assert here.has_lost_node
    nodes[1].membership.join_round(nodes[1]._card({"probe_port": 0, "probe_token": ""}, None))
    assert here.is_node_waiting()
    monkeypatch.setattr(NodePlan, "silence_s", 1)
    here.node = replace(here.node, min_nodes=None)
    with pytest.raises(TrainingError, match=r"node 2 \(c\) is lost, and no restart is left"):
        here.num_nodes_waiting()
    here.membership.was_replaced = True
    with pytest.raises(TrainingError, match="another launcher has taken NODE_RANK 0 from this one"):
        here._raise_if_over()
    here.membership.publish_failure("hang: rank 3 stands. Try: look", ExitCode.HANG)
    with pytest.raises(
        HangError, match=r"node 0 \(a\) ended the job: hang: rank 3 stands\. Try: look"
    ):
        here.num_nodes_waiting()


def test_ranks_have_time_to_fail_before_the_lost_first_node_ends_their_launcher(
    nodes: list[NodeRendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    nodes += [handler(store, node_of(rank, 2, ("a", "b"))) for rank in range(2)]
    for node in nodes:
        node.membership.join()
    join_all(nodes)
    here = nodes[1]
    here._ask = WaitNotice(first_s=0, growth=0)
    here._ask.interval_s = 0

    def lose_store() -> None:
        raise dist.DistNetworkError

    monkeypatch.setattr(here.membership, "read", lose_store)
    monkeypatch.setattr("drumline.launch.node.node_rendezvous.DIAGNOSIS_S", 1.0)
    assert here.num_nodes_waiting() == 0
    time.sleep(1.1)
    with pytest.raises(TrainingError, match=r"the first node, node 0 \(a\), is lost"):
        here.num_nodes_waiting()


@pytest.mark.parametrize(("members", "kind"), [([], PreflightError), ([0], TrainingError)])
def test_a_lost_first_node_is_named(members: list[int], kind: type[DrumlineError]) -> None:
    rendezvous = handler(dist.HashStore(), node_of(0, 2, ("a", "b")))
    rendezvous.round = round_of(*members) if members else None
    with pytest.raises(DrumlineError) as caught, rendezvous.explained():
        raise dist.DistNetworkError
    assert (type(caught.value), caught.value.what) == (
        kind,
        "the first node, node 0 (a), is lost or unreachable: nothing answers at a:1",
    )
    assert caught.value.next_step


def test_a_node_that_does_not_join_is_named(nodes: list[NodeRendezvous]) -> None:
    plan = replace(node_of(0, 2, ("a", "b")), join_timeout_s=0)
    nodes.append(handler(dist.HashStore(), plan))
    with pytest.raises(PreflightError) as caught:
        nodes[0].next_rendezvous()
    assert caught.value.what == "node 0 waited 0 s at a:1: node 1 (b) did not join"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_asked_to_stop_waits_for_nobody(
    nodes: list[NodeRendezvous], rank: int
) -> None:
    nodes.append(handler(dist.HashStore(), node_of(rank, 2)))
    nodes[0].membership.join()
    nodes[0].is_leaving = True
    with pytest.raises(Preempted) as preempted:
        nodes[0].next_rendezvous()
    assert not preempted.value.has_saved


def test_a_node_whose_ranks_are_done_joins_again_when_another_restarts(
    nodes: list[NodeRendezvous],
) -> None:
    store = dist.HashStore()
    nodes += [handler(store, node_of(rank, 2, ("a", "b"))) for rank in range(2)]
    for node in nodes:
        node.membership.join()
    join_all(nodes)
    first, here = nodes
    assert here.are_others_running()
    assert here.num_nodes_waiting() == 0
    first.membership.set_state(JOINING)
    assert here.are_others_running()
    assert here.num_nodes_waiting() == 0, "it has not begun to run in this round"
    first.membership.join_round(first._card({"probe_port": 0, "probe_token": ""}, None))
    assert here.are_others_running()
    assert (here.num_nodes_waiting(), here.restart_reason) == (1, "node 0 (a) restarted")
    first.membership.set_state(DONE)
    assert not here.are_others_running(), "all are done"


def test_a_node_that_joins_when_the_job_is_over_is_refused(nodes: list[NodeRendezvous]) -> None:
    nodes.append(handler(dist.HashStore(), node_of(1, 2)))
    nodes[0].membership.join()
    nodes[0].set_closed()
    with pytest.raises(PreflightError) as early:
        nodes[0].next_rendezvous()
    assert early.value.what == "the job is over, or another node ended it; node 1 cannot join it"
    nodes[0].round = round_of(0, 1)
    with pytest.raises(TrainingError, match="another node ended it; node 1 cannot join it"):
        nodes[0].next_rendezvous()
