"""How nodes are numbered, and the messages when some do not join; real hosts are in
`tests/multinode`."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from drumline.base.errors import DrumlineError, ExitCode, HangError, PreflightError, TrainingError
from drumline.launch.node.membership import DONE, JOINING, RUNNING, Membership
from drumline.launch.node.node_rendezvous import NodeRendezvous
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import WaitNotice
from drumline.rank.sealed_store import SealedStore

KEYS = {"public": "2", "nonce": "n"}


class Met:
    """A rendezvous that is over: node `rank` of `world_size`, by c10d's count; those in `gone` are
    not heard."""

    round = 0

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.info = RendezvousInfo(store, rank, world_size, RendezvousStoreInfo("elsewhere", 1))
        self.here = set(range(world_size))
        self.num_meetings = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self.num_meetings += 1
        return self.info

    def num_nodes_waiting(self) -> int:
        return 0

    @property
    def _state_holder(self) -> Any:
        participants = {f"node-{number}": number for number in self.here}
        return SimpleNamespace(state=SimpleNamespace(participants=participants))


def node_of(rank: int, num_nodes: int, peers: tuple[str, ...] = ()) -> NodePlan:
    return NodePlan(num_nodes=num_nodes, node_rank=rank, endpoint="a:1", min_nodes=1, peers=peers)


def handler(inner: Any, node: NodePlan, secret: str | None = None) -> NodeRendezvous:
    return NodeRendezvous(
        inner, node, f"host-{node.node_rank}", Membership(dist.HashStore(), node, secret)
    )


def meet(node_ranks: list[int], num_nodes: int) -> list[tuple[NodeRendezvous, RendezvousInfo]]:
    """What each node gets; the order is c10d's."""
    store = dist.HashStore()

    def one(number: int) -> tuple[NodeRendezvous, RendezvousInfo]:
        node = node_of(node_ranks[number], num_nodes, ("a", "b", "c", "d"))
        rendezvous = handler(Met(store, number, len(node_ranks)), node)
        return rendezvous, rendezvous.next_rendezvous()

    with ThreadPoolExecutor(len(node_ranks)) as pool:
        return list(pool.map(one, range(len(node_ranks))))


def test_nodes_keep_the_ranks_they_were_given(capfd: pytest.CaptureFixture[str]) -> None:
    infos = [info for _, info in meet([2, 0, 1], 3)]
    assert [info.rank for info in infos] == [2, 0, 1]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"host-0"}
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    assert capfd.readouterr().err == ""


def test_nodes_agree_on_a_secret_that_is_not_in_the_store_and_count_restarts_together() -> None:
    def one(number: int, store: dist.Store, secret: str | None) -> NodeRendezvous:
        rendezvous = handler(Met(store, number, 3), node_of([2, 0, 1][number], 3), secret)
        rendezvous.restarts_used = number
        rendezvous.next_rendezvous()
        return rendezvous

    with ThreadPoolExecutor(3) as pool:
        rounds = []
        for common_secret in (None, None, "the secret of all", "the secret of all"):
            store = dist.HashStore()
            met = list(pool.map(one, range(3), [store] * 3, [common_secret] * 3))
            (secret,) = {each.ranks_secret for each in met}
            rounds.append(secret)
            written = [
                store.get(f"drumline/nodes/0/{kind}/{number}")
                for kind in ("card", "result")
                for number in range(3)
            ]
            assert not any(secret.encode() in value for value in written)
            assert [each.restarts_used for each in met] == [2, 2, 2]
            assert len({each.sidecars for each in met}) == 1
            assert [word.partition(":")[0] for word in met[0].sidecars] == [
                "host-0",
                "host-1",
                "host-2",
            ]
    assert len(set(rounds)) == 4, "each round has a secret of its own"


@pytest.mark.parametrize(("reached_step", "restarts_used"), [(40, 3), (41, 1)])
def test_a_restart_after_progress_of_any_node_is_the_first_for_all(
    reached_step: int, restarts_used: int
) -> None:
    store = dist.HashStore()

    def join(number: int) -> NodeRendezvous:
        plan = replace(node_of(number, 3), restarts_used=number + 1, reached_step=40)
        rendezvous = handler(Met(store, number, 3), plan)
        rendezvous.reached_step = reached_step if number == 1 else 40
        rendezvous.next_rendezvous()
        return rendezvous

    with ThreadPoolExecutor(3) as pool:
        nodes = list(pool.map(join, range(3)))
    assert [node.restarts_used for node in nodes] == [restarts_used] * 3
    assert {(node.counted_step, node.reached_step) for node in nodes} == {
        (reached_step, reached_step)
    }


def test_fewer_nodes_keep_their_order_without_a_gap_and_name_the_missing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    met = meet([3, 1], 4)
    assert [info.rank for _, info in met] == [1, 0]
    assert {info.bootstrap_store_info.master_addr for _, info in met} == {"host-1"}
    warning = (
        "drumline: warning: training continues on 2 of 4 nodes, without node 0 (a), node 2 (c)\n"
    )
    assert capfd.readouterr().err == 2 * warning
    met[0][0].warn_of_missing_nodes()
    assert capfd.readouterr().err == (
        "drumline: warning: the job ended on 2 of 4 nodes, without node 0 (a), node 2 (c)\n"
    )


