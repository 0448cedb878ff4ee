"""The rendezvous of ranks: each publishes in the store who it is and what it is about to run, and
rank 0 compares it.

torchrun's own store outlives a restart, and what an earlier start left there looks like ranks that
are here. So rank 0 opens each rendezvous in a namespace of its own, and a rank believes it only
when its own name is on the list.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

import blake3

from drumline.base.errors import PreflightError
from drumline.base.job_secret import new_secret
from drumline.base.rank_environment import Topology
from drumline.base.text import named_ranks, number_ranges, print_message
from drumline.net.dial import FIRST_NOTICE_S, WaitNotice
from drumline.net.interfaces import outward_address
from drumline.net.key_exchange import KeyPair, unwrap_secret, wrap_secret
from drumline.rank.rendezvous.rank_store import Decision, announce, follow, outcome, value_of
from drumline.rank.sealed_store import SealedStore, check_secret, decoded
from drumline.watch.fact_differences import Facts, check_differences

FIRST_POLL_S = 0.01
LAST_POLL_S = 0.2

# what rank 0 finds at its deadline is better reported than what each other rank does at its own
DECISION_GRACE_S = 2.0
BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")
CURRENT = "rendezvous"
JOINED = "decision/joined"


class Opening(TypedDict):
    """What rank 0 publishes of a rendezvous."""

    namespace: str
    host: str


class Card(TypedDict):
    """What a rank publishes of itself."""

    name: str
    host: str
    machine: str
    """Of `this_machine`."""

    local_rank: int
    digest: str
    """Of what the rank is about to run."""

    public: str | None
    """Of its key pair, where no secret was given."""

    gpu: str | None
    address: str | None
    service: Decision
    """What the service of its node has returned, or its error."""


@dataclass(frozen=True)
class Rendezvous:
    """All ranks of one start."""

    store: SealedStore
    """The part of the store that is theirs alone."""

    nodes: Sequence[Sequence[int]]
    """The ranks of each node; the first of them acts for it."""

    hosts: Sequence[str]
    """The host of each node."""

    addresses: Sequence[str | None]
    """By which other nodes reach each one; None: it is the host of rank 0's store, or unknown."""

    services: Sequence[Mapping[str, Any]]
    """What the `NodeService` of each node returned; empty where there is none."""

    def node_of(self, rank: int) -> int:
        """The number of the node that has this rank."""
        return next(node for node, ranks in enumerate(self.nodes) if rank in ranks)


class NodeService(Protocol):
    """What else runs once on each node. All ranks get what it returns; its PreflightError is raised
    on every rank."""

    def prepare(self) -> Mapping[str, Any]:
        """On local rank 0, before the rendezvous."""

    def listen(self, rendezvous: Rendezvous) -> Mapping[str, Any]:
        """On the first rank of each of several nodes, after it: only then are their addresses
        known."""


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How one rank starts, and what it is about to run."""

    timeout_s: float
    began_at: float = field(default_factory=time.monotonic)
    facts: Facts = field(default_factory=dict)
    """What must be the same on all ranks (`rank_facts`)."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Names the network to use."""

    service: NodeService | None = None

    @property
    def deadline(self) -> float:
        """By the monotonic clock."""
        return self.began_at + self.timeout_s


def join_rendezvous(
    store: SealedStore,
    topology: Topology,
    options: StartOptions,
    *,
    gpu: str | None = None,
    check: Callable[[SealedStore], None] = lambda store: None,
) -> Rendezvous:
    """Collective: wait until every rank has joined, and compare what they are about to run.

    `gpu`: the one that this rank must have to itself. `check`: called often while it waits; what it
    raises ends that.
    """
    rank = _Joining(store, topology, options, gpu, check)
    if topology.rank == 0:
        decision = rank.lead()
        num_readers = len(decision["names"]) - 1
    else:
        decision = rank.follow_rank_0()
        num_readers = 0

    value = follow(rank.part, JOINED, decision, num_readers=num_readers)
    world_size = value.pop("world_size")
    if world_size != topology.world_size:
        raise PreflightError(
            f"the world size differs across ranks: {world_size} on rank 0, {topology.world_size} on rank "
            f"{topology.rank} on {topology.host}",
            next_step="start every node with the same number of nodes and ranks",
        )

    return Rendezvous(store=rank.sealed_part(decision), **value)


