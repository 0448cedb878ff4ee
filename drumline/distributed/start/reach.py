"""Between the roll call and the group, where there are several hosts: can each reach every other where data will go?

The first rank of each host opens a door on the network that the backend will use, and knocks at all others. It takes
milliseconds when all is well, seconds when a firewall drops what is sent, and not the start timeout.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from drumline.distributed.start.roll import Meeting
from drumline.distributed.start.ruling import follow, hear, rule
from drumline.distributed.start.ways import VARIABLES, ClosedWay, clocks_apart, judge
from drumline.errors import PreflightError
from drumline.launch.node.sealed_store import SealedStore
from drumline.launch.topology import Topology
from drumline.log import log
from drumline.net.dial import ProbeListener, ProbeTarget, probe_hosts
from drumline.net.interfaces import Interface, gloo_interface, interface_towards, interfaces, nccl_interface

REACH = "reach"


def check_ways(
    meeting: Meeting, topology: Topology, environment: Mapping[str, str], *, backend: str, deadline: float
) -> None:
    """Collective: raise the same on every rank if data cannot go between two hosts."""
    store, leaders = meeting.store, list(meeting.hosts)
    is_leader = topology.rank in leaders
    door = _open(store, topology, environment, backend) if is_leader else None
    try:
        if is_leader:
            _knock_at_others(store, topology, leaders, _left(deadline))
        if topology.rank > 0:
            follow(store, REACH, hear(store, REACH, deadline=deadline), listeners=())
            return
        ruling = rule(store, REACH, lambda: _judge(store, leaders, backend, _left(deadline)))
        for text in follow(store, REACH, ruling, listeners=range(1, topology.world_size)):
            log.warning(text)
    finally:
        if door is not None:
            door.close()


def chosen_interface(
    found: Sequence[Interface], environment: Mapping[str, str], backend: str
) -> Interface | None:
    return (nccl_interface if backend == "nccl" else gloo_interface)(found, environment)


def _open(
    store: SealedStore, topology: Topology, environment: Mapping[str, str], backend: str
) -> ProbeListener | None:
    """Open this host's door and say where it is; None where the backend has no network to use."""
    found = interfaces()
    chosen = chosen_interface(found, environment, backend)
    towards = interface_towards(found, topology.master_addr)
    fact: dict[str, Any] = {
        "host": topology.host,
        "told": environment.get(VARIABLES.get(backend, "")),
        "source": towards and towards.address,
        "networks": [one.name for one in found],
    }
    door = None
    with contextlib.suppress(
        OSError
    ):  # an address may be on its way out; the others must hear of it all the same
        if chosen is not None and chosen.address is not None:
            door = ProbeListener(chosen.address)
            mine = ProbeTarget(
                topology.rank, topology.host, chosen.name, chosen.address, door.port, door.token
            )
            fact["door"] = asdict(mine)
    store.set(f"door/{topology.rank}", json.dumps(fact))
    return door


def _knock_at_others(
    store: SealedStore, topology: Topology, leaders: Sequence[int], patience: timedelta
) -> None:
    facts = _read(store, "door", leaders, patience)
    others = [fact for rank, fact in facts.items() if rank != topology.rank]
    answers = probe_hosts([ProbeTarget(**fact["door"]) for fact in others if "door" in fact])
    # The network that leads to the meeting point is one that works; on its own host, the one that leads back.
    sources = [topology.master_addr, *(fact["source"] for fact in others if fact["source"])]
    wanted = next(filter(None, (interface_towards(interfaces(), source) for source in sources)), None)
    result = {"failed": answers.failed, "clocks": answers.clocks, "wanted": wanted and wanted.name}
    store.set(f"ways/{topology.rank}", json.dumps(result))


def _judge(store: SealedStore, leaders: Sequence[int], backend: str, patience: timedelta) -> list[str]:
    """On rank 0: the warnings."""
    facts, results = _read(store, "door", leaders, patience), _read(store, "ways", leaders, patience)
    wanted = {rank: result["wanted"] for rank, result in results.items()}
    _check_all_have_doors(facts, wanted, backend)
    doors = {rank: ProbeTarget(**fact["door"]) for rank, fact in facts.items()}
    closed = [
        ClosedWay(doors[caller], doors[int(rank)], cause)
        for caller, result in results.items()
        for rank, cause in result["failed"].items()
    ]
    judged = judge(closed, wanted, backend=backend)
    judged.raise_errors()
    hosts = {rank: fact["host"] for rank, fact in facts.items()}
    ahead = {int(rank): seconds for rank, seconds in results[0]["clocks"].items()}
    return [*judged.warnings, *clocks_apart(hosts, ahead)]


def _check_all_have_doors(
    facts: Mapping[int, dict[str, Any]], wanted: Mapping[int, str | None], backend: str
) -> None:
    for rank, fact in facts.items():
        if "door" not in fact:
            variable, networks = VARIABLES.get(backend, ""), ", ".join(fact["networks"])
            told = (
                f"{variable} is {fact['told']}, which fits"
                if fact["told"]
                else f"without {variable} it takes"
            )
            raise PreflightError(
                f"{fact['host']} has no network for {backend}: {told} none of {networks} that is up and has an address",
                next_step=f"export {variable}={wanted[rank] or 'NAME_OF_THE_NETWORK'} on {fact['host']}",
            )


def _read(
    store: SealedStore, kind: str, ranks: Sequence[int], patience: timedelta
) -> dict[int, dict[str, Any]]:
    keys = [f"{kind}/{rank}" for rank in ranks]
    store.wait(keys, patience)
    return {rank: json.loads(text) for rank, text in zip(ranks, store.multi_get(keys), strict=True)}


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))
