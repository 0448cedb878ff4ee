"""Who is in the next group of nodes, when one is lost or joins: the lowest one that still runs decides, and its store
has the rendezvous of that group."""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from drumline.distributed.start import node_group
from drumline.distributed.start.node_group import POLL_S, LiveNode, NodeGroup, NodeStores
from drumline.errors import TrainingError
from drumline.text import join_names


class NextGroup:
    """One node's part, by its first rank, when it has left the group `before`."""

    def __init__(self, before: NodeGroup, stores: NodeStores, *, patience_s: float) -> None:
        self._before, self._stores, self._patience_s = before, stores, patience_s
        self._number, self._key = stores.card.number, f"decision/{before.generation}"

    def agree(self) -> NodeGroup:
        """Collective over the first ranks of the nodes that are left."""
        assert self._stores.own is not None
        for member in self._before.members:
            if member.process != self._stores.process and (store := self._stores.connect(member)) is not None:
                with contextlib.suppress(dist.DistError, RuntimeError):
                    store.set(f"broken/{self._before.generation}", "1")
        decided = None
        while decided is None:
            lower = (one for one in self._before.members if one.number < self._number)
            decided = next(filter(None, map(self._ask, lower)), None) or self.decide()
        self._stores.own.set(self._key, decided.encode())  # for other ranks here, and nodes whose decider is lost
        return decided

    def _ask(self, member: LiveNode) -> NodeGroup | None:
        """The decision of a lower node; None: it is lost."""
        until = time.monotonic() + self._before.longest_change_s(self._patience_s)
        while (store := self._stores.connect(member)) is not None:
            with contextlib.suppress(dist.DistError, RuntimeError):
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
        """As the lowest node that is left: wait for the others, or until it is known that they are lost. None: a lower
        one answers again."""
        assert self._stores.own is not None
        generation, arrived = self._before.generation, [self._stores.card]
        waiting, silent = [one for one in self._before.members if one.process != self._stores.process], []
        until = time.monotonic() + self._patience_s
        while waiting and time.monotonic() < until:
            for one in list(waiting):
                if self._stores.own.peek(f"arrived/{generation}/{one.number}") == one.process.encode():
                    arrived.append(one)
                    waiting.remove(one)
                elif (store := self._stores.connect(one)) is not None:
                    if one.number < self._number:
                        return None
                    with contextlib.suppress(dist.DistError, RuntimeError):
                        if (found := store.peek(self._key)) is not None:  # it could not reach this node meanwhile
                            return NodeGroup.decode(found)
                elif one.process in self._stores.gone or (state := node_group.probe(one)) == "refused":
                    waiting.remove(one)
                elif state == "silent":  # if it is open, there was no connection for a moment only
                    waiting.remove(one)
                    silent.append(one)
            time.sleep(POLL_S)
        self._check_majority(arrived, silent)
        joining = [one for one in self._stores.lobby(self._stores.own) if self._stores.connect(one) is not None]
        staying = [one for one in arrived if one.number not in {new.number for new in joining}]
        members = tuple(sorted([*staying, *joining], key=lambda one: one.number))
        gone = [one for one in self._before.members if one not in staying]
        decided = NodeGroup(generation + 1, members, tuple(map(str, gone)), tuple(map(str, joining)))
        for one in joining:
            self._stores.own.set(f"joined/{one.process}", decided.encode())
            self._stores.own.delete_key(f"lobby/{one.number}")
        return decided

    def _check_majority(self, arrived: list[LiveNode], silent: list[LiveNode]) -> None:
        """Refuse to continue beside others that may do so, too, in another part of a network that was cut."""
        sides = [(len(side), -min(one.number for one in side)) for side in (arrived, silent) if side]
        if silent and sides[0] < sides[1]:
            names = [join_names([str(one) for one in side]) for side in (silent, arrived)]
            raise TrainingError(
                f"{names[0]} cannot be reached, and may continue without {names[1]}, which ends",
                next_step="check the network between them; then start this node again, and it joins the others",
            )
