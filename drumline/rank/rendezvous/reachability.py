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
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

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
from drumline.rank.rendezvous.rank_rendezvous import NodeService, Rendezvous
from drumline.rank.rendezvous.rank_store import Decision, agree, outcome, value_of
from drumline.rank.sealed_store import SealedStore

VARIABLES = {"gloo": GLOO_VARIABLE, "nccl": NCCL_VARIABLE}
UNKNOWN_NETWORK = "NAME_OF_THE_NETWORK"
MAX_LINES = 8
# A late or unexpected reply does not show that the port is closed.
CLOSED = (Reason.NO_ANSWER, Reason.REFUSED, Reason.NO_ROUTE)

NodeCard = Mapping[str, Any]
"""What a launcher publishes of its node."""


def check_reachability(
    rendezvous: Rendezvous,
    topology: Topology,
    environment: Mapping[str, str],
    *,
    backend: str,
    deadline: float,
    service: NodeService | None = None,
) -> Rendezvous:
    """Collective: raise the same on every rank if data cannot go between two hosts. Returns the
    rendezvous with what the service of each node returns when it listens."""
    store = rendezvous.store
    firsts = [ranks[0] for ranks in rendezvous.nodes]
    with contextlib.ExitStack() as on_exit:
        if topology.rank in firsts:
            served = outcome(
                lambda: service.listen(rendezvous) if service else {}, host=topology.host
            )
            if listener := _listen(store, topology, environment, backend, served):
                on_exit.callback(listener.close)
            _probe_others(store, topology, firsts, deadline)
        services = agree(
            store,
            topology,
            "decision/reachability",
            lambda: _examine(store, firsts, backend, deadline),
            deadline=deadline,
        )
    pairs = zip(rendezvous.services, services, strict=True)
    return replace(
        rendezvous, services=tuple({**prepared, **listening} for prepared, listening in pairs)
    )


def _listen(
    store: SealedStore,
    topology: Topology,
    environment: Mapping[str, str],
    backend: str,
    served: Decision,
) -> ProbeListener | None:
    """Listen on this host, and publish where; None where the backend has no network to use."""
    networks = interfaces()
    choose_interface = nccl_interface if backend == "nccl" else gloo_interface
    chosen = choose_interface(networks, environment)
    towards = interface_towards(networks, topology.master_addr)
    fact: dict[str, Any] = {
        "host": topology.host,
        "named": environment.get(VARIABLES.get(backend, "")),
        "source": towards and towards.address,
        "networks": [interface.name for interface in networks],
        "service": served,
    }
    listener = None
    # An address may just be removed; the others must know of it all the same.
    with contextlib.suppress(OSError):
        if chosen is not None and chosen.address is not None:
            listener = ProbeListener(chosen.address)
            target = ProbeTarget(
                topology.rank,
                topology.host,
                chosen.name,
                chosen.address,
                listener.port,
                listener.token,
            )
            fact["target"] = asdict(target)
    store.set(f"listener/{topology.rank}", json.dumps(fact))
    return listener


def _probe_others(
    store: SealedStore, topology: Topology, firsts: Sequence[int], deadline: float
) -> None:
    facts = _read(store, "listener", firsts, deadline)
    peers = [fact for rank, fact in facts.items() if rank != topology.rank]
    failed = probe_hosts([ProbeTarget(**fact["target"]) for fact in peers if "target" in fact])
    # The network that leads to the store is one that works; on the store's own host, the one that
    # leads back.
    sources = [topology.master_addr, *(fact["source"] for fact in peers if fact["source"])]
    leading = (interface_towards(interfaces(), source) for source in sources)
    working = next(filter(None, leading), None)
    results_of_rank = {"failed": failed, "working": working and working.name}
    store.set(f"probed/{topology.rank}", json.dumps(results_of_rank))


def _examine(store: SealedStore, firsts: Sequence[int], backend: str, deadline: float) -> list[Any]:
    """On rank 0: raise for closed paths. Returns what the services of all nodes returned."""
    facts = _read(store, "listener", firsts, deadline)
    probed = _read(store, "probed", firsts, deadline)
    for rank, fact in facts.items():
        if "target" not in fact:
            raise _no_network(fact, probed[rank]["working"], backend)
    targets = {rank: ProbeTarget(**fact["target"]) for rank, fact in facts.items()}
    closed = [
        ClosedPath(targets[source], targets[int(rank)], reason, probed[int(rank)]["working"])
        for source, result in probed.items()
        for rank, reason in result["failed"].items()
    ]
    refuse_closed_paths(closed, backend=backend)
    return [value_of(fact["service"]) for fact in facts.values()]


def _no_network(fact: Mapping[str, Any], working: str | None, backend: str) -> PreflightError:
    variable = VARIABLES.get(backend, "")
    networks = ", ".join(fact["networks"])
    return PreflightError(
        f"{fact['host']} has no network for {backend}: {variable} is {fact['named'] or 'not set'}, and fits none of "
        f"{networks} that is up and has an address",
        next_step=f"export {variable}={working or UNKNOWN_NETWORK} on {fact['host']}",
    )


def _read(
    store: SealedStore, kind: str, ranks: Sequence[int], deadline: float
) -> dict[int, dict[str, Any]]:
    keys = [f"{kind}/{rank}" for rank in ranks]
    store.wait(keys, timedelta(seconds=max(1.0, deadline - time.monotonic())))
    return {rank: json.loads(text) for rank, text in zip(ranks, store.multi_get(keys), strict=True)}


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
        is_loopback = self.target.address.startswith("127.") or self.target.address == "::1"
        return is_loopback or self.working not in (None, self.target.interface)


def refuse_closed_paths(paths: Sequence[ClosedPath], *, backend: str) -> None:
    """Raise if there is one."""
    lines = closed_lines(paths)
    if lines:
        shown = lines[:MAX_LINES]
        if len(lines) > MAX_LINES:
            shown.append(f"and {len(lines) - MAX_LINES} more of this kind")
        what = shown[0]
        if len(shown) > 1:
            what = as_list("data cannot go between these hosts:", shown)
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
    target = path.target
    why = explained_closed(path.reason)
    where = f"{target.address} ({target.interface})" if target.interface else target.address
    if path.is_wrong_network:
        hint = f"; {path.working} is the one that leads to the other hosts" if path.working else ""
        return (
            f"{target.host} takes data on the wrong network, {where}, where {who} cannot reach it: port {target.port}: "
            f"{why}{hint}"
        )
    return f"{who} cannot reach {target.host}'s data port {target.port} at {where}: {why}"


def _fixes(paths: Sequence[ClosedPath], backend: str) -> list[str]:
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
def open_probe_port(address: str) -> Iterator[dict[str, Any]]:
    """Listen where the ranks' store will be. Yields what the others need to connect; without a port
    if that fails."""
    try:
        listener = ProbeListener(address)
    except OSError:
        yield {"probe_port": 0, "probe_token": ""}
        return
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
    return ProbeTarget(
        card["rank"], card["host"], "", card["address"], card["probe_port"], card["probe_token"]
    )
