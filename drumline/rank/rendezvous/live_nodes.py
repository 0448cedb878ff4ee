"""The nodes that train now, where a run continues without a lost one (`--dist.on_lost_node
continue`).

When a group breaks, or a node joins, all leave it, agree on the next one (`next_group.py`) and
begin that.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch.distributed as dist

from drumline.base.errors import PreflightError, TrainingError
from drumline.base.text import join_names
from drumline.base.topology import Topology
from drumline.rank.rendezvous.next_group import JoiningNode, NextGroup
from drumline.rank.rendezvous.node_group import (
    SILENT_S,
    LiveNode,
    NodeGroup,
    NodeStores,
    Redirected,
    RunIsOver,
)
from drumline.rank.rendezvous.rank_rendezvous import Rendezvous
from drumline.rank.sealed_store import SealedStore
from drumline.rank.tcp_store import break_dead_connections, close_connections
from drumline.watch.fact_differences import Facts

POLL_S = 0.05
WATCH_S = 0.25
CHECK_S = 0.5
CHECK_FINISHED_S = 2.0
"""Between two reads of the run folder, which may be on slow storage."""
JOIN_S = 30.0
"""How long the ranks of a decided group wait for each other: all of them run already."""
MOST_REFUSALS = 3


class LiveNodes:
    """One rank's view of them."""

    def __init__(
        self,
        topology: Topology,
        *,
        patience_s: float,
        is_lost_peer: Callable[[BaseException], bool],
        has_finished: Callable[[], bool] = lambda: False,
    ) -> None:
        """`topology`: as the launcher gave it. `patience_s`: how long a node that runs may take to
        leave a group. `is_lost_peer`: whether an error is that of a broken connection.
        `has_finished`: whether the run has finished since the launcher of this node began."""
        self._has_finished = has_finished
        self._given = topology
        self._patience_s = patience_s
        self._is_lost_peer = is_lost_peer
        self.number = topology.rank // topology.local_world_size
        self.is_first = topology.local_rank == 0
        """Whether this is the rank that acts for its node."""
        self.stores = NodeStores(topology)
        self.latest = NodeGroup(-1, ())
        """The group that this rank is in, or was in until it broke. A rank that is new to a run is
        in none."""
        self.facts: Facts = {}
        """What this rank runs with: a node whose facts differ is refused before the others pause
        for it."""
        self._refusals = 0
        """Groups in a row that a PreflightError has ended before their first step."""
        self.is_broken = False
        """Whether a node has left the group. The loop reads this after each step."""
        self.has_joiner = False
        """On the lowest node: whether another waits to join."""
        self.ends = False
        """Whether the group ends after the latest step."""
        self._checked_at = 0.0
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    # The group begins

    def check_start(self, store: SealedStore) -> None:
        """Called while the ranks of a group wait for each other: raises Redirected on a rank that
        is new to a run, and an error of the store if a node of the next group is lost."""
        if not self.latest.members:
            if (found := store.peek(NodeStores.REDIRECT)) is not None:
                raise Redirected(found)
            self.check_finished()
        elif time.monotonic() > self._checked_at + CHECK_S:
            self._checked_at = time.monotonic()
            if lost := [one for one in self.latest.members if self.stores.connect(one) is None]:
                raise dist.DistStoreError(
                    f"{join_names([str(one) for one in lost])} left before the group began"
                )

    def check_finished(self) -> None:
        """Called while this rank waits for others: raises RunIsOver if there is nobody to wait for,
        because the run has finished without this node."""
        if not self.latest.members and time.monotonic() > self._checked_at + CHECK_FINISHED_S:
            self._checked_at = time.monotonic()
            if self._has_finished():
                raise RunIsOver

    def begin(self, rendezvous: Rendezvous) -> None:
        """Collective: all ranks have joined the group."""
        topology = self._given
        place = rendezvous.node_of(self.topology().rank)
        if not self.latest.members:
            if self.is_first:
                at = rendezvous.addresses[place] if topology.rank else topology.master_addr
                port = 0 if topology.rank else topology.master_port
                self.stores.host(at or topology.master_addr, port, timeout_s=self._patience_s)
                rendezvous.store.set(f"live/{place}", json.dumps(asdict(self.stores.card)))
            cards = rendezvous.store.multi_get(
                [f"live/{number}" for number in range(len(rendezvous.nodes))]
            )
            self.latest = NodeGroup(0, tuple(LiveNode(**json.loads(card)) for card in cards))
            self.stores.process = self.latest.members[
                place
            ].process  # where no launcher gave it to all
        if self.stores.own is None:
            me = self.latest.members[place]
            self.stores.own = self.stores.connect(me)
            if self.stores.own is None:
                raise dist.DistStoreError(f"the store of {me} is gone")
        self.is_broken = self.has_joiner = self.ends = False
        if self.is_first:
            self.stores.own.set(NodeStores.FACTS, json.dumps(self.facts))
            self.stores.own.set(NodeStores.REDIRECT, self.latest.encode())
        self._ended = threading.Event()
        self._watcher = threading.Thread(
            target=self._watch, args=(self.stores.own.clone(),), name="drumline-nodes"
        )
        self._watcher.daemon = True
        self._watcher.start()

    def guard_connections(self) -> None:
        """Call it when all groups exist: from here on a connection to a node that does not answer
        breaks."""
        self._refusals = 0
        for peer in {one.address for one in self.latest.members}:
            break_dead_connections(None, after_s=SILENT_S, address=peer)

    def topology(self) -> Topology:
        """This rank in the latest group: ranks have no gaps."""
        members = self.latest.members
        given = self._given
        if not members:
            return given
        place = [one.number for one in members].index(self.number)
        size = given.local_world_size
        here = replace(
            given, master_addr=members[0].address, master_port=members[0].port, node_names=()
        )
        return replace(here, rank=place * size + given.local_rank, world_size=len(members) * size)

    def _watch(self, own: SealedStore) -> None:
        """Learn that another node has left the group, and of nodes that wait to join."""
        generation = self.latest.generation
        leads = self._leads()
        try:
            while not self._ended.wait(WATCH_S):
                if own.check([f"broken/{generation}"]):
                    self._break()
                    return
                if leads:
                    self.has_joiner = any(one.probe() == "open" for one in self.stores.lobby(own))
                if leads and self.number > 0:
                    self.stores.redirect_first_node(self.latest)
        except RuntimeError:
            self._break()

    def _leads(self) -> bool:
        return self.is_first and self.number == self.latest.members[0].number

    def _break(self) -> None:
        self.is_broken = True
        self._close_connections()

    def _close_connections(self) -> None:
        """What a rank waits for in a collective then fails at once, here and on the other side:
        gloo's own abort does not end it."""
        stores = {one.port for one in self.latest.members} | {self._given.master_port}
        close_connections({one.address for one in self.latest.members}, but=stores)

    # The group ends

    def continues_after(self, change: BaseException, *, has_state: bool) -> bool:
        """Whether this rank goes to another group. While a group begins, a node that does not join
        in time is lost, too; a rank that has no state of the run yet is started again, unless the
        ranks of the group differ."""
        if not isinstance(change, PreflightError | RuntimeError):
            return True
        refusal = (
            change if isinstance(change, PreflightError) and self._watcher is not None else None
        )
        self._refusals += refusal is not None
        is_lost = isinstance(change, PreflightError) or self.is_lost(change)
        if is_lost and self.latest.generation > 0 and not has_state:
            reason, _, _ = str(change).partition("\n")
            what = f"node {self.number} could not join the others: {reason}"
            if refusal is None:
                raise TrainingError(
                    what, next_step="nothing: its launcher starts it again"
                ) from change
            raise PreflightError(what, next_step=refusal.next_step) from change  # its launcher ends
        return is_lost and self.latest.generation > 0 and self._refusals < MOST_REFUSALS

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether this error means that a node has left the group."""
        lost = self.is_broken or isinstance(error, dist.DistError) or self._is_lost_peer(error)
        self.is_broken |= lost
        return lost

    def leave(self) -> None:
        """This rank leaves the group, whether it broke or a node joins. It ends what others wait
        for from it."""
        self._ended.set()
        self._close_connections()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def close(self) -> None:
        """The run is over: nodes that wait to join get a message."""
        self._ended.set()
        if (
            self._watcher is not None
        ):  # Python's exit aborts the process if a thread comes back from torch's store
            self._watcher.join()
        with contextlib.suppress(RuntimeError):
            if self.stores.own is not None and self._leads():
                self.stores.own.set(NodeStores.OVER, "1")
                until = time.monotonic() + 2.0
                while self.stores.lobby(self.stores.own) and time.monotonic() < until:
                    time.sleep(POLL_S)

    def regroup(self) -> Topology:
        """Collective over the nodes that are left: agree on the next group."""
        self.leave()
        before = self.latest
        assert self.stores.own is not None
        if self.is_first:
            self._wait_for_local_ranks(self.stores.own)
            self.latest = NextGroup(before, self.stores, patience_s=self._patience_s).agree()
        else:
            self.stores.own.set(f"local/{before.generation}/{self._given.local_rank}", "1")
            # Not `wait`: when another client peeks at a value that is not there, torch's store ends
            # all waits for it.
            while (text := self.stores.own.peek(f"decision/{before.generation}")) is None:
                time.sleep(POLL_S)
            self.latest = NodeGroup.decode(text) or before
        if gone := [one for one in before.members if one not in self.latest.members]:
            # A thread that waits for the store of a process that is stopped would wait forever.
            close_connections({one.address for one in gone}, to={one.port for one in gone})
        if self.stores.process not in [one.process for one in self.latest.members]:
            me = f"node {self.number} ({self._given.host})"
            raise TrainingError(
                f"the other nodes continue without {me}, which did not answer in time",
                next_step="nothing: its launcher starts it again, and it joins them",
            )
        return self.topology()

    def _wait_for_local_ranks(self, own: SealedStore) -> None:
        """A node is in a group with all of its ranks: where one has failed, its launcher ends the
        others."""
        others = [
            f"local/{self.latest.generation}/{rank}"
            for rank in range(1, self._given.local_world_size)
        ]
        until = time.monotonic() + self._patience_s
        while others and not own.check(others):
            if time.monotonic() > until:
                raise TrainingError(
                    f"a rank of node {self.number} did not leave its group in time; the other nodes continue without "
                    "this one",
                    next_step="nothing: its launcher starts it again, and it joins them",
                )
            time.sleep(POLL_S)

    def join(self, redirected: Redirected) -> bool:
        """This rank was started while others train: wait until they let its node in. False: their
        run has ended."""
        found = JoiningNode(self._given, self.stores, self.facts, patience_s=self._patience_s).join(
            redirected
        )
        self.latest = found or self.latest
        return found is not None
