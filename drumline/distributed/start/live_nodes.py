"""The nodes that train now, where a run continues without a lost one (`--dist.on_lost_node continue`).

The first rank of each node runs a store, and all know the stores of all. When a group breaks, each node goes to the
store of the lowest node that still runs; that one decides who is in the next group, whose rendezvous is then in the
store of its lowest node. A node that was lost, or is new, is told of the run at the first node's endpoint. It waits in
the decider's store until the others have finished a round.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch.distributed as dist

from drumline.distributed.start.fact_differences import MAX_DIFFERENCES, NEXT_STEPS, WARNINGS, Facts, differences
from drumline.distributed.start.node_group import CONNECT_S, LiveNode, NodeGroup, Redirected, answered, probe
from drumline.distributed.start.rank_rendezvous import Rendezvous
from drumline.distributed.start.rank_store import host_store
from drumline.errors import PreflightError, TrainingError
from drumline.launch.topology import Topology
from drumline.net.dial import WaitNotice
from drumline.net.sealed_store import SealedStore, document
from drumline.net.tcp_store import break_dead_connections, close_connections, open_tcp_store
from drumline.processes import EXITED, state_of
from drumline.terminal import print_message
from drumline.text import join_names

POLL_S, WATCH_S, CHECK_S = 0.05, 0.25, 0.5
# A host that loses its power closes no connection: without an answer for so long it is lost.
SILENT_S = 15
JOIN_S = 30.0
"""How long the ranks of a decided group wait for each other: all of them run already."""
MOST_REFUSALS = 3
OVER, REDIRECT, FACTS = "over", "redirect", "facts"
"""In a store: the run has ended; which nodes train already; and what with."""
WORLD = "the number of ranks"


class LiveNodes:
    """One rank's view of them."""

    def __init__(self, topology: Topology, *, patience_s: float, is_lost_peer: Callable[[BaseException], bool]) -> None:
        """`topology`: as the launcher gave it. `patience_s`: how long a node that runs may take to leave a group.
        `is_lost_peer`: whether an error is that of a broken connection."""
        self._given, self._patience_s, self._is_lost_peer = topology, patience_s, is_lost_peer
        self.number = topology.rank // topology.local_world_size
        self._process = topology.node_start or secrets.token_hex(8)
        self.latest = NodeGroup(-1, ())
        """The group that this rank is in, or was in until it broke."""
        self.facts: Facts = {}
        """What this rank runs with: a node whose facts differ is refused before the others pause for it."""
        self._refusals = 0
        """Groups in a row that a PreflightError has ended before their first step."""
        self.is_broken = False
        """Whether a node has left the group. The loop reads this after each step."""
        self.has_joiner = False
        """On the lowest node: whether another waits to join."""
        self.ends = False
        """Whether the group ends after the latest step."""
        self._own: SealedStore | None = None
        """The store of this node."""
        self._others: dict[str, SealedStore] = {}
        self._gone: set[str] = set()
        """Starts of nodes that another start has followed, or that do not answer although their host does."""
        self._checked_at = 0.0
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that acts for its node."""
        return self._given.local_rank == 0

    @property
    def is_new(self) -> bool:
        """Whether this rank has not been in a group."""
        return not self.latest.members

    # The group begins

    def check_start(self, store: SealedStore) -> None:
        """Called while the ranks of a group wait for each other: raises Redirected on a rank that is new to a run, and
        an error of the store if a node of the next group is lost."""
        if self.is_new:
            if (found := store.peek(REDIRECT)) is not None:
                raise Redirected(found)
        elif time.monotonic() > self._checked_at + CHECK_S:
            self._checked_at = time.monotonic()
            if lost := [one for one in self.latest.members if self._connect(one) is None]:
                raise dist.DistStoreError(f"{join_names([str(one) for one in lost])} left before the group began")

    def begin(self, rendezvous: Rendezvous) -> None:
        """Collective: all ranks have joined the group."""
        topology, place = self._given, rendezvous.node_of(self.topology().rank)
        if self.is_new:
            if self.is_first:
                at_master = topology.rank == 0
                address = rendezvous.addresses[place] or topology.master_addr
                self._host(topology.master_addr if at_master else address, topology.master_port if at_master else 0)
                rendezvous.store.set(f"live/{place}", json.dumps(asdict(self._me())))
            keys = [f"live/{number}" for number in range(len(rendezvous.nodes))]
            cards = rendezvous.store.multi_get(keys)
            self.latest = NodeGroup(0, tuple(LiveNode(**json.loads(card)) for card in cards))
            self._process = self.latest.members[place].process  # of the first rank, where no launcher gave it to all
        if self._own is None:
            me = self.latest.members[place]
            self._own = self._connect(me)
            if self._own is None:
                raise dist.DistStoreError(f"the store of {me} is gone")
        if not self.is_first:
            self._own.set(f"pid/{topology.local_rank}", str(os.getpid()))
        self.is_broken = self.has_joiner = self.ends = False
        if self.is_first:
            self._own.set(FACTS, json.dumps(self.facts))
            self._own.set(REDIRECT, self.latest.encode())
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, args=(self._own.clone(),), name="drumline-nodes")
        self._watcher.daemon = True
        self._watcher.start()

    def guard_connections(self) -> None:
        """Call it when all groups exist: from here on a connection to a node that does not answer breaks."""
        self._refusals = 0
        for peer in {one.address for one in self.latest.members}:
            break_dead_connections(None, after_s=SILENT_S, address=peer)

    def topology(self) -> Topology:
        """This rank in the latest group: ranks have no gaps."""
        members, given = self.latest.members, self._given
        if not members:
            return given
        place = [one.number for one in members].index(self.number)
        return replace(
            given,
            rank=place * given.local_world_size + given.local_rank,
            world_size=len(members) * given.local_world_size,
            master_addr=members[0].address,
            master_port=members[0].port,
            agent_hosts_store=False,
            node_names=(),
        )

    def _watch(self, own: SealedStore) -> None:
        """Learn that another node has left the group, and of nodes that wait to join."""
        generation, leads = self.latest.generation, self.number == self.latest.members[0].number and self.is_first
        absent_first = leads and self.number > 0
        try:
            while not self._ended.wait(WATCH_S):
                if own.check([f"broken/{generation}"]):
                    self._break()
                    return
                if leads:
                    self.has_joiner = any(probe(one) == "open" for one in self._lobby(own))
                if absent_first:
                    self._redirect_first_node()
        except (dist.DistError, RuntimeError):
            self._break()

    def _break(self) -> None:
        self.is_broken = True
        self._close_connections()

    def _close_connections(self) -> None:
        """What a rank waits for in a collective then fails at once, here and on the other side: gloo's own abort does
        not end it."""
        stores = {one.port for one in self.latest.members} | {self._given.master_port}
        close_connections({one.address for one in self.latest.members}, but=stores)

    def _redirect_first_node(self) -> None:
        """A first node that was started again finds nobody at its own endpoint: tell it where the run is."""
        with contextlib.suppress(OSError, RuntimeError):
            host, port = self._given.master_addr, self._given.master_port
            socket.create_connection((host, port), timeout=WATCH_S).close()
            store = SealedStore(open_tcp_store(host, port, timeout_s=CONNECT_S), self._given.secret)
            store.set(REDIRECT, self.latest.encode())

    # The group ends

    def continues_after(self, change: BaseException, *, has_state: bool) -> bool:
        """Whether this rank goes to another group. While a group begins, a node that does not join in time is lost,
        too; a rank that has no state of the run yet is started again, unless the ranks of the group differ."""
        if not isinstance(change, PreflightError | RuntimeError):
            return True
        refusal = change if isinstance(change, PreflightError) and self._watcher is not None else None
        self._refusals += refusal is not None
        is_lost = isinstance(change, PreflightError) or self.is_lost(change)
        if is_lost and self.latest.generation > 0 and not has_state:
            reason, _, _ = str(change).partition("\n")
            what = f"node {self.number} could not join the others: {reason}"
            if refusal is not None:
                raise PreflightError(what, next_step=refusal.next_step) from change  # its launcher ends
            raise TrainingError(what, next_step="nothing: its launcher starts it again") from change
        return is_lost and self.latest.generation > 0 and self._refusals < MOST_REFUSALS

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether this error means that a node has left the group."""
        lost = self.is_broken or isinstance(error, dist.DistError) or self._is_lost_peer(error)
        self.is_broken |= lost
        return lost

    def leave(self) -> None:
        """This rank leaves the group, whether it broke or a node joins. It ends what others wait for from it."""
        self._ended.set()
        self._close_connections()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def close(self) -> None:
        """The run is over: nodes that wait to join are told."""
        self._ended.set()
        if self._watcher is not None:  # Python's exit aborts the process if a thread comes back from torch's store
            self._watcher.join()
        with contextlib.suppress(dist.DistError, RuntimeError):
            if self.is_first and self._own is not None and self.number == self.latest.members[0].number:
                self._own.set(OVER, "1")
                until = time.monotonic() + 2.0
                while self._lobby(self._own) and time.monotonic() < until:
                    time.sleep(POLL_S)

    def regroup(self) -> Topology:
        """Collective over the nodes that are left: agree on the next group."""
        self.leave()
        before = self.latest
        assert self._own is not None
        if self.is_first:
            self._wait_for_local_ranks(self._own)
            self.latest = self._agree()
        else:
            self._own.set(f"local/{before.generation}/{self._given.local_rank}", "1")
            # Not `wait`: when another client peeks at a value that is not there, torch's store ends all waits for it.
            while (text := self._own.peek(f"decision/{before.generation}")) is None:
                time.sleep(POLL_S)
            found = NodeGroup.decode(text)
            assert found is not None
            self.latest = found
        if self._process not in [one.process for one in self.latest.members]:
            me = f"node {self.number} ({self._given.host})"
            raise TrainingError(
                f"the other nodes continue without {me}, which did not answer in time",
                next_step="nothing: its launcher starts it again, and it joins them",
            )
        return self.topology()

    def _wait_for_local_ranks(self, own: SealedStore) -> None:
        """A node is in a group with all of its ranks: where one has failed, its launcher ends the others."""
        others = [f"local/{self.latest.generation}/{rank}" for rank in range(1, self._given.local_world_size)]
        until = time.monotonic() + self._patience_s
        pids = [f"pid/{rank}" for rank in range(1, self._given.local_world_size)]
        while others and not own.check(others):
            has_exited = any(state_of(int(pid)) in EXITED for pid in own.there(pids).values())
            if has_exited or time.monotonic() > until:
                how = "has exited" if has_exited else "did not leave its group in time"
                raise TrainingError(
                    f"a rank of node {self.number} {how}; the other nodes continue without this one",
                    next_step="nothing: its launcher starts it again, and it joins them",
                )
            time.sleep(POLL_S)

    def _agree(self) -> NodeGroup:
        assert self._own is not None
        key = f"decision/{self.latest.generation}"
        for member in self.latest.members:
            if member.process != self._process and (store := self._connect(member)) is not None:
                with contextlib.suppress(dist.DistError, RuntimeError):
                    store.set(f"broken/{self.latest.generation}", "1")
        decided = None
        while decided is None:
            lower = (one for one in self.latest.members if one.number < self.number)
            decided = next(filter(None, (self._ask(one, key) for one in lower)), None) or self._decide(key)
        self._own.set(key, decided.encode())  # for the other ranks here, and for nodes whose decider is lost
        return decided

    def _ask(self, member: LiveNode, key: str) -> NodeGroup | None:
        """The decision of a lower node; None: it is lost."""
        # Until it has left the group, has waited for others, and knows of each that does not answer.
        until = time.monotonic() + 2 * (self._patience_s + SILENT_S * len(self.latest.members))
        while (store := self._connect(member)) is not None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                store.set(f"arrived/{self.latest.generation}/{self.number}", self._process)
                if (found := store.peek(key)) is not None:
                    return NodeGroup.decode(found)
            if time.monotonic() > until:
                raise TrainingError(
                    f"{member} has not left the group that lost a node, and decides who continues",
                    next_step=f"find out what {member} waits for (drumline watch), or end it: the others then continue",
                )
            time.sleep(POLL_S)
        return None

    def _decide(self, key: str) -> NodeGroup | None:
        """As the lowest node that is left: wait for the others, or until it is known that they are lost. None: a lower
        one answers again."""
        assert self._own is not None
        generation, arrived = self.latest.generation, [self._me()]
        waiting, silent = [one for one in self.latest.members if one.process != self._process], []
        until = time.monotonic() + self._patience_s
        while waiting and time.monotonic() < until:
            for one in list(waiting):
                if self._own.peek(f"arrived/{generation}/{one.number}") == one.process.encode():
                    arrived.append(one)
                    waiting.remove(one)
                elif (store := self._connect(one)) is not None:
                    if one.number < self.number:
                        return None
                    with contextlib.suppress(dist.DistError, RuntimeError):
                        if (found := store.peek(key)) is not None:  # it could not reach this node meanwhile
                            return NodeGroup.decode(found)
                elif one.process in self._gone or (state := probe(one)) == "refused":
                    waiting.remove(one)
                elif state == "silent":  # if it is open, there was no connection for a moment only
                    waiting.remove(one)
                    silent.append(one)
            time.sleep(POLL_S)
        self._check_majority(arrived, silent)
        joining = [one for one in self._lobby(self._own) if self._connect(one) is not None]
        staying = [one for one in arrived if one.number not in {new.number for new in joining}]
        members = tuple(sorted([*staying, *joining], key=lambda one: one.number))
        gone = [one for one in self.latest.members if one not in staying]
        decided = NodeGroup(generation + 1, members, tuple(map(str, gone)), tuple(map(str, joining)))
        for one in joining:
            self._own.set(f"joined/{one.process}", decided.encode())
            self._own.delete_key(f"lobby/{one.number}")
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

    def _connect(self, member: LiveNode) -> SealedStore | None:
        """The store of a node; None: the node is lost, or was started again."""
        if member.process in self._gone:
            return None
        if probe(member) != "open":  # first: a store that has lost its connection prints torch's own stack
            self._others.pop(member.process, None)
            return None
        try:
            return answered(partial(self._open, member), limit_s=SILENT_S)
        except (OSError, RuntimeError) as error:
            self._gone |= {member.process} if isinstance(error, TimeoutError) else set()
            self._others.pop(member.process, None)
            return None

    def _open(self, member: LiveNode) -> SealedStore | None:
        if (store := self._others.get(member.process)) is None:
            base = open_tcp_store(member.address, member.port, timeout_s=CONNECT_S)
            break_dead_connections(member.port, after_s=SILENT_S)
            store = self._others[member.process] = SealedStore(base, self._given.secret)
        if store.peek("process") != member.process.encode():
            self._gone.add(member.process)
            return None
        return store

    # A node joins a run

    def join(self, told: Redirected) -> Topology | None:
        """This rank was started while others train: wait until they let its node in. None: their run has ended."""
        known = NodeGroup.decode(told.text)
        notice = WaitNotice(first_s=0)
        while known is not None:
            stores = (self._connect(one) for one in known.members)
            if (store := next((one for one in stores if one is not None), None)) is None:
                break
            with contextlib.suppress(dist.DistError, RuntimeError):
                if self.is_first:
                    if self._own is None:
                        self._open_own(known)
                    self._check_facts(store, known)
                    store.set(f"lobby/{self.number}", json.dumps(asdict(self._me())))
                while (found := store.peek(f"joined/{self._process}")) is None:
                    if store.peek(OVER) is not None or self._is_led_elsewhere(store, known):
                        break
                    if notice.is_due() and self.is_first:
                        who = join_names([str(one) for one in known.members])
                        print_message(f"node {self.number} waits to join {who} after their next round")
                    time.sleep(WATCH_S)
                if found is None:
                    store.delete_key(f"lobby/{self.number}")
                    if store.peek(OVER) is not None:
                        return None
                else:
                    decided = NodeGroup.decode(found)
                    assert decided is not None
                    self.latest = decided
                    return self.topology()
            known = self._newer(known)
        raise TrainingError(
            f"node {self.number} cannot join: none of the nodes that train answers",
            next_step="nothing, if they are restarted too; otherwise check that they reach each other on all ports",
        )

    def _check_facts(self, store: SealedStore, known: NodeGroup) -> None:
        """Refuse to join nodes that run another code, or with other settings, before they pause for this one."""
        theirs = document(store.peek(FACTS) or b"") or {}
        found = [one for one in differences([theirs, self.facts]) if one.group not in WARNINGS and one.name != WORLD]
        if found:
            values = [f"{one.name}: {one.values[1]!r} here, {one.values[0]!r} there" for one in found[:MAX_DIFFERENCES]]
            raise PreflightError(
                f"node {self.number} ({self._given.host}) differs from {join_names(list(map(str, known.members)))}, "
                f"and cannot join: {'; '.join(values)}",
                next_step="; ".join(dict.fromkeys(NEXT_STEPS[one.group] for one in found)),
            )

    def _is_led_elsewhere(self, store: SealedStore, known: NodeGroup) -> bool:
        """Whether a lower node has joined meanwhile: then that one decides who joins."""
        newer = NodeGroup.decode(store.peek(REDIRECT) or b"")
        return newer is not None and newer.generation > known.generation and newer.members[0] not in known.members

    def _newer(self, known: NodeGroup) -> NodeGroup | None:
        """The decider is another one now: each node has the group that it is in in its store."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            alive = [store for one in known.members if (store := self._connect(one)) is not None]
            if not alive:
                return None
            for store in alive:
                with contextlib.suppress(dist.DistError, RuntimeError):
                    found = NodeGroup.decode(store.peek(REDIRECT) or b"")
                    if found is not None and found.generation > known.generation:
                        return found
            time.sleep(WATCH_S)
        return None

    def _lobby(self, own: SealedStore) -> list[LiveNode]:
        numbers = range(self._given.world_size // self._given.local_world_size)
        found = own.there([f"lobby/{number}" for number in numbers])
        cards = (document(text, number=int, host=str, address=str, port=int, process=str) for text in found.values())
        return [LiveNode(**card) for card in cards if card is not None]

    def _host(self, address: str, port: int) -> None:
        base, port = host_store(address, port, timeout_s=self._patience_s)
        self._own = SealedStore(base, self._given.secret)
        self._card = LiveNode(self.number, self._given.host, address, port, self._process)
        self._own.set("process", self._process)

    def _open_own(self, known: NodeGroup) -> None:
        """The first node's is at its endpoint, where others look for it."""
        if self.number == 0:
            self._host(self._given.master_addr, self._given.master_port)
            return
        peer = next(one for one in known.members if self._connect(one) is not None)
        with socket.create_connection((peer.address, peer.port), timeout=CONNECT_S) as connection:
            address = str(connection.getsockname()[0])
        self._host(address, 0)

    def _me(self) -> LiveNode:
        return self._card
