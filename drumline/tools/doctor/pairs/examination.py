"""Checks every pair of hosts, in bounded time, whatever is closed or missing.

1. All hosts are started at once, and asked for their facts.
2. Names: what every host's name resolves to on every other.
3. Ports: every host listens, then every host tries every other at the same moment, so closed ports
   cost one limit.
4. Speed: in rounds, so that no host is in two transfers at a time.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from drumline.net.dial import Reason
from drumline.net.frames import read_field, read_list
from drumline.tools.doctor.pairs.coordinator import ANSWER_S, Coordinator
from drumline.tools.doctor.pairs.probe import TOKEN_BYTES
from drumline.tools.doctor.pairs.survey import OPEN, Pair, Survey

PROBE_S = 12.0
# Folders have 2 s on the host itself; with a slow volume it takes a little longer, and its facts
# are left out.
FACTS_S = 8.0
MEASURE_S = 8.0
# A host with containers may have dozens of bridges; the interfaces of gloo and NCCL come first.
MAX_OTHER_ADDRESSES = 4
DATA_PORTS = 2
# The time for all transfers, for any number of hosts; each is bounded too: below 20 ms TCP has not
# reached its speed.
SPEED_BUDGET_S = 6.0
SHORTEST_S = 0.02
LONGEST_S = 0.15
# A slow link is measured again: on a shared host a single short transfer may be slow by chance.
AGAIN_SHARE = 0.3
AGAIN_TIMES = 2
# The open ports of each host, by their kinds.
Ports = dict[int, dict[str, Any]]
WORST_FIRST = (Reason.NO_ANSWER, Reason.NO_ROUTE, Reason.REFUSED, Reason.WRONG_HOST, OPEN)


async def examine(hosts: Coordinator) -> None:
    started = time.monotonic()
    try:
        await hosts.start()
        facts = asyncio.create_task(_collect_facts(hosts))
        hosts.progress("every pair: names, then ports")
        await _resolve_names(hosts)
        choose_addresses(hosts.survey)
        ports = await _open_ports(hosts)
        await _probe_ports(hosts, ports)
        await facts
        await _measure_speed(hosts, ports)
        hosts.read_clocks()
    finally:
        hosts.survey.elapsed_s = time.monotonic() - started


async def _collect_facts(hosts: Coordinator) -> None:
    answers = await hosts.ask_all(
        "facts", FACTS_S, {number: {} for number in hosts.survey.present()}
    )
    for number, facts in answers.items():
        with hosts.reading_answer(number):
            hosts.survey.hosts[number].facts = read_field({"facts": facts}, "facts", dict)


# Names and addresses


async def _resolve_names(hosts: Coordinator) -> None:
    survey = hosts.survey
    present = hosts.survey.present()
    names = [survey.hosts[number].called for number in present]
    answers = await hosts.ask_all(
        "names", ANSWER_S, {number: {"names": names} for number in present}
    )
    for source, answer in answers.items():
        with hosts.reading_answer(source):
            for target in (number for number in present if number != source):
                edge = survey.edge(source, target)
                resolved = answer[survey.hosts[target].called]
                edge.addresses = resolved.get("addresses", [])
                edge.name_error = resolved.get("error")


def choose_addresses(survey: Survey) -> None:
    """What its name resolves to, if the host has that address; otherwise where ssh reached it;
    otherwise its first.

    Without ssh names are not used: the address from which it connected to node 0 is taken."""
    votes: dict[int, Counter[str]] = {number: Counter() for number in survey.present()}
    for (_, target), edge in survey.edges.items():
        if target in votes:
            votes[target].update((edge.addresses or [])[:1])
    for number, counted in votes.items():
        host = survey.hosts[number]
        if not survey.by_ssh and host.interface_of(host.address) is not None:
            continue
        reachable = host.reachable_addresses()
        preferred = [address for address, _ in counted.most_common()]
        nccl = host.nccl["address"] if host.nccl else None
        host.address = next(
            (
                address_choice
                for address_choice in (*preferred, host.address, nccl, *reachable)
                if address_choice in reachable
            ),
            None,
        )


def other_addresses(survey: Survey, number: int) -> list[str]:
    """Further addresses to listen on: a library may choose one, or only one of them may work."""
    host = survey.hosts[number]
    chosen = [interface["address"] for interface in (host.gloo, host.nccl) if interface]
    ranked = sorted(host.reachable_addresses(), key=lambda address: address not in chosen)
    return [address for address in ranked if address != host.address][:MAX_OTHER_ADDRESSES]


# Ports


async def _open_ports(hosts: Coordinator) -> Ports:
    survey = hosts.survey
    token = secrets.token_hex(TOKEN_BYTES)
    requests = {
        number: {
            "token": token,
            "node": number,
            "address": survey.hosts[number].address,
            "ports": DATA_PORTS,
            "others": other_addresses(survey, number),
            "rendezvous_port": survey.rendezvous_port if number == 0 and survey.by_ssh else None,
        }
        for number in survey.present()
    }
    ports: Ports = {}
    for number, opened in (await hosts.ask_all("listen", ANSWER_S, requests)).items():
        with hosts.reading_answer(number):
            survey.hosts[number].rendezvous_error = opened.get("rendezvous_error")
            read_list(opened, "data", int, DATA_PORTS)
            ports[number] = opened
    return ports


async def _probe_ports(hosts: Coordinator, ports: Ports) -> None:
    plans = {number: list(targets_of(hosts.survey, number, ports)) for number in ports}
    requests = {
        number: {"targets": [request for _, request in plan]} for number, plan in plans.items()
    }
    for source, results in (await hosts.ask_all("probe", PROBE_S, requests)).items():
        with hosts.reading_answer(source):
            for (kind, request), result in zip(plans[source], results, strict=True):
                edge = hosts.survey.edge(source, request["node"])
                outcome = result["outcome"]
                if kind == "rendezvous":
                    edge.rendezvous = outcome
                elif kind == "data":
                    edge.data = min(edge.data or OPEN, outcome, key=WORST_FIRST.index)
                    if "received" in result:
                        edge.received = result["received"]
                        edge.passes = result.get("passes")
                else:
                    edge.others = {**(edge.others or {}), kind: outcome}


def targets_of(survey: Survey, source: int, ports: Ports) -> Iterator[tuple[str, dict[str, Any]]]:
    """What one host tries: for each port its kind (`data`, `rendezvous`, or an address) and the
    request."""
    for target, opened in ports.items():
        if target == source:
            continue
        host = survey.hosts[target]
        for place, port in enumerate(opened["data"]):
            yield (
                "data",
                {"node": target, "address": host.address, "port": port, "large": place == 0},
            )
        for address, port in opened["others"].items():
            yield address, {"node": target, "address": address, "port": port}
        if "rendezvous_port" in opened:
            # At the address that the name resolves to there, as for a rank.
            named = survey.edge(source, target).addresses or [host.address or ""]
            yield (
                "rendezvous",
                {"node": target, "address": named[0], "port": opened["rendezvous_port"]},
            )


# Speed


async def _measure_speed(hosts: Coordinator, ports: Ports) -> None:
    survey = hosts.survey
    edges = {pair: survey.edge(*pair) for pair in survey.pairs()}
    links = [pair for pair, edge in edges.items() if edge.data == OPEN and not edge.has_hole]
    begun = time.monotonic()
    await _measure_in_rounds(hosts, ports, links, "speed")
    for _ in range(AGAIN_TIMES):
        # Links so slow that they took all the time are not measured again.
        if time.monotonic() - begun > SPEED_BUDGET_S:
            return
        limit = AGAIN_SHARE * survey.usual_speed()
        slow = [pair for pair in links if 0 < (edges[pair].bytes_per_s or 0) < limit]
        await _measure_in_rounds(hosts, ports, slow, "slow links again")


async def _measure_in_rounds(
    hosts: Coordinator, ports: Ports, links: Collection[Pair], title: str
) -> None:
    planned = rounds(len(hosts.survey.hosts), links)
    seconds = min(LONGEST_S, max(SHORTEST_S, SPEED_BUDGET_S / (2 * len(planned) or 1)))
    unmeasured = set(links)

    async def measure(source: int, target: int) -> None:
        sender = hosts.survey.hosts[source]
        receiver = hosts.survey.hosts[target]
        if sender.absent is None and receiver.absent is None:
            request = {
                "node": target,
                "address": receiver.address,
                "port": ports[target]["data"][0],
            }
            result = await hosts.ask(source, "measure", MEASURE_S, target=request, seconds=seconds)
            with hosts.reading_answer(source):
                # The best measurement: nothing makes a link look faster than it is.
                edge = hosts.survey.edge(source, target)
                result = result or {}
                edge.error = result.get("error")
                if "bytes_per_s" in result:
                    edge.bytes_per_s = max(edge.bytes_per_s or 0.0, result["bytes_per_s"])
                    edge.latency_s = min(edge.latency_s or result["latency_s"], result["latency_s"])

    async def measure_both_ways(pair: Pair) -> None:
        for way in (pair, pair[::-1]):  # one after the other: they share the line
            if way in unmeasured:
                await measure(*way)

    for place, pairs in enumerate(planned, start=1):
        hosts.progress(f"{title}: round {place} of {len(planned)}")
        await asyncio.gather(*map(measure_both_ways, pairs))


def rounds(count: int, links: Iterable[Pair]) -> list[list[Pair]]:
    """The pairs of these links, in rounds in which each of `count` hosts is in one pair at most.

    Two transfers at once on one host would halve each other. All pairs take `count` - 1 rounds
    (`count` when it is odd), which is the fewest possible."""
    linked = {(min(link), max(link)) for link in links}
    # The circle method: one host stays, the others move on by one place each round; opposite places
    # are pairs.
    seats = list(range(count + count % 2))
    planned = []
    for _ in range(len(seats) - 1):
        facing = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = ((min(ends), max(ends)) for ends in facing)
        planned.append([pair for pair in pairs if pair in linked])
        seats.insert(1, seats.pop())
    return [pairs for pairs in planned if pairs]