def test_a_participant_that_is_lost_before_it_published_is_left_out() -> None:
    store = dist.HashStore()
    inner = Met(store, 0, 2)
    inner.here = {0}
    rendezvous = handler(inner, node_of(0, 2))
    assert rendezvous._cards(SealedStore(store, None), inner.info, KEYS) is None
    # The next time it is alone, in a round of its own.
    alone = Met(dist.HashStore(), 0, 1)
    rounds = iter([inner.info, alone.info])
    inner.next_rendezvous = lambda: next(rounds)  # type: ignore[method-assign]
    assert rendezvous.next_rendezvous().world_size == 1


def test_nodes_that_joined_apart_under_one_number_join_again() -> None:
    class Overwritten(SealedStore):
        """The other side has the last word."""

        def set(self, key: str, value: str | bytes) -> None:
            super().set(key, json.dumps({**json.loads(value), "rank": 0}))

    inner = Met(dist.HashStore(), 0, 1)
    assert (
        handler(inner, node_of(1, 2))._cards(Overwritten(inner.info.store, None), inner.info, KEYS)
        is None
    )


def test_a_node_that_is_lost_is_a_reason_to_start_again() -> None:
    inner: Any = Met(dist.HashStore(), 0, 3)
    rendezvous = handler(inner, node_of(0, 3, ("a", "b", "c")))
    rendezvous.members = {0: 0, 1: 2, 2: 1}
    assert rendezvous.num_nodes_waiting() == 0
    inner.here = {0, 2}
    assert (rendezvous.num_nodes_waiting(), rendezvous.restart_reason) == (1, "node 2 (c) is lost")
    rendezvous.node = replace(rendezvous.node, min_nodes=None)
    with pytest.raises(TrainingError, match=r"node 2 \(c\) is lost, and no restart is left"):
        rendezvous.num_nodes_waiting()
    rendezvous.membership.publish_failure("hang: rank 3 stands. Try: look", ExitCode.HANG)
    rendezvous._ask = WaitNotice(first_s=0)
    with pytest.raises(
        HangError, match=r"node 0 \(a\) ended the job: hang: rank 3 stands\. Try: look"
    ):
        rendezvous.num_nodes_waiting()
    rendezvous = handler(inner, node_of(0, 3, ("a", "b", "c")))
    rendezvous.members = {0: 0}
    rendezvous.membership.was_replaced = True
    with pytest.raises(TrainingError, match="another launcher has taken NODE_RANK 0 from this one"):
        rendezvous.num_nodes_waiting()


@pytest.mark.parametrize(
    ("error", "members", "kind", "what"),
    [
        (
            RendezvousTimeoutError,
            {},
            PreflightError,
            "node 0 waited 600 s at a:1: node 1 (b) did not join",
        ),
        (
            RendezvousClosedError,
            {},
            PreflightError,
            "the job is over, or another node ended it; node 0 cannot join it",
        ),
        (
            RendezvousClosedError,
            {0: 0},
            TrainingError,
            "another node ended the job; node 0 cannot join it",
        ),
        (
            RendezvousConnectionError,
            {0: 0},
            TrainingError,
            "the first node, node 0 (a), is lost or unreachable: nothing answers at a:1",
        ),
        (
            dist.DistNetworkError,
            {},
            PreflightError,
            "the first node, node 0 (a), is lost or unreachable: nothing answers at a:1",
        ),
    ],
)
def test_what_goes_wrong_between_nodes_names_them(
    error: Callable[[], Exception], members: dict[int, int], kind: type[DrumlineError], what: str
) -> None:
    rendezvous = handler(Met(dist.HashStore(), 0, 1), node_of(0, 2, ("a", "b")))
    rendezvous.members = members
    with pytest.raises(DrumlineError) as caught, rendezvous.explained():
        raise error()
    assert (type(caught.value), caught.value.what) == (kind, what)
    assert caught.value.next_step


def test_a_node_whose_ranks_are_done_joins_again_when_another_restarts() -> None:
    store = dist.HashStore()
    first, second = (Membership(store, node_of(rank, 2, ("a", "b"))) for rank in range(2))
    here = NodeRendezvous(Met(store, 1, 2), second.node, "b", second)  # type: ignore[arg-type]
    here.members = {0: 0, 1: 1}
    for membership in (first, second):
        membership.join()
    try:
        first.set_state(RUNNING)
        assert here.are_others_running()
        assert here.num_nodes_waiting() == 0
        first.set_state(JOINING)
        assert here.are_others_running()
        assert (here.num_nodes_waiting(), here.restart_reason) == (1, "node 0 (a) restarted")
        first.set_state(DONE)
        assert not here.are_others_running(), "all are done"
    finally:
        for membership in (first, second):
            membership.leave()
