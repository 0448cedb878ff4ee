"""The rendezvous of nodes: the launcher of node 0, which runs the store, decides who is in the next
round. A job on one machine has a simpler one.

Each node publishes a card with its heartbeat. When all have joined, or enough of them have and the
last call is over, node 0 publishes the list of their cards; a node accepts a list only when its own
card is on it. Then the nodes probe each other, and node 0 decides for all whether ranks can start.
"""

from __future__ import annotations

import errno
import json
import math
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.utils.distributed import get_free_port

from drumline.base.errors import DrumlineError, ExitCode, HangError, PreflightError, TrainingError
from drumline.base.job_secret import SECRET_ENV, derived, new_secret
from drumline.base.text import print_message
from drumline.launch.node.membership import DONE, JOINING, RUNNING, Membership
from drumline.launch.node_plan import RUN_ID, NodePlan
from drumline.net.dial import (
    CLOSED_S,
    OPEN_RENDEZVOUS,
    Reason,
    WaitNotice,
    explained,
    explained_closed,
    wait_for_port,
)
from drumline.net.handshake import nonce
from drumline.net.interfaces import LOOPBACK, own_address, own_binding
from drumline.net.key_exchange import KeyPair, unwrap_secret, wrap_secret
from drumline.rank.rendezvous.rank_store import announce, follow
from drumline.rank.rendezvous.reachability import (
    NodeCard,
    ProbeCard,
    check_data_ports,
    open_probe_port,
    unreachable_nodes,
)
from drumline.rank.sealed_store import SealedStore, decoded
from drumline.rank.tcp_store import (
    break_dead_connections,
    local_address,
    open_tcp_store,
    store_binding,
)
from drumline.watch.watch_folder import DIAGNOSIS_S

POLL_S = 0.05
LINGER_S = 5.0
FIRST_NOTICE_S = 15.0
# How long after the last call to wait for a node that is alive, but has not ended its ranks yet.
LATE_S = 30
ROUND = "round"
CLOSED = "closed"
DECISION = "decision"
STORE_TIMEOUT_S = 30
# torch's default.
LOCAL_STORE_TIMEOUT_S = 300
# How long a reason may last between hosts that are up; a launcher that refuses connections may
# still be loading torch.
LIMITS_S: dict[str, float] = {
    Reason.NO_ANSWER: CLOSED_S,
    Reason.NO_ROUTE: CLOSED_S,
    Reason.UNKNOWN_NAME: CLOSED_S,
    Reason.REFUSED: 60.0,
}


@dataclass(eq=False, kw_only=True)
class Preempted(Exception):  # noqa: N818  # no error
    """A signal asked this node's ranks to stop, and they did."""

    was_reported: bool
    """Whether a rank has reported it."""
    was_signalled: bool = True
    """Whether the signal was sent to this process; otherwise a rank got it, or a notice."""
    has_saved: bool = False


@dataclass(frozen=True)
class Round:
    """The nodes that start ranks together."""

    name: str
    cards: Mapping[int, NodeCard]
    """By node rank, in its order."""
    keys: Mapping[str, Any] | None
    """The secret of its ranks, wrapped for each node; None where nodes have a common one."""


