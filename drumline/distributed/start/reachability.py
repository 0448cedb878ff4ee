"""Whether each host can reach every other where data will go, tried before there is a group.

The store is one port on one host, and open. Data takes other ports, on the network that the backend chooses: where
those are closed, the group waits in silence. The first rank of each node listens on that network and probes all others:
milliseconds when all is well, seconds when a firewall drops packets, and not the start timeout.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from drumline.distributed.start.rank_rendezvous import Rendezvous
from drumline.distributed.start.rank_store import agree
from drumline.errors import PreflightError, as_list, log
from drumline.launch.topology import Topology
from drumline.net.dial import ProbeListener, ProbeTarget, explained_closed, probe_hosts
from drumline.net.interfaces import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    gloo_interface,
    interface_towards,
    interfaces,
    nccl_interface,
)
from drumline.net.sealed_store import SealedStore
from drumline.text import join_names

REACH = "reachability"
VARIABLES = {"gloo": GLOO_VARIABLE, "nccl": NCCL_VARIABLE}
MAX_LINES = 8
CLOCK_WARNING_S = 1.0


def check_reachability(
    rendezvous: Rendezvous, topology: Topology, environment: Mapping[str, str], *, backend: str, deadline: float
) -> None:
    """Collective: raise the same on every rank if data cannot go between two hosts."""
    store, firsts = rendezvous.store, [ranks[0] for ranks in rendezvous.nodes]
    listener = None
    try:
        if topology.rank in firsts:
            listener = _listen(store, topology, environment, backend)
            _probe_others(store, topology, firsts, _left(deadline))
        warnings = agree(
            store, topology, REACH, lambda: _examine(store, firsts, backend, _left(deadline)), deadline=deadline
        )
    finally:
        if listener is not None:
            listener.close()
    for text in warnings if topology.rank == 0 else ():
        log.warning(text)


def _listen(
    store: SealedStore, topology: Topology, environment: Mapping[str, str], backend: str
) -> ProbeListener | None:
    """Listen on this host, and publish where; None where the backend has no network to use."""
    found = interfaces()
    chosen = (nccl_interface if backend == "nccl" else gloo_interface)(found, environment)
    towards = interface_towards(found, topology.master_addr)
    fact: dict[str, Any] = {
        "host": topology.host,
        "named": environment.get(VARIABLES.get(backend, "")),
        "source": towards and towards.address,
        "networks": [one.name for one in found],
    }
    listener = None
    with contextlib.suppress(OSError):  # an address may just be removed; the others must know of it all the same
        if chosen is not None and chosen.address is not None:
            listener = ProbeListener(chosen.address)
            target = ProbeTarget(
                topology.rank, topology.host, chosen.name, chosen.address, listener.port, listener.token
            )
            fact["target"] = asdict(target)
    store.set(f"listener/{topology.rank}", json.dumps(fact))
    return listener


def _probe_others(store: SealedStore, topology: Topology, firsts: Sequence[int], timeout: timedelta) -> None:
    facts = _read(store, "listener", firsts, timeout)
    others = [fact for rank, fact in facts.items() if rank != topology.rank]
    results = probe_hosts([ProbeTarget(**fact["target"]) for fact in others if "target" in fact])
    # The network that leads to the store is one that works; on the store's own host, the one that leads back.
    sources = [topology.master_addr, *(fact["source"] for fact in others if fact["source"])]
    working = next(filter(None, (interface_towards(interfaces(), source) for source in sources)), None)
    found = {"failed": results.failed, "clocks": results.clocks, "working": working and working.name}
    store.set(f"probed/{topology.rank}", json.dumps(found))


def _examine(store: SealedStore, firsts: Sequence[int], backend: str, timeout: timedelta) -> list[str]:
    """On rank 0: the warnings."""
    facts, probed = _read(store, "listener", firsts, timeout), _read(store, "probed", firsts, timeout)
    working = {rank: result["working"] for rank, result in probed.items()}
    for rank, fact in facts.items():
        if "target" not in fact:
            raise _no_network(fact, working[rank], backend)
    targets = {rank: ProbeTarget(**fact["target"]) for rank, fact in facts.items()}
    closed = [
        ClosedPath(targets[source], targets[int(rank)], reason)
        for source, result in probed.items()
        for rank, reason in result["failed"].items()
    ]
    warnings = check_closed_paths(closed, working, backend=backend)
    hosts = {rank: fact["host"] for rank, fact in facts.items()}
    ahead = {int(rank): seconds for rank, seconds in probed[firsts[0]]["clocks"].items()}
    return [*warnings, *clock_warnings(hosts, ahead)]


def _no_network(fact: Mapping[str, Any], working: str | None, backend: str) -> PreflightError:
    variable, networks = VARIABLES.get(backend, ""), ", ".join(fact["networks"])
    why = f"{variable} is {fact['named']}, which fits" if fact["named"] else f"without {variable} it takes"
    return PreflightError(
        f"{fact['host']} has no network for {backend}: {why} none of {networks} that is up and has an address",
        next_step=f"export {variable}={working or 'NAME_OF_THE_NETWORK'} on {fact['host']}",
    )


def _read(store: SealedStore, kind: str, ranks: Sequence[int], timeout: timedelta) -> dict[int, dict[str, Any]]:
    keys = [f"{kind}/{rank}" for rank in ranks]
    store.wait(keys, timeout)
    return {rank: json.loads(text) for rank, text in zip(ranks, store.multi_get(keys), strict=True)}


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


# What a closed path means


@dataclass(frozen=True)
class ClosedPath:
    """One host could not reach another."""

    source: ProbeTarget
    target: ProbeTarget
    reason: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.target.address).is_loopback

    def is_needed(self, backend: str) -> bool:
        """gloo has the host with the larger address connect to the other one, and never the other way round."""
        if backend != "gloo":
            return True
        mine, theirs = map(ipaddress.ip_address, (self.source.address, self.target.address))
        return mine.version != theirs.version or int(mine) >= int(theirs)


def check_closed_paths(closed: Sequence[ClosedPath], working: Mapping[int, str | None], *, backend: str) -> list[str]:
    """Raise for paths that the backend needs; warnings about the others. `working`: the network of each host (by rank)
    that leads to the others, as far as it is known."""
    needed = [path for path in closed if path.is_needed(backend)]
    if lines := _lines(needed, working):
        more = [f"and {len(lines) - MAX_LINES} more of this kind"] if len(lines) > MAX_LINES else []
        shown = [*lines[:MAX_LINES], *more]
        what = shown[0] if len(shown) == 1 else as_list("data cannot go between these hosts:", shown)
        raise PreflightError(what, next_step="; ".join(_fixes(needed, working, backend)))
    return [f"{line}. {backend} does not need this path, as the addresses are now" for line in _lines(closed, working)]


def _lines(paths: Sequence[ClosedPath], working: Mapping[int, str | None]) -> list[str]:
    """One for each host that cannot be reached for one reason, with all who tried."""
    groups: dict[tuple[int, str], list[ClosedPath]] = {}
    for path in paths:
        groups.setdefault((path.target.rank, path.reason), []).append(path)
    return [_line(group, working) for group in groups.values()]


def _line(paths: Sequence[ClosedPath], working: Mapping[int, str | None]) -> str:
    target, who, why = paths[0].target, join_names([path.source.host for path in paths]), paths[0].reason
    where = f"{target.address} ({target.interface})"
    if paths[0].is_loopback:
        return f"{target.host} takes data on its loopback, {where}, where {who} cannot reach it"
    if _is_wrong_network(target, working):
        return (
            f"{target.host} takes data on the wrong network, {where}, where {who} cannot reach it: port {target.port}: "
            f"{explained_closed(why)}; {working[target.rank]} is the one that leads to the other hosts"
        )
    return f"{who} cannot reach {target.host}'s data port {target.port} at {where}: {explained_closed(why)}"


def _is_wrong_network(target: ProbeTarget, working: Mapping[int, str | None]) -> bool:
    return working.get(target.rank) not in (None, target.interface)


def _fixes(paths: Sequence[ClosedPath], working: Mapping[int, str | None], backend: str) -> list[str]:
    fixes: dict[str, dict[str, None]] = {}
    for path in paths:
        if path.is_loopback or _is_wrong_network(path.target, working):
            name = working.get(path.target.rank) or "NAME_OF_THE_NETWORK"
            fix = f"export {VARIABLES.get(backend, GLOO_VARIABLE)}={name} on"
        else:
            fix = "open all TCP ports between the nodes (in AWS: all traffic from the security group itself), on"
        fixes.setdefault(fix, {})[path.target.host] = None
    return [f"{fix} {join_names(hosts)}" for fix, hosts in fixes.items()]


def clock_warnings(hosts: Mapping[int, str], ahead: Mapping[int, float]) -> Iterator[str]:
    """`ahead`: by how many seconds each host's wall clock is ahead of that of the first host."""
    off = [
        f"{hosts[rank]} is {abs(seconds):,.1f} s {'ahead of' if seconds > 0 else 'behind'} {hosts[min(hosts)]}"
        for rank, seconds in sorted(ahead.items())
        if abs(seconds) >= CLOCK_WARNING_S
    ]
    if off:
        yield (
            f"wall clocks differ: {join_names(off)}. Drumline does not depend on them, but times in logs do, and plain "
            "torchrun loses nodes whose clocks differ by more than some seconds. Next: synchronize them by NTP "
            "(sudo chronyc makestep)"
        )