@dataclass(eq=False)
class _Joining:
    """What one rank does to join."""

    store: SealedStore
    topology: Topology
    options: StartOptions
    gpu: str | None
    check: Callable[[SealedStore], None]

    def __post_init__(self) -> None:
        options = self.options
        topology = self.topology
        self.facts = json.dumps(options.facts, sort_keys=True)
        self.name = secrets.token_hex(4)
        """Tells this process, in this start, from any other."""

        self.keys = KeyPair() if self.store.secret is None else None
        self.secret = self.store.secret or new_secret()
        """Under which ranks of this start believe each other; rank 0's, once it has sent it."""

        service = options.service if topology.local_rank == 0 else None

        self.card: Card = {
            "name": self.name,
            "host": topology.host,
            "machine": this_machine(),
            "local_rank": topology.local_rank,
            "digest": blake3.blake3(self.facts.encode()).hexdigest(16),
            "public": None if self.keys is None else self.keys.public,
            "gpu": self.gpu,
            "address": outward_address(options.environment, topology.master_addr),
            "service": outcome(service.prepare if service else dict, host=topology.host),
        }

        self.part = self.store
        self.namespace = ""
        """The part of the store that belongs to this rendezvous, once it is known."""

        self.notice = WaitNotice(first_s=min(FIRST_NOTICE_S, options.timeout_s / 4))
        self.pause_s = FIRST_POLL_S

    def lead(self) -> Decision:
        """On rank 0: open the rendezvous, wait for all, and decide."""
        opening: Opening = {"namespace": self.name, "host": self.topology.host}
        opened = json.dumps(opening)
        self.store.set(CURRENT, opened)
        self._enter(self.name)
        everyone = [f"card/{rank}" for rank in range(self.topology.world_size)]

        while not self.part.check(everyone) and time.monotonic() <= self.options.deadline:
            newest = decoded(Opening, self.store.compare_set(CURRENT, "", opened))
            if newest is not None and newest != opening:
                raise _duplicate(self.topology, newest["host"])

            self.check(self.store)
            self._wait()

        cards = self._cards()
        names = {rank: [card["name"], card["host"]] for rank, card in cards.items()}
        keys = None

        # no secret was given: each rank gets one for this start, wrapped
        if self.keys is not None:
            keys = wrap_secret(self.keys, self.secret, cards, self.namespace)

        return announce(self.part, JOINED, lambda: self._decide(cards), names=names, keys=keys)

    def follow_rank_0(self) -> Decision:
        """On the other ranks: enter whatever rendezvous is the current one, until one has this rank
        on its list."""
        listed_name = None
        while True:
            self.check(self.store)
            decision = self._announced()
            if decision is not None:
                listed_name, host = decision["names"].get(str(self.topology.rank), (None, ""))
                is_for_fewer = listed_name is None and "what" not in decision
                if listed_name == self.name or is_for_fewer:
                    return decision

            check_secret(self.store, "rank 0")
            grace_s = DECISION_GRACE_S if self.namespace else 0
            if time.monotonic() > self.options.deadline + grace_s:
                if listed_name:
                    raise _duplicate(self.topology, host)
                raise too_late(self.topology, self._hosts(), timeout_s=self.options.timeout_s)

            self._wait()

    def _announced(self) -> Decision | None:
        """What rank 0 has announced in the current rendezvous, which this rank enters."""
        current = decoded(Opening, self.store.peek(CURRENT))
        if current is None:
            return None

        self._enter(current["namespace"])
        return decoded(Decision, self.part.peek(JOINED))

    def sealed_part(self, decision: Decision) -> SealedStore:
        """The part of the store, in which from now on only ranks of this start are believed."""
        if self.keys is None:
            return self.part

        rank = self.topology.rank
        if rank > 0:
            who = f"rank {rank} on {self.topology.host}"
            self.secret = unwrap_secret(self.keys, decision["keys"], rank, self.namespace, who=who)

        return self.part.resealed(self.secret)

    def _enter(self, namespace: str) -> None:
        """Publish what this rank is and runs in that part of the store, unless it is there."""
        if namespace == self.namespace:
            return

        self.part = self.store.under(namespace)
        self.namespace = namespace
        self.part.set(f"facts/{self.topology.rank}", self.facts)
        self.part.set(f"card/{self.topology.rank}", json.dumps(self.card))

    def _decide(self, cards: Mapping[int, Card]) -> dict[str, Any]:
        """On rank 0: the nodes of this start; raises what is wrong with it."""
        ranks = range(self.topology.world_size)
        if len(cards) < len(ranks):
            hosts = {rank: card["host"] for rank, card in cards.items()}
            raise too_late(self.topology, hosts, timeout_s=self.options.timeout_s)

        if any(card["digest"] != cards[0]["digest"] for card in cards.values()):
            texts = self.part.multi_get([f"facts/{rank}" for rank in ranks])
            facts = [decoded(dict[str, Any], text) or {} for text in texts]
            check_differences(facts, [cards[rank]["host"] for rank in ranks])

        _refuse_shared_gpus(cards)
        nodes = group_by_node(cards)
        firsts = [cards[node[0]] for node in nodes]

        return {
            "world_size": len(ranks),
            "nodes": nodes,
            "hosts": [card["host"] for card in firsts],
            "addresses": [card["address"] for card in firsts],
            "services": [value_of(card["service"]) for card in firsts],
        }

    def _cards(self) -> dict[int, Card]:
        """What each rank that has joined published."""
        ranks = range(self.topology.world_size)
        cards = {rank: decoded(Card, self.part.peek(f"card/{rank}")) for rank in ranks}
        return {rank: card for rank, card in cards.items() if card is not None}

    def _wait(self) -> None:
        """Sleep until the next look, and report the wait when a notice is due."""
        if self.notice.is_due():
            hosts = self._hosts()
            text = waiting_for(self.topology, hosts)

            # Once on each host, and after that from one rank alone.
            is_first_notice = self.topology.local_rank == 0 and self.notice.count == 1
            if text and (is_first_notice or self.topology.rank == min(hosts, default=1)):
                print_message(
                    f"{text} ({self.notice.waited_s:.0f} s of {self.options.timeout_s:g} s)"
                )

        time.sleep(self.pause_s)
        self.pause_s = min(LAST_POLL_S, self.pause_s * 1.3)

    def _hosts(self) -> dict[int, str]:
        """The host of each rank that has joined; of none while there is no rendezvous."""
        if not self.namespace:
            return {}
        return {rank: card["host"] for rank, card in self._cards().items()}


