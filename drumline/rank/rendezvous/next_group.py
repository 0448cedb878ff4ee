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
        assert self._stores.own is not None
        for member in self._before.members:
            if (
                member.process != self._stores.process
                and (store := self._stores.connect(member)) is not None
            ):
                with contextlib.suppress(RuntimeError):
                    store.set(f"broken/{self._before.generation}", "1")
        decided = None
        while decided is None:
            lower = (one for one in self._before.members if one.number < self._number)
            decided = next(filter(None, map(self._ask, lower)), None) or self.decide()
        self._stores.own.set(
            self._key, decided.encode()
        )  # for other ranks here, and nodes whose decider is lost
        return decided

    def _ask(self, member: LiveNode) -> NodeGroup | None:
        """The decision of a lower node; None: it is lost."""
        until = time.monotonic() + self._before.longest_change_s(self._patience_s)
        while (store := self._stores.connect(member)) is not None:
            with contextlib.suppress(RuntimeError):
                store.set(f"arrived/{self._before.generation}/{self._number}", self._stores.process)
                if (found := store.peek(self._key)) is not None:
                    return NodeGroup.decode(found)
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
        assert self._stores.own is not None
        generation = self._before.generation
        arrived = [self._stores.card]
        waiting = [one for one in self._before.members if one.process != self._stores.process]
        silent = []
        until = time.monotonic() + self._patience_s
        while waiting and time.monotonic() < until:
            for one in list(waiting):
                if (
                    self._stores.own.peek(f"arrived/{generation}/{one.number}")
                    == one.process.encode()
                ):
                    arrived.append(one)
                    waiting.remove(one)
                elif (store := self._stores.connect(one)) is not None:
                    if one.number < self._number:
                        return None
                    with contextlib.suppress(RuntimeError):
                        if (
                            found := store.peek(self._key)
                        ) is not None:  # it could not reach this node meanwhile
                            return NodeGroup.decode(found)
                elif one.process in self._stores.gone or (state := one.probe()) == "refused":
                    waiting.remove(one)
                elif state == "silent":  # if it is open, there was no connection for a moment only
                    waiting.remove(one)
                    silent.append(one)
            time.sleep(POLL_S)
        self._check_majority(arrived, silent)
        joining = [
            one
            for one in self._stores.lobby(self._stores.own)
            if self._stores.connect(one) is not None
        ]
        staying = [one for one in arrived if one.number not in {new.number for new in joining}]
        members = tuple(sorted([*staying, *joining], key=lambda one: one.number))
        gone = [one for one in self._before.members if one not in staying]
        decided = NodeGroup(
            generation + 1, members, tuple(map(str, gone)), tuple(map(str, joining))
        )
        for one in joining:
            self._stores.own.set(f"joined/{one.process}", decided.encode())
            self._stores.own.delete_key(f"lobby/{one.number}")
        return decided

    def _check_majority(self, arrived: list[LiveNode], silent: list[LiveNode]) -> None:
        """Refuse to continue beside others that may do so, too, in another part of a network that
        was cut."""
        sides = [
            (len(side), -min(one.number for one in side)) for side in (arrived, silent) if side
        ]
        if silent and sides[0] < sides[1]:
            names = [join_names([str(one) for one in side]) for side in (silent, arrived)]
            raise TrainingError(
                f"{names[0]} cannot be reached, and may continue without {names[1]}, which ends",
                next_step="check the network between them; then start this node again, and it joins the others",
            )


class JoiningNode:
    """One rank of it."""

    def __init__(
        self, given: Topology, stores: NodeStores, facts: Facts, *, patience_s: float
    ) -> None:
        """`facts`: what this rank runs with."""
        self._given = given
        self._stores = stores
        self._facts = facts
        self._patience_s = patience_s
        self._number = stores.card.number
        self._is_first = given.local_rank == 0

    def join(self, redirected: Redirected) -> NodeGroup | None:
        """This rank was started while others train: wait until they let its node in. None: their
        run has ended."""
        known = NodeGroup.decode(redirected.text)
        notice = WaitNotice(first_s=0)
        while known is not None:
            stores = ((one, self._stores.connect(one)) for one in known.members)
            decider, store = next((found for found in stores if found[1] is not None), (None, None))
            if decider is None or store is None:
                break
            try:
                if self._is_first:
                    self._stores.host_for(decider, timeout_s=self._patience_s)
                    self._check_facts(store, known)
                    store.set(f"lobby/{self._number}", json.dumps(asdict(self._stores.card)))
                while not answered(partial(self._is_settled, store, known)):
                    if notice.is_due() and self._is_first:
                        who = join_names([str(one) for one in known.members])
                        print_message(
                            f"node {self._number} waits to join {who} after their next round"
                        )
                    time.sleep(WATCH_S)
                if (found := store.peek(f"joined/{self._stores.process}")) is not None:
                    return NodeGroup.decode(found)
                store.delete_key(f"lobby/{self._number}")
                if store.peek(NodeStores.OVER) is not None:
                    return None
            except (TimeoutError, RuntimeError) as error:  # it is stopped, or lost
                self._stores.gone |= {decider.process} if isinstance(error, TimeoutError) else set()
            known = self._newer(known)
        raise TrainingError(
            f"node {self._number} cannot join: none of the nodes that train answers",
            next_step="nothing, if they are restarted too; otherwise check that they reach each other on all ports",
        )

    def _check_facts(self, store: SealedStore, known: NodeGroup) -> None:
        """Refuse to join nodes that run another code, or with other settings, before they pause for
        this one."""
        theirs = (
            document(store.peek(NodeStores.FACTS) or b"") or self._facts
        )  # or it has just joined
        found = [
            one
            for one in differences([theirs, self._facts])
            if not {one.group, one.name} & MAY_DIFFER
        ]
        if found:
            values = [
                f"{one.name}: {one.values[1]!r} here, {one.values[0]!r} there"
                for one in found[:MAX_DIFFERENCES]
            ]
            raise PreflightError(
                f"node {self._number} ({self._given.host}) differs from {join_names(list(map(str, known.members)))}, "
                f"and cannot join: {'; '.join(values)}",
                next_step="; ".join(dict.fromkeys(NEXT_STEPS[one.group] for one in found)),
            )

    def _is_settled(self, store: SealedStore, known: NodeGroup) -> bool:
        """Whether this node is let in, the run has ended, or a lower node has joined meanwhile:
        then that one decides who joins."""
        if (
            store.peek(f"joined/{self._stores.process}") is not None
            or store.peek(NodeStores.OVER) is not None
        ):
            return True
        newer = NodeGroup.decode(store.peek(NodeStores.REDIRECT) or b"")
        return (
            newer is not None
            and newer.generation > known.generation
            and newer.members[0] not in known.members
        )

    def _newer(self, known: NodeGroup) -> NodeGroup | None:
        """The decider is another one now: each node has the group that it is in in its store."""
        deadline = time.monotonic() + known.longest_change_s(self._patience_s)
        while time.monotonic() < deadline:
            alive = [
                store for one in known.members if (store := self._stores.connect(one)) is not None
            ]
            if not alive:
                return None
            for store in alive:
                with contextlib.suppress(RuntimeError):
                    found = NodeGroup.decode(store.peek(NodeStores.REDIRECT) or b"")
                    if found is not None and found.generation > known.generation:
                        return found
            time.sleep(WATCH_S)
        return None
