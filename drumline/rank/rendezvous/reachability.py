"""Whether each host can reach every other where data will go, tried before there is a group.

The store is one port on one host, and open. Data takes other ports, on the network that the backend
chooses: where those are closed, the group would wait without a message. The first rank of each node
listens on that network and probes all others: milliseconds when all is well, seconds when a
firewall drops packets, and not the start timeout. Launchers of nodes do the same before they start
ranks: those of a script would wait for each other until torch times out.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypedDict

from drumline.base.errors import PreflightError, as_list
from drumline.base.rank_environment import Topology
from drumline.base.text import join_names, print_message
from drumline.net.dial import ProbeListener, ProbeTarget, Reason, explained_closed, probe_hosts
from drumline.net.interfaces import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    gloo_interface,
    interface_towards,
    interfaces,
    nccl_interface,
)
from drumline.rank.rendezvous.rank_rendezvous import Rendezvous, StartOptions
from drumline.rank.rendezvous.rank_store import agree, outcome, value_of

VARIABLES = {"gloo": GLOO_VARIABLE, "nccl": NCCL_VARIABLE}
UNKNOWN_NETWORK = "NAME_OF_THE_NETWORK"
MAX_LINES = 8

# A late or unexpected reply does not show that the port is closed.
CLOSED = (Reason.NO_ANSWER, Reason.REFUSED, Reason.NO_ROUTE)


class ProbeCard(TypedDict):
    """Where a launcher listens for probes; port 0: nowhere."""

    probe_port: int
    probe_token: str


class NodeCard(ProbeCard):
    """What a launcher publishes of its node."""

    rank: int
    host: str
    address: str
    port: int
    public: str
    nonce: str
    watch_port: int
    restarts: int
    counted_step: int
    reached_step: int


def check_reachability(
    rendezvous: Rendezvous,
    topology: Topology,
    options: StartOptions,
    *,
    backend: str,
) -> Rendezvous:
    """Collective: raise the same on every rank if data cannot go between two hosts. Returns the
    rendezvous with what the service of each node returns when it listens."""
    check = _ReachabilityCheck(rendezvous, topology, options, backend)
    listener = None
    try:
        if topology.rank in check.firsts:
            listener = check.listen()
            check.probe_others()
        services = agree(
            rendezvous.store,
            topology,
            "decision/reachability",
            check.examine,
            deadline=options.deadline,
        )
    finally:
        if listener is not None:
            listener.close()

    pairs = zip(rendezvous.services, services, strict=True)
    return replace(
        rendezvous, services=tuple({**prepared, **listening} for prepared, listening in pairs)
    )


@dataclass
class _ReachabilityCheck:
    """The part of one rank."""

    rendezvous: Rendezvous
    topology: Topology
    options: StartOptions
    backend: str

    def __post_init__(self) -> None:
        self.firsts = [ranks[0] for ranks in self.rendezvous.nodes]

    def listen(self) -> ProbeListener | None:
        """Listen on this host, and publish where; None where the backend has no network to use."""
        topology = self.topology
        environment = self.options.environment
        networks = interfaces()
        choose_interface = nccl_interface if self.backend == "nccl" else gloo_interface
        chosen = choose_interface(networks, environment)
        towards = interface_towards(networks, topology.master_addr)
        service = outcome(self._start_service, host=topology.host)

        fact: dict[str, Any] = {
            "host": topology.host,
            "named": environment.get(VARIABLES.get(self.backend, "")),
            "source": towards and towards.address,
            "networks": [interface.name for interface in networks],
            "service": service,
        }
        listener = None

        # An address may just be removed; the others must know of it all the same.
        with contextlib.suppress(OSError):
            if chosen is not None and chosen.address is not None:
                listener = ProbeListener(chosen.address)
                fact["target"] = {
                    "rank": topology.rank,
                    "host": topology.host,
                    "interface": chosen.name,
                    "address": chosen.address,
                    "port": listener.port,
                    "token": listener.token,
                }

        self.rendezvous.store.set(f"listener/{topology.rank}", json.dumps(fact))
        return listener

    def _start_service(self) -> Mapping[str, Any]:
        """What the others need to know of what else runs on this node."""
        service = self.options.service
        return service.listen(self.rendezvous) if service else {}

    def probe_others(self) -> None:
        """Publish which hosts this one cannot reach, and which of its networks works."""
        facts = self._read("listener")
        peers = [fact for rank, fact in facts.items() if rank != self.topology.rank]
        failed = probe_hosts([ProbeTarget(**fact["target"]) for fact in peers if "target" in fact])

        # The network that leads to the store is one that works; on the store's own host, the one
        # that leads back.
        sources = [self.topology.master_addr, *(fact["source"] for fact in peers)]
        leading = (interface_towards(interfaces(), source) for source in filter(None, sources))
        working = next(filter(None, leading), None)

        result = {"failed": failed, "working": working and working.name}
        self.rendezvous.store.set(f"probed/{self.topology.rank}", json.dumps(result))

    def examine(self) -> list[Any]:
        """On rank 0: raise for closed paths. Returns what the services of all nodes returned."""
        facts = self._read("listener")
        probed = self._read("probed")
        for rank, fact in facts.items():
            if "target" not in fact:
                raise _no_network(fact, probed[rank]["working"], self.backend)

        targets = {rank: ProbeTarget(**fact["target"]) for rank, fact in facts.items()}
        closed = [
            ClosedPath(targets[source], targets[int(rank)], reason, probed[int(rank)]["working"])
            for source, result in probed.items()
            for rank, reason in result["failed"].items()
        ]

        refuse_closed_paths(closed, backend=self.backend)
        return [value_of(fact["service"]) for fact in facts.values()]

    def _read(self, kind: str) -> dict[int, dict[str, Any]]:
        """What the first rank of each node has published, by rank."""
        store = self.rendezvous.store
        keys = [f"{kind}/{rank}" for rank in self.firsts]
        store.wait(keys, timedelta(seconds=max(1.0, self.options.deadline - time.monotonic())))
        texts = store.multi_get(keys)

        return {rank: json.loads(text) for rank, text in zip(self.firsts, texts, strict=True)}


def _no_network(fact: Mapping[str, Any], working: str | None, backend: str) -> PreflightError:
    """The variable of the backend names no network of this host."""
    variable = VARIABLES.get(backend, "")
    networks = ", ".join(fact["networks"])
    return PreflightError(
        f"{fact['host']} has no network for {backend}: {variable} is {fact['named'] or 'not set'}, and fits none of "
        f"{networks} that is up and has an address",
        next_step=f"export {variable}={working or UNKNOWN_NETWORK} on {fact['host']}",
    )


# What a closed path means


@dataclass(frozen=True)
class ClosedPath:
    """One host could not reach another."""

    source: ProbeTarget
    target: ProbeTarget
    reason: str
    working: str | None = None
    """The network of the target that leads to the other hosts, as far as it is known."""

    @property
    def is_wrong_network(self) -> bool:
        """Whether the target listens on one that leads to no other host."""
        is_loopback = self.target.address.startswith("127.") or self.target.address == "::1"
        return is_loopback or self.working not in (None, self.target.interface)


def refuse_closed_paths(paths: Sequence[ClosedPath], *, backend: str) -> None:
    """Raise if there is one."""
    lines = closed_lines(paths)
    if not lines:
        return

    what = lines[0]
    if len(lines) > 1:
        num_left_out = len(lines) - MAX_LINES
        if num_left_out > 0:
            lines[MAX_LINES:] = [f"and {num_left_out} more of this kind"]
        what = as_list("data cannot go between these hosts:", lines)

    raise PreflightError(what, next_step="; ".join(_fixes(paths, backend)))


def closed_lines(paths: Sequence[ClosedPath]) -> list[str]:
    """One for each host that cannot be reached for one reason, with all who tried."""
    groups = defaultdict(list)
    for path in paths:
        groups[path.target.rank, path.reason].append(path)
    return [
        _line(group[0], join_names([path.source.host for path in group]))
        for group in groups.values()
    ]


def _line(path: ClosedPath, who: str) -> str:
    """One closed path in a sentence; `who` tried it."""
    target = path.target
    why = explained_closed(path.reason)
    where = f"{target.address} ({target.interface})" if target.interface else target.address

    if path.is_wrong_network:
        if path.working:
            why += f"; {path.working} is the one that leads to the other hosts"
        return (
            f"{target.host} takes data on the wrong network, {where}, where {who} cannot reach it: port {target.port}: "
            f"{why}"
        )

    return f"{who} cannot reach {target.host}'s data port {target.port} at {where}: {why}"


def _fixes(paths: Sequence[ClosedPath], backend: str) -> list[str]:
    """What to do, each with the hosts where it is to be done."""
    hosts: dict[str, dict[str, None]] = defaultdict(dict)
    for path in paths:
        if path.is_wrong_network:
            fix = f"export {VARIABLES.get(backend, GLOO_VARIABLE)}={path.working or UNKNOWN_NETWORK} on"
        else:
            fix = "open all TCP ports between the nodes (in AWS: all traffic from the security group itself), on"
        hosts[fix][path.target.host] = None

    return [f"{fix} {join_names(names)}" for fix, names in hosts.items()]


# The same between the launchers of nodes


@contextlib.contextmanager
def open_probe_port(address: str) -> Iterator[ProbeCard]:
    """Listen where the ranks' store will be. Yields what the others need to connect; without a port
    if that fails."""
    try:
        listener = ProbeListener(address)
    except OSError:
        yield {"probe_port": 0, "probe_token": ""}
    else:
        with contextlib.closing(listener):
            yield {"probe_port": listener.port, "probe_token": listener.token}


def unreachable_nodes(cards: Mapping[int, NodeCard], this_node: int) -> dict[int, str]:
    """Why this node cannot reach others, by their ranks."""
    peers = [card for rank, card in cards.items() if rank != this_node]
    failed = probe_hosts([_target(card) for card in peers if card["probe_port"]])
    return {rank: why for rank, why in failed.items() if why in CLOSED}


def check_data_ports(
    cards: Mapping[int, NodeCard], unreachable: Mapping[int, Mapping[str, str]]
) -> None:
    """Raise if a node cannot reach the first, which has the ranks' store; otherwise warn.
    `unreachable`: by node."""
    targets = {rank: _target(card) for rank, card in cards.items()}
    paths = [
        ClosedPath(targets[source], targets[rank], reasons[str(rank)])
        for source, reasons in unreachable.items()
        for rank in targets
        if str(rank) in reasons
    ]

    first = min(cards)
    refuse_closed_paths([path for path in paths if path.target.rank == first], backend="")
    for line in closed_lines(paths):
        print_message(f"warning: {line}; ranks that send data there will block")


def _target(card: NodeCard) -> ProbeTarget:
    """Where the launcher of a node listens."""
    return ProbeTarget(
        card["rank"], card["host"], "", card["address"], card["probe_port"], card["probe_token"]
    )