def _refuse_shared_gpus(cards: Mapping[int, Card]) -> None:
    """Two ranks on one GPU would wait for each other in NCCL."""
    first_users: dict[str, int] = {}
    for rank, card in cards.items():
        gpu = card["gpu"]
        if not gpu:
            continue

        first_user = first_users.setdefault(gpu, rank)
        if first_user != rank:
            raise PreflightError(
                f"ranks {first_user} and {rank} on {card['host']} would compute on one GPU, {gpu}",
                next_step="start at most as many ranks on a host as it has GPUs; with srun, give each task its own "
                "(--gpus-per-task=1) or all of them (--gpus-per-node); or use --dist.device cpu",
            )


def _duplicate(topology: Topology, host: str) -> PreflightError:
    """Another process has this rank, too."""
    return PreflightError(
        f"there are two ranks {topology.rank}: one on {host}, and this one on {topology.host}",
        next_step="give every node its own --node-rank (NODE_RANK), and every rank its own RANK; stop what is left of "
        "an earlier start",
    )


# Who is missing. `hosts`: of the ranks that have joined.


def waiting_for(topology: Topology, hosts: Mapping[int, str]) -> str:
    """What a rank reports while it waits; empty when all are here."""
    missing = _missing(hosts, topology)
    if not missing:
        return ""
    who = f"rank {topology.rank} on {topology.host}"
    return f"{who} waits for {_named(missing, hosts, topology)}"