class AgentRendezvous(RendezvousHandler):
    """What an agent knows of its job. The methods here are for a job on one machine: every attempt gets
    a new store, which only this machine can reach."""

    def __init__(self, node: NodePlan) -> None:
        self.node = node
        self.restart_reason = ""
        """Why this node's ranks are restarted although they run."""
        self.is_leaving = False
        """Whether this node's ranks were asked to stop: then nodes that join or leave do not
        matter."""
        self.has_lost_node = False
        """Whether ranks are restarted because a node is lost."""
        self.ranks_secret = ""
        """The secret of the ranks and sidecars of this round, on all nodes."""
        self.sidecars: tuple[str, ...] = ()
        """`ADDRESS:PORT` of each node's sidecar, in the order of the ranks of this round."""
        self.restarts_used = node.restarts_used
        """How often the job was restarted after a failure on any node, without getting further than
        `counted_step`."""
        self.counted_step = node.reached_step
        """The furthest step of all nodes when they joined."""
        self.reached_step = node.reached_step
        """The furthest step of this node's ranks."""

    def get_backend(self) -> str:
        return "drumline"

    def get_run_id(self) -> str:
        return RUN_ID

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks use the store of the agent; on several nodes rank 0 opens one for them."""
        return self.node.num_nodes == 1

    def next_rendezvous(self) -> RendezvousInfo:
        """A store of its own for each start of ranks."""
        # Any user of this machine can reach the store.
        self.ranks_secret = new_secret()
        store = open_tcp_store(LOOPBACK, 0, timeout_s=LOCAL_STORE_TIMEOUT_S, bound=LOOPBACK)
        # The agent's own part, too: ranks read their numbers from it.
        agents: Any = SealedStore(store, self.ranks_secret, "drumline/agents")
        return RendezvousInfo(agents, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def explained(self) -> AbstractContextManager[None]:
        """A store of this machine needs no explanation."""
        return nullcontext()

    def is_closed(self) -> bool:
        return False

    def num_nodes_waiting(self) -> int:
        return 0

    def are_others_running(self) -> bool:
        return False

    def is_node_waiting(self) -> bool:
        return False

    def set_closed(self) -> None: ...
    def wait_for_others(self) -> None: ...
    def publish_failure(self, what: str, code: int) -> None: ...
    def warn_of_missing_nodes(self) -> None: ...
    def leave(self) -> None: ...

    def shutdown(self) -> bool:
        """There is nothing to close; torch asks whether it succeeded."""
        return True


class OwnRendezvous(AgentRendezvous):
    """For a node whose ranks find those of the others themselves (`--dist.on_lost_node continue`):
    its launcher never waits for another, and restarts no ranks because of one."""

    def __init__(self, node: NodePlan, secret: str | None) -> None:
        super().__init__(node)
        self._secret = secret

    def next_rendezvous(self) -> RendezvousInfo:
        """The agent has a store of this machine; the ranks meet the others at the first node."""
        local_info = super().next_rendezvous()
        self.ranks_secret = ""
        if self._secret is not None:
            self.ranks_secret = derived(self._secret, "ranks of nodes that continue")
        place = RendezvousStoreInfo(self.node.master_addr, self.node.master_port)
        return RendezvousInfo(local_info.store, 0, 1, place)


class NodeRendezvous(AgentRendezvous):
    """Nodes in the order of their NODE_RANK. Ranks do not use the agents' store: rank 0 opens one for
    each attempt, so that values of an earlier one are not found."""

    def __init__(
        self,
        store: dist.Store,
        node: NodePlan,
        address: str,
        membership: Membership,
    ) -> None:
        """`store`: a connection that may block while it waits for a value."""
        super().__init__(node)
        self.store = store
        self.address = address
        self.membership = membership
        self.secret = membership.secret
        self.round: Round | None = None
        """The last one that this node joined."""
        self._last_list: Mapping[int, NodeCard] = {}
        """On node 0: the cards of the last round that it published."""
        self._join_until = 0.0
        self._poll_s = min(1.0, 0.02 + node.num_nodes / 200)
        self._ask = WaitNotice(first_s=1, growth=1)
        self._done_notice = WaitNotice(first_s=FIRST_NOTICE_S)
        self.is_done = False
        """Whether all ranks here have exited with 0, while others still run."""
        self._store_lost_at: float | None = None

    @property
    def members(self) -> list[int]:
        """The node ranks of this round."""
        return [] if self.round is None else list(self.round.cards)

    def next_rendezvous(self) -> RendezvousInfo:
        """Collective: torch's agent joins the next round here."""
        self.is_done = False
        with self.explained():
            with self.membership.joining():
                info = self._join()
            self.membership.read()

        if self.missing:
            print_message(f"warning: training continues on {self._nodes_left()}")
        return info

    def _join(self) -> RendezvousInfo:
        """Collective: all nodes of the round have joined, and reach each other."""
        self._join_until = time.monotonic() + self.node.join_timeout_s
        has_joined = False
        while not has_joined:
            keys = KeyPair() if self.secret is None else None
            with open_probe_port(own_binding(self.address)) as probe:
                card = self._card(probe, keys)
                self.membership.join_round(card)
                joined = self._lead(card, keys) if self._leads else self._follow(card)

                # The name is sealed with each value: those of another round are not valid here.
                prefix = f"drumline/round/{joined.name}"
                store = SealedStore(self.store, self.secret, prefix)
                has_joined = self._check_data_ports(store, joined)

        self.round = joined
        self.ranks_secret = self._ranks_secret(joined, keys)
        cards = list(joined.cards.values())
        self.sidecars = tuple(f"{card['address']}:{card['watch_port']}" for card in cards)
        self._count_restarts(cards)

        base = dist.PrefixStore(prefix, self.store)
        agents: Any = SealedStore(base, derived(self.ranks_secret, "agents"), "drumline/agents")
        # Missing nodes leave no gap: torchrun counts from 0.
        node_rank = self.members.index(self.node.node_rank)
        place = RendezvousStoreInfo(cards[0]["address"], cards[0]["port"])
        return RendezvousInfo(agents, node_rank, len(cards), place)

    @property
    def _leads(self) -> bool:
        """Whether this is node 0, which runs the store."""
        return self.node.node_rank == 0

    def _card(self, probe: ProbeCard, keys: KeyPair | None) -> NodeCard:
        """What this node publishes for the round; a new one for each."""
        return {
            "rank": self.node.node_rank,
            "host": self.membership.host(self.node.node_rank) or "",
            "address": self.address,
            "port": get_free_port(),  # type: ignore[no-untyped-call]
            **probe,
            "public": "" if keys is None else keys.public,
            "nonce": nonce(),
            "watch_port": get_free_port(),  # type: ignore[no-untyped-call]
            "restarts": self.restarts_used,
            "counted_step": self.counted_step,
            "reached_step": self.reached_step,
        }

    def _lead(self, card: NodeCard, keys: KeyPair | None) -> Round:
        """On node 0: wait for the others, and publish the round."""
        least = self.node.min_nodes or self.node.num_nodes
        enough_since = None
        for now in self._polls():
            self.membership.read()
            cards = {0: card, **self._new_cards(self._last_list)}
            if len(cards) < least:
                enough_since = None
                continue

            enough_since = enough_since or now
            is_last_call_over = now - enough_since > self._last_call_s(len(cards))
            if len(cards) == self.node.num_nodes or is_last_call_over:
                break

        name = nonce()
        wrapped = None
        if keys is not None:
            # Without a common secret this node makes one, and encrypts it for each of the others.
            self.ranks_secret = new_secret()
            wrapped = wrap_secret(keys, self.ranks_secret, cards, name)

        self._last_list = dict(sorted(cards.items()))
        joined = Round(name, self._last_list, wrapped)
        self.membership.publish(ROUND, asdict(joined))
        return joined

    def _last_call_s(self, num_joined: int) -> float:
        """How long enough nodes wait for the rest."""
        limit_s = float(self.node.last_call_s)
        # A living node would join right after this round, and all ranks would restart.
        if num_joined < self.membership.count_alive():
            limit_s += min(LATE_S, (self.node.join_timeout_s - limit_s) / 2)
        return limit_s

    def _follow(self, card: NodeCard) -> Round:
        """On the other nodes: the round that has this node's card."""
        for _ in self._polls():
            # None for anything else: without a secret, anyone can write there.
            joined = decoded(Round, self.membership.store.peek(ROUND) or b"")
            if joined is not None and joined.cards.get(card["rank"]) == card:
                return joined
        raise AssertionError

    def _polls(self) -> Iterator[float]:
        """The time of each poll, until the join timeout is over, or the job."""
        while (now := time.monotonic()) <= self._join_until:
            self._check_joins()
            if self.is_closed():
                raise self._job_over()

            yield now
            time.sleep(self._poll_s)

        late = self.membership.names(self.membership.missing()) or "the others"
        raise self._error(
            f"node {self.node.node_rank} waited {self.node.join_timeout_s} s at {self.node.endpoint}: "
            f"{late} did not join",
            "start it there, with the same settings and its own NODE_RANK; check that it reaches that port",
        )

    def _job_over(self) -> DrumlineError:
        """What to raise when the rendezvous is closed: the failure of another node, if one is
        known."""
        what = (
            f"the job is over, or another node ended it; node {self.node.node_rank} cannot join it"
        )
        # node 0 may have left, with its store
        with suppress(dist.DistError):
            if failure := self.membership.failure():
                what = failure["sentence"]
        return self._error(what, "read the output of the others")

    def _check_joins(self) -> None:
        """While no ranks run: raise if there is no reason to wait for the others."""
        if self.is_leaving:
            raise Preempted(was_reported=False)
        self._check_replaced()

    def _check_replaced(self) -> None:
        """Raise if another launcher has this node's rank."""
        if self.membership.was_replaced:
            raise self._error(
                f"another launcher has taken NODE_RANK {self.node.node_rank} from this one"
            )

    def _new_cards(self, listed: Mapping[int, NodeCard]) -> dict[int, NodeCard]:
        """Of the other nodes that join, at the last read of heartbeats. A card that is on the list
        belongs to that round: its node makes another one to join the next."""
        return {
            rank: card
            for rank, card in self.membership.joining_cards().items()
            if listed.get(rank) != card
        }

    def _waiting(self, joined: Round) -> list[int]:
        """Nodes that wait for the round after this one, at the last read of heartbeats."""
        return list(self._new_cards(joined.cards))

    def _lost(self, joined: Round) -> list[int]:
        """Nodes of this round that have sent no heartbeat for too long."""
        limit_s = self.node.silence_s
        return [rank for rank in joined.cards if self.membership.is_silent(rank, for_s=limit_s)]

    def _is_left(self, joined: Round) -> bool:
        """Whether a node of this round has exited, or has ended the job."""
        is_done = any(self.membership.is_alive(rank, DONE) for rank in joined.cards)
        return is_done or self.is_closed()

    def _check_data_ports(self, store: SealedStore, joined: Round) -> bool:
        """Collective: node 0 decides whether ranks can start; False: all join again, because a node
        is lost or has left. What is wrong is raised on all nodes."""
        closed = unreachable_nodes(joined.cards, self.node.node_rank)
        store.set(f"probed/{self.node.node_rank}", json.dumps(closed))

        num_readers = 0
        if self._leads:
            num_readers = len(joined.cards) - 1
            decision = announce(store, DECISION, lambda: self._decide(store, joined))
        else:
            decision = self._decision_of_node_0(store)

        try:
            return bool(follow(store, DECISION, decision, num_readers=num_readers, read_s=LINGER_S))
        except PreflightError as error:
            raise self._error(error.what, error.next_step) from error

    def _decision_of_node_0(self, store: SealedStore) -> dict[str, Any]:
        """On the other nodes: wait for it."""
        # However short the join timeout is: nodes probe each other, and one may be lost.
        limit_s = max(self.node.join_timeout_s, CLOSED_S + self.node.silence_s)
        until = time.monotonic() + limit_s
        while time.monotonic() <= until:
            self._check_joins()

            is_closed = self.is_closed()
            # Read after that: the first node that raises what was decided closes the job.
            decision = decoded(dict[str, Any], store.peek(DECISION))
            if decision is not None:
                return decision
            if is_closed:
                raise self._job_over()

            time.sleep(self._poll_s)

        raise self._error(
            f"{self.membership.name(0)} did not decide within {limit_s:g} s whether ranks can start",
            "read its output",
        )

    def _decide(self, store: SealedStore, joined: Round) -> bool:
        """On node 0: whether ranks can start, when all have probed each other."""
        keys = [f"probed/{rank}" for rank in joined.cards]
        while (texts := store.peek_all(keys)) is None:
            self.membership.read()
            if self._lost(joined) or self._waiting(joined) or self._is_left(joined):
                return False
            time.sleep(self._poll_s)

        probed = [decoded(dict[str, Any], text) or {} for text in texts]
        check_data_ports(joined.cards, dict(zip(joined.cards, probed, strict=True)))
        return True

    def _ranks_secret(self, joined: Round, keys: KeyPair | None) -> str:
        """The secret of this round: from the common one, or as node 0 has made it."""
        if self.secret is not None:
            nonces = [card["nonce"] for card in joined.cards.values()]
            return derived(self.secret, "ranks", *nonces)

        if self._leads or keys is None:
            return self.ranks_secret

        who = f"node {self.node.node_rank} on {self.membership.heartbeat.host}"
        return unwrap_secret(keys, joined.keys, self.node.node_rank, joined.name, who=who)

    def _count_restarts(self, cards: list[NodeCard]) -> None:
        """The same on all nodes. A restart after progress is the first at its step."""
        counted_step = max(card["counted_step"] for card in cards)
        reached_step = max(card["reached_step"] for card in cards)
        restarts = max(card["restarts"] for card in cards)
        self.restarts_used = min(restarts, 1) if reached_step > counted_step else restarts
        self.counted_step = max(counted_step, reached_step)
        self.reached_step = self.counted_step

    @property
    def missing(self) -> list[int]:
        """Nodes that the job continues without."""
        if self.round is None:
            return []
        return [rank for rank in range(self.node.num_nodes) if rank not in self.round.cards]

    def warn_of_missing_nodes(self) -> None:
        """At the end, warn if the job ended with fewer nodes."""
        if self.missing:
            print_message(f"warning: the job ended on {self._nodes_left()}")

    def _nodes_left(self) -> str:
        """For a warning: how many nodes there are, and which are missing."""
        missing = self.membership.names(self.missing)
        return f"{len(self.members)} of {self.node.num_nodes} nodes, without {missing}"

    def num_nodes_waiting(self) -> int:
        """Also not 0 when a node is lost: otherwise the ranks would wait for its ranks in the next
        collective."""
        if self.is_leaving or self.round is None:
            return 0
        if self.is_done:
            again = [rank for rank in self._waiting(self.round) if rank in self.members]
            self.restart_reason = f"{self.membership.names(again)} restarted"
            return len(again)

        with self.explained():
            if self._ask.is_due() and self._read_heartbeats():
                self._raise_if_over()

            waiting = self._waiting(self.round)
            lost = self._lost(self.round)
            if lost and self.node.max_restarts == 0 and not self.node.may_shrink:
                raise self._error(
                    f"{self._reason(waiting, lost)}, and no restart is left",
                    "check what ended it, and start all nodes again",
                )

            if waiting or lost:
                self.restart_reason = self._reason(waiting, lost)
                self.has_lost_node = bool(lost)

        return len(waiting) + len(lost)

    def is_node_waiting(self) -> bool:
        """The same as of now, not as of up to a second ago."""
        with self.explained():
            self.membership.read()
        return self.num_nodes_waiting() > 0

    def _read_heartbeats(self) -> bool:
        """Whether the first node's store answers. If it does not, ranks lose their peers, too: they
        get the time to fail by themselves, and the sidecar to say why, which this error would cut
        short."""
        try:
            self.membership.read()
        except dist.DistError:
            now = time.monotonic()
            self._store_lost_at = self._store_lost_at or now
            if now - self._store_lost_at >= DIAGNOSIS_S:
                raise
            return False
        return True

    def _raise_if_over(self) -> None:
        """Raise if another node has ended the job, or taken the place of this one."""
        if failure := self.membership.failure():
            self.membership.set_state(DONE)
            raise self._error(failure["sentence"], "read its output")
        self._check_replaced()

    def _reason(self, waiting: list[int], lost: list[int]) -> str:
        """Why ranks are restarted."""
        new = [rank for rank in waiting if rank in self.missing]
        if new:
            return f"{self.membership.names(new)} joined"
        if lost:
            return f"{self.membership.names(lost)} {'is' if len(lost) == 1 else 'are'} lost"
        return f"{self.membership.names(waiting)} restarted"

    def are_others_running(self) -> bool:
        """When all ranks here have exited with 0: whether ranks of another node still run, and may
        restart all."""
        if self.is_leaving:
            return False

        with suppress(dist.DistError):
            if not self.is_done:
                self.is_done = True
                self._done_notice = WaitNotice(first_s=FIRST_NOTICE_S)
                self.membership.set_state(DONE)
            return self._must_wait()

        return False

    def wait_for_others(self) -> None:
        """Collective: ranks exit at different times, and the first node must not close the store
        too soon."""
        self._done_notice = WaitNotice(first_s=FIRST_NOTICE_S)
        with suppress(dist.DistError):
            self.membership.set_state(DONE)
            self.set_closed()  # a node that joins now is too late, and is informed
            while self._must_wait():
                time.sleep(POLL_S)

    def _must_wait(self) -> bool:
        """Whether another node still runs, which is reported at intervals."""
        running = self._running_nodes()
        if running and self._done_notice.is_due():
            print_message(
                f"the ranks here are done; waiting for those of {self.membership.names(running)}"
            )
        return bool(running)

    def publish_failure(self, what: str, code: int) -> None:
        """This node ends the job: publish why, before the store is closed."""
        if self.membership.was_replaced:
            return

        until = time.monotonic() + LINGER_S
        with suppress(dist.DistError):
            self.membership.publish_failure(what, code)
            while self._leads and self._running_nodes() and time.monotonic() < until:
                time.sleep(POLL_S)

    def _running_nodes(self) -> list[int]:
        """The others of this round that are not done. This node itself has no heartbeat there."""
        self.membership.read()
        limit_s = self.node.silence_s
        return [
            rank
            for rank in self.members
            if self.membership.is_alive(rank, RUNNING, JOINING, within_s=limit_s)
        ]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns an error of the store into a message that names the node which runs it."""
        try:
            yield
        except dist.DistError as error:
            lost = self._error(
                f"the first node, {self.membership.name(0)}, is lost or unreachable: "
                f"nothing answers at {self.node.endpoint}",
                "check what ended it; start all nodes again: a task resumes from its newest checkpoint",
            )
            lost.lost_first_node = True
            raise lost from error

    def _error(self, what: str, next_step: str | None = None) -> DrumlineError:
        """Its class, and with it the exit code, is that of what ended the job."""
        kind: type[DrumlineError] = TrainingError if self.members else PreflightError
        with suppress(dist.DistError):
            failure = self.membership.failure()
            if failure is not None and failure["code"] == ExitCode.HANG:
                kind = HangError
        return kind(what, next_step=next_step)

    def leave(self) -> None:
        """Leave without closing the rendezvous. A thread that still uses the store would abort
        Python's exit."""
        self.membership.leave()

    def is_closed(self) -> bool:
        """Whether the job is over: no node joins it any more."""
        return self.membership.store.peek(CLOSED) == b"1"

    def set_closed(self) -> None:
        """End the job for all nodes."""
        # The job is not over for the launcher that has replaced this one.
        if not self.membership.was_replaced:
            self.membership.store.set(CLOSED, "1")

    def shutdown(self) -> bool:
        """End the job, and leave."""
        with suppress(dist.DistError):
            self.membership.set_state(DONE)
            self.set_closed()
        self.membership.leave()
        return True


