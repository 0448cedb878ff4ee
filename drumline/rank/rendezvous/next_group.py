"""Who is in the next group of nodes: of those that are left, the lowest one that still runs
decides. A node that was lost, or is new, finds the run at the first node's endpoint, and waits in
the store of the one that decides until the others have finished a round."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from functools import partial

from drumline.base.errors import PreflightError, TrainingError
from drumline.base.terminal import print_message
from drumline.base.text import join_names
from drumline.base.topology import Topology
from drumline.net.dial import WaitNotice
from drumline.rank.rendezvous.node_group import (
    LiveNode,
    NodeGroup,
    NodeStores,
    Redirected,
    answered,
)
from drumline.rank.sealed_store import SealedStore, document
from drumline.watch.fact_differences import (
    MAX_DIFFERENCES,
    NEXT_STEPS,
    WARNINGS,
    Facts,
    differences,
)

POLL_S = 0.05
WATCH_S = 0.25
MAY_DIFFER = {*WARNINGS, "the number of ranks"}


class NextGroup:
    """One node's part, by its first rank, when it has left the group `before`."""

    def __init__(self, before: NodeGroup, stores: NodeStores, *, patience_s: float) -> None:
        self._before = before
        self._stores = stores
        self._patience_s = patience_s
        self._number = stores.card.number
        self._key = f"decision/{before.generation}"

    def agree(self) -> NodeGroup:
        """Collective over the first ranks of the nodes that are left."""
        assert self._stores.own_store is not None
        for peer in self._peers():
            store = self._stores.connect(peer)
            if store is not None:
                with contextlib.suppress(RuntimeError):
                    store.set(f"broken/{self._before.generation}", "1")
        decided = None
        while decided is None:
            decided = self._ask_lower_nodes() or self.decide()
        # For other ranks here, and nodes whose decider is lost.
        self._stores.own_store.set(self._key, decided.encode())
        return decided

    def _peers(self) -> list[LiveNode]:
        members = self._before.members
        return [member for member in members if member.process != self._stores.process]

    def _ask_lower_nodes(self) -> NodeGroup | None:
        for member in self._before.members:
            if member.number < self._number:
                decided = self._ask(member)
                if decided is not None:
                    return decided
        return None

    def _ask(self, member: LiveNode) -> NodeGroup | None:
        """The decision of a lower node; None: it is lost."""
        until = time.monotonic() + self._before.longest_change_s(self._patience_s)
        while (store := self._stores.connect(member)) is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"arrived/{self._before.generation}/{self._number}", self._stores.process)
                decision = store.peek(self._key)
                if decision is not None:
                    return NodeGroup.decode(decision)
            if time.monotonic() > until:
                raise TrainingError(
                    f"{member} has not left the group that lost a node, and decides who continues",
                    next_step=f"find out what {member} waits for (drumline watch), or end it: the others then continue",
                )
            time.sleep(POLL_S)
        return None

    def decide(self) -> NodeGroup | None:
        """As the lowest node that is left: wait for the others, or until it is known that they are
        lost. None: a lower one answers again."""
        assert self._stores.own_store is not None
        arrived = [self._stores.card]
        silent = []
        waiting = self._peers()
        until = time.monotonic() + self._patience_s
        while waiting and time.monotonic() < until:
            for peer in list(waiting):
                if self._has_arrived(peer, self._stores.own_store):
                    arrived.append(peer)
                    waiting.remove(peer)
                    continue
                store = self._stores.connect(peer)
                if store is not None and peer.number < self._number:
                    return None
                if store is not None:
                    with contextlib.suppress(RuntimeError):
                        decision = store.peek(self._key)
                        if decision is not None:  # it could not reach this node meanwhile
                            return NodeGroup.decode(decision)
                    continue
                state = self._state_of_lost(peer)
                if state != "open":  # otherwise there was no connection for a moment only
                    waiting.remove(peer)
                if state == "silent":
                    silent.append(peer)
            time.sleep(POLL_S)
        self._check_majority(arrived, silent)
        return self._group_of(arrived, self._stores.own_store)

    def _has_arrived(self, peer: LiveNode, own_store: SealedStore) -> bool:
        process = own_store.peek(f"arrived/{self._before.generation}/{peer.number}")
        return process == peer.process.encode()

    def _state_of_lost(self, peer: LiveNode) -> str:
        """As `LiveNode.probe`, of a node whose store cannot be reached."""
        return "refused" if peer.process in self._stores.dead_processes else peer.probe()

    def _group_of(self, arrived: list[LiveNode], own_store: SealedStore) -> NodeGroup:
        """The nodes that arrived, and those that wait to join them, which are told so."""
        lobby = self._stores.lobby(own_store)
        joining = [joiner for joiner in lobby if self._stores.connect(joiner) is not None]
        joining_numbers = {joiner.number for joiner in joining}
        staying = [member for member in arrived if member.number not in joining_numbers]
        lost = [member for member in self._before.members if member not in staying]
        decided = NodeGroup(
            generation=self._before.generation + 1,
            members=tuple(sorted([*staying, *joining], key=lambda member: member.number)),
            lost=tuple(map(str, lost)),
            joined=tuple(map(str, joining)),
        )
        for joiner in joining:
            own_store.set(f"joined/{joiner.process}", decided.encode())
            own_store.delete_key(f"lobby/{joiner.number}")
        return decided

    def _check_majority(self, arrived: list[LiveNode], silent: list[LiveNode]) -> None:
        """Refuse to continue beside others that may do so, too, in another part of a network that
        was cut."""
        if silent and _precedence(arrived) < _precedence(silent):
            raise TrainingError(
                f"{join_names(silent)} cannot be reached, and may continue without "
                f"{join_names(arrived)}, which ends",
                next_step="check the network between them; then start this node again, and it joins the others",
            )


