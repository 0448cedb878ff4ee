"""Nodes agree on who is left, in real stores of one process; a lost one is let in again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drumline.base.errors import PreflightError, TrainingError, UsageError
from drumline.base.rank_environment import LAUNCH_START, Topology
from drumline.cli import train_rank
from drumline.config.schema import Config, DistConfig
from drumline.launch.node.agent import FINAL_CODES
from drumline.rank.rendezvous import live_nodes
from drumline.rank.rendezvous.live_nodes import LiveNodes
from drumline.rank.rendezvous.node_group import (
    LiveNode,
    NextGroup,
    NodeGroup,
    NodeStores,
    Redirected,
    RunIsOver,
)
from drumline.rank.rendezvous.rank_rendezvous import Rendezvous
from drumline.rank.rendezvous.rank_store import host_store, open_store
from drumline.rank.sealed_store import SealedStore
from drumline.watch.fact_differences import Facts
from drumline.watch.failure_kind import FailureKind, failure_kind
from tests.ranks import free_port
from tests.report_runs import BEGIN, write_run

SECRET = "0123456789abcdef" * 2


def live(
    topology: Topology, *, patience_s: float, has_finished: Callable[[], bool] = lambda: False
) -> LiveNodes:
    return LiveNodes(
        topology,
        patience_s=patience_s,
        is_lost_peer=lambda error: failure_kind(error) is FailureKind.LOST_PEER,
        has_finished=has_finished,
    )


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It plays all nodes here, and would close the connections of all of them. A thread that is in
    torch's store when Python exits may end the process by SIGABRT: none is left."""
    monkeypatch.setattr(live_nodes, "close_connections", lambda addresses, **ports: None)
    yield
    for node in [node for bed in Bed.made for node in bed.nodes]:
        node.leave()
    Bed.made.clear()
    until = time.monotonic() + 30
    while left := [
        thread.name
        for thread in threading.enumerate()
        if thread.name in ("drumline-nodes", "drumline-ask", "drumline-announce")
    ]:
        assert time.monotonic() < until, left
        time.sleep(0.02)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """All at once; their results or errors."""
    results: list[Any] = [None] * len(calls)

    def run(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [
        threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


class Bed:
    """Nodes of one rank each, in one group."""

    made: ClassVar[list[Bed]] = []

    def __init__(self, count: int, patience_s: float = 30.0, facts: Facts | None = None) -> None:
        self.made.append(self)
        self.count = count
        self.port = free_port()
        self.patience_s = patience_s
        base, _ = host_store("127.0.0.1", self.port, timeout_s=30)
        self.rendezvous = Rendezvous(
            store=SealedStore(base, SECRET, "drumline/start"),
            nodes=tuple((rank,) for rank in range(count)),
            hosts=("vm",) * count,
            addresses=("127.0.0.1",) * count,
            services=({},) * count,
        )
        self.nodes = [self.new(number) for number in range(count)]
        for node in self.nodes:
            node.facts = facts or {}
        # Each with a connection of its own: one that waits in a shared one would block the others.
        each = [replace(self.rendezvous, store=self.rendezvous.store.clone()) for _ in self.nodes]
        together(
            *(
                partial(node.begin, rendezvous)
                for node, rendezvous in zip(self.nodes, each, strict=True)
            )
        )

    def new(self, number: int) -> LiveNodes:
        topology = Topology(number, self.count, 0, 1, "127.0.0.1", self.port, secret=SECRET)
        return live(topology, patience_s=self.patience_s)

    def kill(self, *numbers: int) -> None:
        """As far as the others see: their stores do not know them any more."""
        for number in numbers:
            own_store = self.nodes[number].stores.own_store
            assert own_store is not None
            own_store.set("process", "another")


def test_the_rest_agrees_and_ranks_have_no_gap() -> None:
    bed = Bed(3)
    bed.kill(1)
    first, last = together(bed.nodes[0].regroup, bed.nodes[2].regroup)
    assert [(topology.rank, topology.world_size) for topology in (first, last)] == [(0, 2), (1, 2)]
    assert (
        (last.master_addr, last.master_port)
        == (first.master_addr, first.master_port)
        == ("127.0.0.1", bed.port)
    )
    group = bed.nodes[2].latest
    assert (group.generation, [member.number for member in group.members]) == (1, [0, 2])
    assert [name.startswith("node 1 (") for name in group.lost] == [True]
    assert bed.nodes[0].latest == group


def test_the_next_node_decides_when_the_first_is_lost() -> None:
    bed = Bed(3)
    bed.kill(0)
    second, third = together(bed.nodes[1].regroup, bed.nodes[2].regroup)
    assert [topology.rank for topology in (second, third)] == [0, 1]
    assert second.master_port == third.master_port != bed.port


def test_one_node_that_notices_tells_the_others() -> None:
    bed = Bed(3)
    bed.kill(2)
    assert not bed.nodes[1].is_broken
    alone = threading.Thread(target=bed.nodes[0].regroup, daemon=True)
    alone.start()
    while not bed.nodes[1].is_broken:
        alone.join(0.05)
    bed.nodes[1].regroup()
    alone.join(30)
    assert [member.number for member in bed.nodes[0].latest.members] == [0, 1]


def test_a_node_that_was_too_late_is_told_to_start_again() -> None:
    bed = Bed(2, patience_s=0.3)
    assert bed.nodes[0].regroup().world_size == 1
    with pytest.raises(TrainingError) as refused:
        bed.nodes[1].regroup()
    assert "the other nodes continue without node 1 (" in str(refused.value)
    assert "), which did not answer in time" in str(refused.value)
    assert refused.value.next_step == "nothing: its launcher starts it again, and it joins them"


def test_a_node_is_let_in_with_the_next_group(capfd: pytest.CaptureFixture[str]) -> None:
    bed = Bed(2)
    store = SealedStore(host_store("127.0.0.1", bed.port, timeout_s=30)[0], SECRET)
    redirected = Redirected(store.get(NodeStores.REDIRECT))
    bed.kill(1)
    again = bed.new(1)

    def lead() -> Any:
        while not bed.nodes[0].has_joiner:
            time.sleep(0.02)
        return bed.nodes[0].regroup()

    is_in, first = together(lambda: again.join(redirected), lead)
    joined = again.topology()
    assert (is_in, joined.rank, joined.world_size, first.rank, first.world_size) == (
        True,
        1,
        2,
        0,
        2,
    )
    assert [name.startswith("node 1 (") for name in (*again.latest.lost, *again.latest.joined)] == [
        True,
        True,
    ]
    assert "node 1 waits to join node 0 (" in capfd.readouterr().err


def test_a_node_that_differs_is_refused_before_the_others_pause() -> None:
    bed = Bed(
        2,
        facts={
            "settings": {"the setting optim.lr": 0.1, "the number of ranks": 2},
            "code": {"a": "1"},
        },
    )
    own_store = bed.nodes[0].stores.own_store
    assert own_store is not None
    redirected = Redirected(own_store.get(NodeStores.REDIRECT))
    bed.kill(1)
    again = bed.new(1)
    again.facts = {
        "settings": {"the setting optim.lr": 0.2, "the number of ranks": 1},
        "code": {"b": "1"},
    }
    with pytest.raises(PreflightError) as refused:
        again.join(redirected)
    text = str(refused.value)
    assert text.startswith("node 1 (")
    assert ") differs from node 0 (" in text
    assert "), and cannot join: the setting optim.lr: 0.2 here, 0.1 there" in text
    assert refused.value.next_step == "start every rank with the same command and settings"
    # its launcher does not start it again
    assert refused.value.exit_code in FINAL_CODES
    assert bed.nodes[0].stores.lobby(own_store) == []


def test_a_node_may_wait_at_one_that_has_not_written_its_facts_yet() -> None:
    """That one has just joined; the group compares them again."""
    bed = Bed(2, facts={"settings": {"the setting optim.lr": 0.1}})
    own_store = bed.nodes[0].stores.own_store
    assert own_store is not None
    own_store.delete_key(NodeStores.FACTS)
    redirected = Redirected(own_store.get(NodeStores.REDIRECT))
    bed.kill(1)
    again = bed.new(1)
    again.facts = {"settings": {"the setting optim.lr": 0.1}}
    assert together(lambda: again.join(redirected), bed.nodes[0].close) == [False, None]


def test_a_node_that_waits_learns_of_the_end() -> None:
    bed = Bed(2)
    store = SealedStore(host_store("127.0.0.1", bed.port, timeout_s=30)[0], SECRET)
    redirected = Redirected(store.get(NodeStores.REDIRECT))
    bed.kill(1)
    assert together(lambda: bed.new(1).join(redirected), bed.nodes[0].close) == [False, None]


class DeletedAfterCheck:
    """A store in which another client deletes a value as soon as it was seen."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def check(self, keys: list[str]) -> bool:
        return self._raw.check(keys) and all(map(self._raw.delete_key, keys))


def test_a_node_that_stops_waiting_blocks_nobody() -> None:
    node = live(Topology(0, 2, 0, 1, secret=SECRET), patience_s=1)
    node.stores.host("127.0.0.1", 0, timeout_s=1)
    own_store: Any = node.stores.own_store
    own_store.set("lobby/1", json.dumps(asdict(LiveNode(1, "vm", "127.0.0.1", 1, "start"))))
    own_store.raw = DeletedAfterCheck(own_store.raw)
    # and no wait for a value that is gone, which may be minutes
    assert len(node.stores.lobby(own_store)) <= 1


def test_a_node_that_comes_back_after_the_end_of_the_run_does_not_wait_for_the_others(
    tmp_path: Path,
) -> None:
    """Rank 0 would wait for the others in its own store, any other rank for rank 0's store, where
    nobody listens."""
    run = write_run(tmp_path / "run", ranks=1)
    since = {"before": BEGIN - 10, "after": BEGIN + 1000}
    has_finished = {
        name: partial(train_rank.has_finished, run, since=time) for name, time in since.items()
    }
    assert (has_finished["before"](), has_finished["after"]()) == (True, False)
    for rank in (0, 1):
        topology = Topology(rank, 2, 0, 1, "127.0.0.1", free_port(), secret=SECRET)
        back = live(topology, patience_s=30.0, has_finished=has_finished["before"])
        with pytest.raises(RunIsOver):
            back.check_start(open_store(topology, timeout_s=180.0, check=back.check_finished))
    assert not train_rank.has_finished(
        write_run(tmp_path / "killed", ranks=1, ended=False), since=1.0
    )


def test_a_rank_of_a_finished_run_exits_with_success(tmp_path: Path, warm: None) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    flags = (
        "--dist.sync diloco:4 --dist.on_lost_node continue --watch.sidecar off --dist.device cpu"
    )
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    result = subprocess.run(
        [sys.executable, "-m", "drumline", "train", "digits", "--run", str(run), *flags.split()],
        env={**os.environ, **place, **store, LAUNCH_START: str(BEGIN - 10)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert (result.returncode, result.stderr) == (
        0,
        "drumline: node 1 did not join again: the run has ended\n",
    ), result.stdout


def test_nobody_is_left_to_join() -> None:
    bed = Bed(2)
    store = SealedStore(host_store("127.0.0.1", bed.port, timeout_s=30)[0], SECRET)
    redirected = Redirected(store.get(NodeStores.REDIRECT))
    bed.kill(0, 1)
    with pytest.raises(TrainingError) as refused:
        bed.new(1).join(redirected)
    assert "node 1 cannot join: none of the nodes that train answers" in str(refused.value)
    assert refused.value.next_step is not None
    assert "check that the nodes reach each other on all ports" in refused.value.next_step


def test_the_smaller_part_of_a_cut_network_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(3)
    bed.kill(1, 2)
    # the route is cut: no host refuses anything
    monkeypatch.setattr(LiveNode, "probe", lambda node: "silent")
    for node in bed.nodes:
        node.stores._connected.clear()
    with pytest.raises(TrainingError) as refused:
        bed.nodes[0].regroup()
    text = str(refused.value)
    assert text.startswith("node 1 (")
    assert " cannot be reached, and may continue without node 0 (" in text
    assert "check the network between them" in str(refused.value.next_step)
    bed = Bed(2)
    bed.kill(1)
    assert bed.nodes[0].regroup().world_size == 1  # of two, the first


def test_a_node_that_the_others_did_not_reach_does_not_continue_beside_them() -> None:
    bed = Bed(3)
    bed.kill(0)
    together(bed.nodes[1].regroup, bed.nodes[2].regroup)
    own_store = bed.nodes[0].stores.own_store
    assert own_store is not None
    own_store.set("process", bed.nodes[0].stores.process)  # it was running all the time
    with pytest.raises(TrainingError, match="the other nodes continue without node 0"):
        bed.nodes[0].regroup()


def test_only_the_lowest_node_that_answers_decides() -> None:
    bed = Bed(2)
    second = bed.nodes[1]
    own_store = second.stores.own_store
    assert own_store is not None
    # the first one answers again
    assert NextGroup(second.latest, second.stores, own_store, patience_s=30).decide() is None
    topologies = together(bed.nodes[1].regroup, bed.nodes[0].regroup)
    assert [topology.world_size for topology in topologies] == [2, 2]


def test_a_node_that_decides_may_not_take_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeGroup, "longest_change_s", lambda self, patience_s: 0.5)
    bed = Bed(2, patience_s=0.2)
    with pytest.raises(TrainingError) as refused:
        bed.nodes[1].regroup()
    assert "has not left the group that lost a node, and decides who continues" in str(
        refused.value
    )
    assert "end it: the others then continue" in str(refused.value.next_step)


def test_a_node_that_waits_starts_again_when_a_lower_node_decides() -> None:
    bed = Bed(3)
    bed.kill(2)
    first = bed.nodes[0].stores.card
    second = bed.nodes[1].stores.card
    own_store = bed.nodes[1].stores.own_store
    assert own_store is not None
    own_store.set(NodeStores.REDIRECT, NodeGroup(2, (first, second)).encode())
    redirected = Redirected(NodeGroup(1, (second,)).encode().encode())
    with pytest.raises(TrainingError, match=r"node 2 cannot join: .*node 0 .* has joined") as late:
        bed.new(2).join(redirected)
    assert str(late.value.next_step).startswith("nothing: its launcher starts it again")
    assert bed.nodes[1].stores.lobby(own_store) == []


def test_a_node_comes_with_all_of_its_ranks() -> None:
    topology = Topology(0, 4, 0, 2, "127.0.0.1", free_port(), node_start="once", secret=SECRET)
    first = live(topology, patience_s=0.3)
    second = live(replace(topology, rank=1, local_rank=1), patience_s=30)
    first.stores.host("127.0.0.1", 0, timeout_s=30)
    first.latest = second.latest = NodeGroup(0, (first.stores.card,))
    with pytest.raises(
        TrainingError,
        match="a rank of node 0 did not leave its group in time; the other nodes contin",
    ):
        first.regroup()
    first.patience_s, second.stores.own_store = 30, second.stores.connect(first.stores.card)
    assert [
        (topology.rank, topology.world_size) for topology in together(first.regroup, second.regroup)
    ] == [(0, 2), (1, 2)]


def test_a_launcher_that_cannot_is_refused() -> None:
    config = Config(dist=DistConfig(sync="diloco:5", on_lost_node="continue"))
    assert (
        train_rank.live_nodes(Topology(0, 4, 0, 2, node_start="once"), config, folder=Path())
        is not None
    )
    assert train_rank.live_nodes(Topology(0, 2, 0, 1), config, folder=Path()) is not None
    of_srun = Topology(0, 4, 0, 2)
    of_torchrun = Topology(0, 2, 0, 1, agent_hosts_store=True)
    for topology in (of_srun, of_torchrun):
        with pytest.raises(
            UsageError, match="continue needs ranks that drumline launch has started"
        ) as refused:
            train_rank.live_nodes(topology, config, folder=Path())
        assert (
            refused.value.next_step
            == "start each node with drumline launch, or use --dist.on_lost_node restart"
        )


def test_which_errors_lead_to_another_group() -> None:
    lost = RuntimeError(
        "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    )
    node = live(Topology(1, 2, 0, 1), patience_s=1)
    assert not node.is_lost(RuntimeError("shapes do not match"))
    assert node.is_lost(lost)
    # the first group: its start has failed
    assert not node.continues_after(PreflightError("late"), has_state=True)
    node.latest = NodeGroup(1, ())
    assert node.continues_after(PreflightError("late"), has_state=True)
    with pytest.raises(TrainingError, match="node 1 could not join the others: late") as late:
        node.continues_after(PreflightError("late"), has_state=False)
    assert late.value.next_step == "nothing: its launcher starts it again"
    assert node.continues_after(Redirected(b""), has_state=False)
    # the group began, and its ranks compare data and weights
    node._watcher = threading.current_thread()
    with pytest.raises(
        PreflightError, match="node 1 could not join the others: ranks differ in data"
    ) as refused:
        node.continues_after(
            PreflightError("ranks differ in data", next_step="compare"), has_state=False
        )
    assert refused.value.next_step == "compare"
    assert node.continues_after(PreflightError("ranks differ in data"), has_state=True)
    assert NodeGroup.decode(b"[]") is None
    assert (
        NodeGroup.decode(b'{"generation": 1, "members": [{"a": 1}], "lost": [], "joined": []}')
        is None
    )