# Opening it


def open_rendezvous(
    node: NodePlan, secret: str | None, *, continues: bool = False
) -> AgentRendezvous:
    """The rendezvous of this node's job; node 0 runs its store. `secret`: the one that all nodes
    were given. `continues`: its ranks do not need those of other nodes."""
    if node.num_nodes == 1:
        return AgentRendezvous(node)
    if continues:
        _warn_without_secret(node, secret)
        return OwnRendezvous(node, secret)

    if node.node_rank > 0:
        # A controller that reached all hosts knows that they are up.
        are_up = node.job and not node.may_shrink and not node.may_be_rebooting
        hosts = (node.peers[node.node_rank], node.peers[0]) if are_up else None
        wait_for_first_node(node.endpoint, timeout_s=node.join_timeout_s, hosts=hosts)

    address = address_of(node)
    host = node.master_addr
    bound = None
    if node.node_rank == 0:
        bound = store_binding(host, name="the first node's address")
    store = _open_store(node, host, bound=bound)

    # A separate connection: a call that waits in the other does not block heartbeats.
    heartbeats = _open_store(node, local_address(bound) if bound else host)
    membership = Membership(heartbeats, node, secret)
    break_dead_connections(node.master_port, after_s=node.silence_s)
    membership.check_job()
    membership.join()
    _warn_without_secret(node, secret)
    return NodeRendezvous(store, node, address, membership)