def _precedence(side: list[LiveNode]) -> tuple[int, int]:
    """Of the two sides of a cut network, the one with more nodes continues; of equals, the one with
    the lowest node."""
    return len(side), -min(node.number for node in side)


class JoiningNode:
    """One rank of it."""

    def __init__(
        self, topology: Topology, stores: NodeStores, facts: Facts, *, patience_s: float
    ) -> None:
        """`facts`: what this rank runs with."""
        self._topology = topology
        self._stores = stores
        self._facts = facts
        self._patience_s = patience_s
        self._number = stores.card.number
        self._is_first = topology.local_rank == 0

    def join(self, redirected: Redirected) -> NodeGroup | None:
        """This rank was started while others train: wait until they let its node in. None: their
        run has ended."""
        group = NodeGroup.decode(redirected.text)
        notice = WaitNotice(first_s=0)
        while group is not None:
            decider, store = self._decider_of(group)
            if decider is None or store is None:
                break
            try:
                self._wait_in_lobby(group, decider, store, notice)
                decision = store.peek(f"joined/{self._stores.process}")
                if decision is not None:
                    return NodeGroup.decode(decision)
                store.delete_key(f"lobby/{self._number}")
                if store.peek(NodeStores.OVER) is not None:
                    return None
            except TimeoutError:  # it is stopped
                self._stores.dead_processes.add(decider.process)
            except RuntimeError:  # it is lost
                pass
            group = self._newer(group)
        raise TrainingError(
            f"node {self._number} cannot join: none of the nodes that train answers",
            next_step="nothing, if they are restarted too; otherwise check that they reach each other on all ports",
        )

    def _decider_of(self, group: NodeGroup) -> tuple[LiveNode | None, SealedStore | None]:
        """The first node that answers, and its store."""
        for member in group.members:
            store = self._stores.connect(member)
            if store is not None:
                return member, store
        return None, None

    def _wait_in_lobby(
        self, group: NodeGroup, decider: LiveNode, store: SealedStore, notice: WaitNotice
    ) -> None:
        if self._is_first:
            self._stores.host_for(decider, timeout_s=self._patience_s)
            self._check_facts(store, group)
            store.set(f"lobby/{self._number}", json.dumps(asdict(self._stores.card)))
        while not answered(partial(self._is_settled, store, group)):
            if notice.is_due() and self._is_first:
                names = join_names(group.members)
                print_message(f"node {self._number} waits to join {names} after their next round")
            time.sleep(WATCH_S)

    def _check_facts(self, store: SealedStore, group: NodeGroup) -> None:
        """Refuse to join nodes that run another code, or with other settings, before they pause for
        this one."""
        published = document(store.peek(NodeStores.FACTS) or b"")
        their_facts = published or self._facts  # a node that has just joined has none there
        refused = [
            difference
            for difference in differences([their_facts, self._facts])
            if not {difference.group, difference.name} & MAY_DIFFER
        ]
        if refused:
            values = [
                f"{difference.name}: {difference.values[1]!r} here, {difference.values[0]!r} there"
                for difference in refused[:MAX_DIFFERENCES]
            ]
            raise PreflightError(
                f"node {self._number} ({self._topology.host}) differs from {join_names(group.members)}, "
                f"and cannot join: {'; '.join(values)}",
                next_step="; ".join(
                    dict.fromkeys(NEXT_STEPS[difference.group] for difference in refused)
                ),
            )

    def _is_settled(self, store: SealedStore, group: NodeGroup) -> bool:
        """Whether this node is let in, the run has ended, or a lower node has joined meanwhile:
        then that one decides who joins."""
        is_let_in = store.peek(f"joined/{self._stores.process}") is not None
        if is_let_in or store.peek(NodeStores.OVER) is not None:
            return True
        newer = NodeGroup.decode(store.peek(NodeStores.REDIRECT) or b"")
        return (
            newer is not None
            and newer.generation > group.generation
            and newer.members[0] not in group.members
        )

    def _newer(self, group: NodeGroup) -> NodeGroup | None:
        """The decider is another one now: each node has the group that it is in in its store."""
        deadline = time.monotonic() + group.longest_change_s(self._patience_s)
        while time.monotonic() < deadline:
            alive = list(filter(None, map(self._stores.connect, group.members)))
            if not alive:
                return None
            for store in alive:
                with contextlib.suppress(RuntimeError):
                    newer = NodeGroup.decode(store.peek(NodeStores.REDIRECT) or b"")
                    if newer is not None and newer.generation > group.generation:
                        return newer
            time.sleep(WATCH_S)
        return None
