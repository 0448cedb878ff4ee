"""The nodes that train now, where a run continues without a lost one (`--dist.on_lost_node
continue`).

When a group breaks, or a node joins, all leave it, agree on the next one (`node_group.py`) and
begin that.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

from drumline.base.errors import PreflightError, TrainingError, summary
from drumline.base.rank_environment import Topology
from drumline.base.text import join_names, print_message
from drumline.net.dial import WaitNotice
from drumline.rank.rendezvous.node_group import (
    POLL_S,
    SILENT_S,
    WATCH_S,
    LiveNode,
    NextGroup,
    NodeGroup,
    NodeStores,
    Redirected,
    RunIsOver,
)
from drumline.rank.rendezvous.rank_rendezvous import Rendezvous
from drumline.rank.sealed_store import SealedStore, decoded
from drumline.rank.tcp_store import break_dead_connections, close_connections
from drumline.watch.fact_differences import (
    MAX_DIFFERENCES,
    NEXT_STEPS,
    WARNINGS,
    Facts,
    differences,
)

CHECK_S = 0.5
CHECK_FINISHED_S = 2.0
"""Between two reads of the run folder, which may be on slow storage."""

JOIN_S = 30.0
"""How long the ranks of a decided group wait for each other: all of them run already."""

MAY_DIFFER = {*WARNINGS, "the number of ranks"}


@dataclass(eq=False)
class LiveNodes:
    """One rank's view of them."""

    launched: Topology
    """As the launcher gave it."""

    patience_s: float
    """How long a node that runs may take to leave a group."""

    is_lost_peer: Callable[[BaseException], bool]
    """Whether an error is that of a broken connection."""

    has_finished: Callable[[], bool]
    """Whether the run has finished since the launcher of this node began."""

    def __post_init__(self) -> None:
        topology = self.launched
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

        self.is_broken = False
        """Whether a node has left the group. The loop reads this after each step."""

        self.has_joiner = False
        """On the lowest node: whether another waits to join."""

        self.ends = False
        """Whether the group ends after the latest step."""

        self._checked_at = 0.0
        """When a slow check was last made while this rank waits."""

        self._ended = threading.Event()
        """Set when this rank leaves the group."""

        self._watcher: threading.Thread | None = None

    # The group begins

    def check_start(self, store: SealedStore) -> None:
        """Called while the ranks of a group wait for each other: raises Redirected on a rank that
        is new to a run, and an error of the store if a node of the next group is lost."""
        if not self.latest.members:
            redirect = store.peek(NodeStores.REDIRECT)
            if redirect is not None:
                raise Redirected(redirect)
            self.check_finished()
        elif time.monotonic() > self._checked_at + CHECK_S:
            self._checked_at = time.monotonic()
            members = self.latest.members

            lost = [member for member in members if self.stores.connect(member) is None]
            if lost:
                raise dist.DistStoreError(f"{join_names(lost)} left before the group began")

    def check_finished(self) -> None:
        """Called while this rank waits for others: raises RunIsOver if there is nobody to wait for,
        because the run has finished without this node."""
        if not self.latest.members and time.monotonic() > self._checked_at + CHECK_FINISHED_S:
            self._checked_at = time.monotonic()
            if self.has_finished():
                raise RunIsOver

    def begin(self, rendezvous: Rendezvous) -> None:
        """Collective: all ranks have joined the group."""
        place = rendezvous.node_of(self.topology().rank)
        if not self.latest.members:
            self._form_first_group(rendezvous, place)

        this_node = self.latest.members[place]
        if self.stores.own_store is None:
            self.stores.own_store = self.stores.connect(this_node)
            if self.stores.own_store is None:
                raise dist.DistStoreError(f"the store of {this_node} is gone")

        self.is_broken = False
        self.has_joiner = False
        self.ends = False

        if self.is_first:
            self.stores.own_store.set(NodeStores.FACTS, json.dumps(self.facts))
            self.stores.own_store.set(NodeStores.REDIRECT, self.latest.encode())

        self._ended = threading.Event()
        watched_store = self.stores.own_store.clone()
        self._watcher = threading.Thread(
            target=self._watch,
            args=(watched_store,),
            name="drumline-nodes",
            daemon=True,
        )

        self._watcher.start()

    def _form_first_group(self, rendezvous: Rendezvous, place: int) -> None:
        """Collective: the first rank of each node publishes its store. `place`: of this node."""
        launched = self.launched
        if self.is_first:
            address = rendezvous.addresses[place] if launched.rank else None
            port = 0 if launched.rank else launched.master_port
            self.stores.host(address or launched.master_addr, port, timeout_s=self.patience_s)
            rendezvous.store.set(f"live/{place}", json.dumps(asdict(self.stores.card)))

        keys = [f"live/{number}" for number in range(len(rendezvous.nodes))]
        cards = rendezvous.store.multi_get(keys)
        self.latest = NodeGroup(0, tuple(LiveNode(**json.loads(card)) for card in cards))

        # Where no launcher gave it to all.
        self.stores.process = self.latest.members[place].process

    def guard_connections(self) -> None:
        """Call it when all groups exist: from here on a connection to a node that does not answer
        breaks."""
        for peer in {member.address for member in self.latest.members}:
            break_dead_connections(None, after_s=SILENT_S, address=peer)

    def topology(self) -> Topology:
        """This rank in the latest group: ranks have no gaps."""
        members = self.latest.members
        launched = self.launched
        if not members:
            return launched

        place = [member.number for member in members].index(self.number)
        size = launched.local_world_size
        return replace(
            launched,
            master_addr=members[0].address,
            master_port=members[0].port,
            node_names=(),
            rank=place * size + launched.local_rank,
            world_size=len(members) * size,
        )

    def _watch(self, node_store: SealedStore) -> None:
        """Learn that another node has left the group, and of nodes that wait to join."""
        generation = self.latest.generation
        leads = self._leads()
        try:
            while not self._ended.wait(WATCH_S):
                if node_store.check([f"broken/{generation}"]):
                    self._break()
                    return

                if leads:
                    joiners = self.stores.lobby(node_store)
                    self.has_joiner = any(joiner.probe() == "open" for joiner in joiners)
                if leads and self.number > 0:
                    self.stores.redirect_first_node(self.latest)
        except RuntimeError:
            self._break()

    def _leads(self) -> bool:
        """Whether this rank acts for the lowest node."""
        return self.is_first and self.number == self.latest.members[0].number

    def _break(self) -> None:
        """The group cannot continue: end what this rank waits for in it."""
        self.is_broken = True
        self._close_connections()

    def _close_connections(self) -> None:
        """What a rank waits for in a collective then fails at once, here and on the other side:
        gloo's own abort does not end it."""
        stores = {member.port for member in self.latest.members} | {self.launched.master_port}
        close_connections({member.address for member in self.latest.members}, but=stores)

    # The group ends

    def continues_after(self, change: BaseException, *, has_state: bool) -> bool:
        """Whether this rank goes to another group. While a group begins, a node that does not join
        in time is lost, too; a rank that has no state of the run yet is started again, unless the
        ranks of the group differ."""
        if not isinstance(change, PreflightError | RuntimeError):
            return True

        is_lost = isinstance(change, PreflightError) or self.is_lost(change)
        if not is_lost or self.latest.generation <= 0:
            return False

        if not has_state:
            reason, _, _ = str(change).partition("\n")
            what = f"node {self.number} could not join the others: {reason}"

            has_begun = self._watcher is not None
            if isinstance(change, PreflightError) and has_begun:  # its launcher ends
                raise PreflightError(what, next_step=change.next_step) from change
            raise TrainingError(what, next_step="nothing: its launcher starts it again") from change

        return True

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether this error means that a node has left the group."""
        lost = self.is_broken or isinstance(error, dist.DistError) or self.is_lost_peer(error)
        self.is_broken |= lost
        return lost

    def leave(self) -> None:
        """This rank leaves the group, whether it broke or a node joins. It ends what others wait
        for from it."""
        self._ended.set()
        self._close_connections()
        self._join_watcher()

    def close(self) -> None:
        """The run is over: nodes that wait to join get a message."""
        self._ended.set()
        self._join_watcher()

        own_store = self.stores.own_store
        if own_store is None or not self._leads():
            return

        with contextlib.suppress(RuntimeError):
            own_store.set(NodeStores.OVER, "1")
            until = time.monotonic() + 2.0
            while self.stores.lobby(own_store) and time.monotonic() < until:
                time.sleep(POLL_S)

    def _join_watcher(self) -> None:
        """Python's exit aborts the process if a thread comes back from torch's store."""
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def regroup(self) -> Topology:
        """Collective over the nodes that are left: agree on the next group."""
        self.leave()
        before = self.latest
        own_store = self.stores.own_store
        assert own_store is not None

        if self.is_first:
            self._wait_for_local_ranks(own_store)
            self.latest = NextGroup(before, self.stores, own_store, self.patience_s).agree()
        else:
            own_store.set(f"local/{before.generation}/{self.launched.local_rank}", "1")

            # Not `wait`: when another client peeks at a value that is not there, torch's store ends
            # all waits for it.
            while (decision := own_store.peek(f"decision/{before.generation}")) is None:
                time.sleep(POLL_S)
            self.latest = NodeGroup.decode(decision) or before

        if self.stores.process not in [member.process for member in self.latest.members]:
            this_node = f"node {self.number} ({self.launched.host})"
            raise TrainingError(
                f"the other nodes continue without {this_node}, which did not answer in time",
                next_step="nothing: its launcher starts it again, and it joins them",
            )

        return self.topology()

    def _wait_for_local_ranks(self, node_store: SealedStore) -> None:
        """A node is in a group with all of its ranks: where one has failed, its launcher ends the
        others."""
        keys = [
            f"local/{self.latest.generation}/{rank}"
            for rank in range(1, self.launched.local_world_size)
        ]
        until = time.monotonic() + self.patience_s
        while keys and not node_store.check(keys):
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
        group = NodeGroup.decode(redirected.text) or NodeGroup(0, ())
        reason = "none of the nodes that train answers"
        for decider in group.members:
            store = self.stores.connect(decider)
            if store is None:
                continue

            try:
                return self._join_at(decider, store, group)
            except RuntimeError as error:
                reason = summary(error)
                break

        raise TrainingError(
            f"node {self.number} cannot join: {reason}",
            next_step="nothing: its launcher starts it again; if it does not, check that the nodes reach each other on "
            "all ports",
        )

    def _join_at(self, decider: LiveNode, store: SealedStore, group: NodeGroup) -> bool:
        """Wait in the lobby of the node that decides."""
        if self.is_first:
            self.stores.host_for(decider, timeout_s=self.patience_s)
            self._check_facts(store, group)
            store.set(f"lobby/{self.number}", json.dumps(asdict(self.stores.card)))

        notice = WaitNotice(first_s=0)
        while (decision := store.peek(f"joined/{self.stores.process}")) is None:
            if store.peek(NodeStores.OVER) is not None:
                store.delete_key(f"lobby/{self.number}")
                return False

            current = NodeGroup.decode(store.peek(NodeStores.REDIRECT)) or group
            first = current.members[0]
            if current.generation > group.generation and first not in group.members:
                store.delete_key(f"lobby/{self.number}")
                raise dist.DistStoreError(f"{first} has joined, and decides now")

            if notice.is_due() and self.is_first:
                names = join_names(group.members)
                print_message(f"node {self.number} waits to join {names} after their next round")

            time.sleep(WATCH_S)

        self.latest = NodeGroup.decode(decision) or self.latest
        return True

    def _check_facts(self, store: SealedStore, group: NodeGroup) -> None:
        """Refuse to join nodes that run another code, or with other settings, before they pause for
        this one."""
        published = decoded(dict[str, Any], store.peek(NodeStores.FACTS))

        # a node that has just joined has none there
        their_facts = published or self.facts
        values = []

        next_steps = []
        for difference in differences([their_facts, self.facts]):
            if {difference.group, difference.name} & MAY_DIFFER:
                continue

            there, here = difference.values
            values.append(f"{difference.name}: {here!r} here, {there!r} there")
            next_steps.append(NEXT_STEPS[difference.group])

        if values:
            raise PreflightError(
                f"node {self.number} ({self.launched.host}) differs from {join_names(group.members)}, "
                f"and cannot join: {'; '.join(values[:MAX_DIFFERENCES])}",
                next_step="; ".join(dict.fromkeys(next_steps)),
            )