def too_late(topology: Topology, hosts: Mapping[int, str], *, timeout_s: float) -> PreflightError:
    """The start timeout is over, and only these ranks are here."""
    if not hosts:
        return PreflightError(
            f"{_named([0], {}, topology)}, which opens the rendezvous, did not start within {timeout_s:g} s",
            next_step="look at rank 0's own output; raise --dist.start_timeout_s if it is only slow",
        )

    missing = _missing(hosts, topology)
    by_host = defaultdict(list)
    for rank, host in hosts.items():
        by_host[host].append(rank)

    here = ", ".join(f"{number_ranges(ranks)} on {host}" for host, ranks in by_host.items())
    return PreflightError(
        f"{len(missing)} of {topology.world_size} ranks did not start within {timeout_s:g} s: "
        f"missing {_named(missing, hosts, topology)}; here: {here}",
        next_step="look at the missing ranks' own output; raise --dist.start_timeout_s if they are only slow",
    )


def _missing(hosts: Mapping[int, str], topology: Topology) -> list[int]:
    """The ranks that have not joined; while rank 0 has not, nobody knows of the others."""
    if not hosts:
        return [0]
    return [rank for rank in range(topology.world_size) if rank not in hosts]


def _named(missing: list[int], hosts: Mapping[int, str], topology: Topology) -> str:
    """`rank 3 (node-a), ranks 4-7 (node 1)`: by node, where all have as many ranks as this one."""
    size = topology.local_world_size
    if topology.world_size % size or size == topology.world_size:
        return named_ranks(missing)

    names = {rank // size: host for rank, host in hosts.items()}
    names |= enumerate(topology.node_names)
    by_node = defaultdict(list)
    for rank in missing:
        by_node[rank // size].append(rank)

    return ", ".join(
        f"{named_ranks(ranks)} ({names.get(node, f'node {node}')})"
        for node, ranks in by_node.items()
    )


# Which ranks share a node. A host's name alone does not show that: containers on two machines may
# have the same one, and two launchers on one machine do.


def this_machine() -> str:
    """The same for two processes if they see each other in /proc."""
    try:
        return f"{BOOT.read_text(encoding='utf-8').strip()}/{PROCESSES.stat().st_ino}"
    except OSError:  # not Linux, or hidden: then the host's name must do
        return ""


def group_by_node(cards: Mapping[int, Card]) -> list[tuple[int, ...]]:
    """The ranks of each node, that with the lowest local rank first. Nodes are in the order of
    their lowest ranks."""
    local_ranks = {rank: card["local_rank"] for rank, card in cards.items()}

    # torchrun numbers a node's ranks consecutively; srun may distribute them round robin, and then
    # a machine is one node.
    first_ranks = {rank: rank - local_rank for rank, local_rank in local_ranks.items()}
    are_consecutive = all(local_ranks.get(first) == 0 for first in first_ranks.values())

    nodes = defaultdict(list)
    for rank, card in sorted(cards.items()):
        launcher = first_ranks[rank] if are_consecutive else 0
        nodes[card["host"], card["machine"], launcher].append(rank)

    return [tuple(sorted(ranks, key=local_ranks.__getitem__)) for ranks in nodes.values()]
