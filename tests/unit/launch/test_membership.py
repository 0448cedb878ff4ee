"""The membership of nodes, with a store in memory."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from drumline.base.errors import PreflightError
from drumline.launch.node import membership as module
from drumline.launch.node.membership import JOINING, RUNNING, Membership, NodeHeartbeat
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import WaitNotice


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)


def membership_of(store: dist.Store, rank: int, *, peers: tuple[str, ...] = ()) -> Membership:
    return Membership(store, NodePlan(num_nodes=3, node_rank=rank, endpoint="a:1", peers=peers))


def test_nodes_see_each_other_and_a_lost_one_is_missing() -> None:
    store = dist.HashStore()
    first = membership_of(store, 0)
    second = membership_of(store, 1)
    first.join()
    second.join()
    first.read()
    assert first.missing() == [2]
    second.set_state(RUNNING)
    first.read()
    assert first.missing() == [1, 2], "one that works has not come to the meeting"
    assert first.is_alive(1, JOINING, RUNNING)
    second.leave()
    deadline = time.monotonic() + 10
    while first.is_alive(1) and time.monotonic() < deadline:
        first.read()
        time.sleep(0.01)
    assert not first.is_alive(1)
    first.leave()


def test_a_place_that_is_taken_is_refused_and_one_that_was_left_is_not() -> None:
    store = dist.HashStore()
    first = membership_of(store, 1)
    second = membership_of(store, 1)
    first.join()
    with pytest.raises(PreflightError) as caught:
        second.join()
    assert caught.value.what == (
        f"NODE_RANK 1 is taken: the launcher of node 1 runs on {first.heartbeat.host}"
    )
    assert caught.value.next_step == "give each machine a NODE_RANK of its own, from 0 to 2"
    first.leave()
    second.join()
    first.set_state(RUNNING)
    assert (first.was_replaced, second.was_replaced) == (True, False)
    second.leave()


def test_a_node_that_joins_the_rendezvous_of_another_job_is_refused() -> None:
    store = dist.HashStore()
    membership_of(store, 0).check_job()
    membership_of(store, 1).check_job()
    other_job = NodePlan(num_nodes=3, node_rank=2, endpoint="a:1", job="another")
    with pytest.raises(PreflightError) as caught:
        Membership(store, other_job).check_job()
    assert str(caught.value) == (
        "another job uses a:1\n"
        "  try: wait for its end, or take another port: --port, --master ADDRESS:PORT or MASTER_PORT"
    )
    with pytest.raises(
        PreflightError,
        match="the number of nodes differs: 3 on node 0, 4 on node 3; or another job uses a:1",
    ):
        Membership(store, NodePlan(num_nodes=4, node_rank=3, endpoint="a:1")).check_job()
    empty = dist.HashStore()
    empty.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(PreflightError, match="what listens at a:1 is not the launcher"):
        membership_of(empty, 1).check_job()


def test_a_node_of_another_version_is_refused() -> None:
    store = dist.HashStore()
    # As a version without this number writes it.
    store.set("drumline/membership/job", json.dumps({"job": "", "num_nodes": 3, "nonce": "x"}))
    with pytest.raises(PreflightError) as caught:
        membership_of(store, 1).check_job()
    assert str(caught.value) == (
        "node 0 and node 1 have different versions of drumline\n"
        "  try: install the same version of drumline on all nodes"
    )


def test_a_node_is_named_as_the_user_knows_it_else_as_it_called_itself() -> None:
    store = dist.HashStore()
    peer = membership_of(store, 1)
    peer.heartbeat = NodeHeartbeat("ip-10-0-0-7", "x")
    peer.join()
    peer.leave()
    nameless = membership_of(store, 0)
    named = membership_of(store, 0, peers=("a", "b", "c"))
    for membership in (nameless, named):
        membership.read()
    assert nameless.names([1, 2]) == "node 1 (ip-10-0-0-7), node 2"
    assert named.names([1, 2]) == "node 1 (b), node 2 (c)"


def test_a_waiting_rank_reports_for_which_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    membership = membership_of(dist.HashStore(), 0, peers=("a", "b", "c"))
    membership._report_missing(waiting := WaitNotice(first_s=0))
    membership._report_missing(waiting)
    assert (
        capsys.readouterr().err
        == "drumline: waiting at a:1 for node 1 (b), node 2 (c), 0 s so far\n"
    )
