"""A node that was lost, or is new, joins a run: it is told of it at the first node's endpoint, and waits in the store
of the node that decides until the others have finished a round."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import asdict
from functools import partial

import torch.distributed as dist

from drumline.distributed.start.fact_differences import MAX_DIFFERENCES, NEXT_STEPS, WARNINGS, Facts, differences
from drumline.distributed.start.node_group import (
    CONNECT_S,
    FACTS,
    OVER,
    REDIRECT,
    SILENT_S,
    WATCH_S,
    NodeGroup,
    NodeStores,
    Redirected,
    answered,
)
from drumline.errors import PreflightError, TrainingError
from drumline.launch.topology import Topology
from drumline.net.dial import WaitNotice
from drumline.net.sealed_store import SealedStore, document
from drumline.terminal import print_message
from drumline.text import join_names

WORLD = "the number of ranks"


class JoiningNode:
    """One rank of it."""

    def __init__(self, given: Topology, stores: NodeStores, facts: Facts, *, patience_s: float) -> None:
        """`facts`: what this rank runs with."""
        self._given, self._stores, self._facts, self._patience_s = given, stores, facts, patience_s
        self._number, self._is_first = stores.card.number, given.local_rank == 0

    def join(self, told: Redirected) -> NodeGroup | None:
        """This rank was started while others train: wait until they let its node in. None: their run has ended."""
        known = NodeGroup.decode(told.text)
        notice = WaitNotice(first_s=0)
        while known is not None:
            stores = ((one, self._stores.connect(one)) for one in known.members)
            decider, store = next((found for found in stores if found[1] is not None), (None, None))
            if decider is None or store is None:
                break
            try:
                if self._is_first:
                    if self._stores.own is None:
                        self._open_own(known)
                    self._check_facts(store, known)
                    store.set(f"lobby/{self._number}", json.dumps(asdict(self._stores.card)))
                while not answered(partial(self._is_settled, store, known), limit_s=SILENT_S):
                    if notice.is_due() and self._is_first:
                        who = join_names([str(one) for one in known.members])
                        print_message(f"node {self._number} waits to join {who} after their next round")
                    time.sleep(WATCH_S)
                if (found := store.peek(f"joined/{self._stores.process}")) is not None:
                    return NodeGroup.decode(found)
                store.delete_key(f"lobby/{self._number}")
                if store.peek(OVER) is not None:
                    return None
            except (TimeoutError, RuntimeError) as error:  # it is stopped, or lost
                self._stores.gone |= {decider.process} if isinstance(error, TimeoutError) else set()
            known = self._newer(known)
        raise TrainingError(
            f"node {self._number} cannot join: none of the nodes that train answers",
            next_step="nothing, if they are restarted too; otherwise check that they reach each other on all ports",
        )

    def _check_facts(self, store: SealedStore, known: NodeGroup) -> None:
        """Refuse to join nodes that run another code, or with other settings, before they pause for this one."""
        theirs = document(store.peek(FACTS) or b"") or {}
        found = [one for one in differences([theirs, self._facts]) if one.group not in WARNINGS and one.name != WORLD]
        if found:
            values = [f"{one.name}: {one.values[1]!r} here, {one.values[0]!r} there" for one in found[:MAX_DIFFERENCES]]
            raise PreflightError(
                f"node {self._number} ({self._given.host}) differs from {join_names(list(map(str, known.members)))}, "
                f"and cannot join: {'; '.join(values)}",
                next_step="; ".join(dict.fromkeys(NEXT_STEPS[one.group] for one in found)),
            )

    def _is_settled(self, store: SealedStore, known: NodeGroup) -> bool:
        """Whether this node is let in, the run has ended, or a lower node has joined meanwhile: then that one decides
        who joins."""
        if store.peek(f"joined/{self._stores.process}") is not None or store.peek(OVER) is not None:
            return True
        newer = NodeGroup.decode(store.peek(REDIRECT) or b"")
        return newer is not None and newer.generation > known.generation and newer.members[0] not in known.members

    def _newer(self, known: NodeGroup) -> NodeGroup | None:
        """The decider is another one now: each node has the group that it is in in its store."""
        deadline = time.monotonic() + known.longest_change_s(self._patience_s)
        while time.monotonic() < deadline:
            alive = [store for one in known.members if (store := self._stores.connect(one)) is not None]
            if not alive:
                return None
            for store in alive:
                with contextlib.suppress(dist.DistError, RuntimeError):
                    found = NodeGroup.decode(store.peek(REDIRECT) or b"")
                    if found is not None and found.generation > known.generation:
                        return found
            time.sleep(WATCH_S)
        return None

    def _open_own(self, known: NodeGroup) -> None:
        """The first node's is at its endpoint, where others look for it."""
        if self._number == 0:
            self._stores.host(self._given.master_addr, self._given.master_port, timeout_s=self._patience_s)
            return
        peer = next(one for one in known.members if self._stores.connect(one) is not None)
        with socket.create_connection((peer.address, peer.port), timeout=CONNECT_S) as connection:
            address = str(connection.getsockname()[0])
        self._stores.host(address, 0, timeout_s=self._patience_s)