def _warn_without_secret(node: NodePlan, secret: str | None) -> None:
    """Jobs of several nodes listen on the network."""
    if secret is None:
        print_message(
            f"warning: {SECRET_ENV} is not set: whoever reaches {node.endpoint} can end or misdirect this job. Try: "
            "set it to one value on all nodes"
        )


def wait_for_first_node(
    endpoint: str,
    *,
    timeout_s: float,
    hosts: tuple[str, str] | None = None,
    limits: Mapping[str, float] = LIMITS_S,
) -> None:
    """Return when the first node listens. `hosts`: this one and the first, if both are up: then
    `limits` apply."""
    host, _, port = endpoint.rpartition(":")
    limits = limits if hosts else {}
    waiting = "waiting for the first node at"
    blocked = wait_for_port(host, int(port), timeout_s=timeout_s, limits=limits, waiting=waiting)
    if blocked is None:
        return

    if hosts is None or blocked.lasted_s < limits.get(blocked.reason, math.inf):
        raise PreflightError(
            f"the first node did not answer at {endpoint} within {timeout_s:g} s: {explained(blocked.reason)}",
            next_step="start the node with NODE_RANK 0 there, and open that port to this machine",
        )

    source, target = hosts
    if blocked.reason == Reason.UNKNOWN_NAME:
        raise PreflightError(
            f"the name {host} of the first host does not resolve on {source}",
            next_step=f"add {host} to DNS, or to /etc/hosts on {source}; or give an address in --hosts",
        )

    reason = explained_closed(blocked.reason)
    raise PreflightError(
        f"the rendezvous port {port} is closed from {source} to {target} ({reason})",
        next_step=OPEN_RENDEZVOUS.format(port=port, host=target),
    )


def _open_store(node: NodePlan, host: str, *, bound: str | None = None) -> dist.TCPStore:
    """`bound`: on the first node, the only address at which it listens."""
    timeout_s = max(STORE_TIMEOUT_S, 2 * node.silence_s)
    try:
        return open_tcp_store(host, node.master_port, timeout_s=timeout_s, bound=bound)
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PreflightError(
                f"the rendezvous port {node.master_port} of {socket.gethostname()} is in use",
                next_step="end the process that uses it (another job, or an earlier start of this one?), or choose "
                "another: --port, --master ADDRESS:PORT or MASTER_PORT",
            ) from error

        reason = str(error).strip().splitlines()[0]
        failed = PreflightError(
            f"no store could be opened at {node.endpoint}: {reason}",
            next_step="check what listens there: it must be the launcher of the node with NODE_RANK 0",
        )
        failed.lost_first_node = node.node_rank > 0
        raise failed from error


def address_of(node: NodePlan) -> str:
    """Where the other nodes reach this one."""
    return LOOPBACK if node.num_nodes == 1 else node.known_address or own_address(node.master_addr)
