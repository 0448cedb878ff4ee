"""Findings about every pair of hosts: one per cause, with the host or the pair, and the fix.

One cause affects many links. If all links into a host, or out of it, are affected, that is reported
once, for that host; only the rest is reported pair by pair:

problem: b: data ports closed from every other host (no answer); the other direction is open
problem: a -> c: large messages from a never arrive, though small ones do: an MTU black hole ...
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from drumline.base.text import bit_rate, join_names
from drumline.net.dial import OPEN_DATA, OPEN_RENDEZVOUS, explained_closed
from drumline.net.interfaces import GLOO_VARIABLE, NCCL_VARIABLE
from drumline.tools.doctor.finding import Finding, Level, VariableFix
from drumline.tools.doctor.pairs.probe import LARGE_BYTES
from drumline.tools.doctor.pairs.survey import OPEN, Edge, HostRecord, Pair, Survey

# What tunnels leave of the usual 1500 bytes; used when no packet size was seen to pass.
USUAL_TUNNEL_MTU = 1400
# A link at a tenth of the others' speed (1 Gbit/s negotiated instead of 10) must be found; other
# traffic on a shared line takes half, seldom two thirds. A measurement is repeated before it
# counts.
SLOW_SHARE = 0.25
# Log lines of hosts whose clocks differ by this much appear in the wrong order.
CLOCK_WARNING_S = 1.0
# Signed requests to storage are refused after minutes, and files of a shared volume seem to be from
# the future.
CLOCK_PROBLEM_S = 60.0


def pair_findings(survey: Survey) -> list[Finding]:
    """All that is wrong between hosts."""
    return [
        *_absent_hosts(survey),
        *_names(survey),
        *_rendezvous_port(survey),
        *_data_ports(survey),
        *_interfaces(survey),
        *_black_holes(survey),
        *_slow_links(survey),
        *_clocks(survey),
    ]


# Links with one cause


@dataclass(frozen=True)
class LinkGroup:
    """Bad links with one cause."""

    host: int
    """The one that they lead to, or that all come from."""
    pairs: list[Pair]
    where: str
    """`b`, `a -> b` or `a <-> b`."""
    phrase: str
    """`from every other host`, `from a and c`, `to every other host`, `both ways`."""


def group_links(
    survey: Survey,
    bad: Collection[Pair],
    among: Iterable[Pair] | None = None,
) -> Iterator[LinkGroup]:
    """Bad links, grouped by what they have in common: of three hosts, a -> c and b -> c are `from every
    other host` to c.

    `among`: the links that were tried; None: all."""
    names = [host.name for host in survey.hosts]
    present = survey.present()
    if len(present) == 2 and len(bad) == 2:
        first, second = present
        where = f"{names[first]} <-> {names[second]}"
        yield LinkGroup(second, sorted(bad), where, "both ways")
        return

    into = _by_end(bad, 1)
    out = _by_end(bad, 0)
    tried = [*(survey.pairs() if among is None else among)]
    num_into = Counter(target for _, target in tried)

    num_out = Counter(source for source, _ in tried)
    rest = set(bad)
    for number, pairs in into.items():
        if len(pairs) == num_into[number] > 1:
            rest.difference_update(pairs)
            # If nothing gets out either, that has the same cause.
            if len(out.get(number, [])) == num_out[number]:
                rest.difference_update(out[number])

            yield LinkGroup(number, pairs, names[number], "from every other host")

    for number, pairs in out.items():
        is_cut_off = len(pairs) == num_out[number] > 1
        unexplained = [pair for pair in pairs if pair in rest]
        if is_cut_off and len(unexplained) > 1:
            rest.difference_update(unexplained)
            yield LinkGroup(number, unexplained, names[number], "to every other host")

    for target, pairs in _by_end(rest, 1).items():
        sources = join_names(names[source] for source, _ in pairs)
        yield LinkGroup(target, pairs, f"{sources} -> {names[target]}", f"from {sources}")


def _by_end(pairs: Iterable[Pair], end: int) -> dict[int, list[Pair]]:
    """By the source (0) or the target (1), sorted."""
    ordered: dict[int, list[Pair]] = defaultdict(list)
    for pair in sorted(pairs, key=lambda pair: (pair[end], pair[1 - end])):
        ordered[pair[end]].append(pair)

    return ordered


# Hosts and names


def _absent_hosts(survey: Survey) -> Iterator[Finding]:
    """Hosts that do not answer, and requests that failed on one: `it did not answer within 8 s`."""
    for host in survey.hosts:
        if host.absent is not None:
            yield Finding("problem", "host", host.name, host.absent, host.absent_fix)
        for error in host.errors:
            what = f"a check failed there: {error}"
            fix = "fix that on the host; what depends on it was not checked"
            yield Finding("problem", "host", host.name, what, fix)


def _names(survey: Survey) -> Iterator[Finding]:
    """Names that do not resolve, or to another host. By the host that is looked up; without ssh, where
    addresses are used, these are only notes.

    problem: a -> b: b does not resolve on a (Name or service not known)
    problem: a -> c: c resolves to 10.0.9.9 on a, which is not an address of c
    """
    level: Level = "problem" if survey.by_ssh else "note"

    unresolved = survey.links(lambda edge: edge.addresses == [])
    for group in group_links(survey, unresolved):
        sources = _sources(survey, group)
        called = sorted({survey.hosts[target].called for _, target in group.pairs})
        verb = "do" if len(called) > 1 else "does"
        first = group.pairs[0]
        error = survey.edges[first].name_error
        target = survey.hosts[first[1]]
        what = f"{join_names(called)} {verb} not resolve on {sources} ({error})"
        entry = f"{target.address or 'ADDRESS'} {target.called}"
        fix = f"add `{entry}` to /etc/hosts on {sources} or to DNS, or give --hosts by address"
        yield Finding(level, "name", group.where, what, fix)

    wrong = [pair for pair in survey.edges if _resolves_elsewhere(survey, pair)]
    for group in group_links(survey, wrong):
        sources = _sources(survey, group)
        first = group.pairs[0]
        target = survey.hosts[first[1]]
        (address, *_) = survey.edges[first].addresses or [""]
        what = f"{target.called} resolves to {address} on {sources}, which is not an address of {target.name}"
        fix = f"map {target.called} to {target.address} in /etc/hosts on {sources} or in DNS"
        yield Finding(level, "name", group.where, what, fix)


def _sources(survey: Survey, group: LinkGroup) -> str:
    """The names of the hosts that the links come from."""
    return join_names(sorted({survey.hosts[source].name for source, _ in group.pairs}))


def _resolves_elsewhere(survey: Survey, pair: Pair) -> bool:
    """Whether it resolves to an address that the host does not have; a translated address (NAT) may
    still work."""
    edge = survey.edges[pair]
    target_addresses = [interface["address"] for interface in survey.hosts[pair[1]].interfaces]
    if not edge.addresses or not target_addresses or edge.rendezvous == OPEN:
        return False

    return edge.addresses[0] not in target_addresses


# Ports


def _rendezvous_port(survey: Survey) -> Iterator[Finding]:
    """Whether ranks reach the port of the rendezvous on the first host:

    problem: a: nothing can listen on the rendezvous port 29500: Address already in use
    problem: b -> a: the rendezvous port 29500 is closed from b (refused)
    """
    check = "rendezvous port"
    port = survey.rendezvous_port
    first = survey.hosts[0]

    if first.rendezvous_error is not None:
        what = f"nothing can listen on the rendezvous port {port}: {first.rendezvous_error}"
        fix = f"ss -ltnp 'sport = :{port}' on {first.name} shows the process that has it; stop it, or give --port"
        yield Finding("problem", check, first.name, what, fix)
        return

    tried = survey.links(lambda edge: edge.rendezvous not in (None, OPEN))
    # A closed port at a wrong address does not belong to this host.
    closed = [pair for pair in tried if not _resolves_elsewhere(survey, pair)]
    for group in group_links(survey, closed):
        why = _why(survey.edges[pair].rendezvous for pair in group.pairs)
        what = f"the rendezvous port {port} is closed {group.phrase} ({why})"
        fix = OPEN_RENDEZVOUS.format(port=port, host=first.name)
        yield Finding("problem", check, group.where, what, fix)


def _data_ports(survey: Survey) -> Iterator[Finding]:
    """High ports: gloo and NCCL use any of them, in either direction."""
    check = "data ports"
    closed = survey.links(lambda edge: edge.data not in (None, OPEN))
    if len(survey.present()) > 2 and closed and closed.keys() == set(survey.pairs()):
        why = _why(edge.data for edge in closed.values())
        what = f"data ports closed between all of them ({why})"
        yield Finding("problem", check, "every host", what, OPEN_DATA.format(where="on each"))
        return

    for group in group_links(survey, closed):
        targets = sorted({target for _, target in group.pairs})
        names = join_names(survey.hosts[number].name for number in targets)
        where = f"on {names}"
        if group.pairs[0][0] == group.host:
            where = f"out of {survey.hosts[group.host].name}"

        why = _why(closed[pair].data for pair in group.pairs)
        what = f"data ports closed {group.phrase} ({why}){_other_direction(survey, group, closed)}"
        yield Finding("problem", check, group.where, what, OPEN_DATA.format(where=where))


def _other_direction(survey: Survey, group: LinkGroup, closed: Collection[Pair]) -> str:
    """Whether the other direction is open, which distinguishes a firewall from a dead line: `; the other
    direction is open`, `; so is the other direction`."""
    back = [(target, source) for source, target in group.pairs]
    if set(back) == set(group.pairs):
        return ""

    closed_back = [pair for pair in back if pair in closed]
    if len(closed_back) == len(back):
        return "; so is the other direction"
    if not closed_back:
        return "; the other direction is open"

    names = join_names(survey.hosts[target].name for _, target in closed_back)
    return f"; the other direction is closed to {names}"


def _why(outcomes: Iterable[str | None]) -> str:
    """The most common outcome, in words."""
    return explained_closed(statistics.mode(str(outcome) for outcome in outcomes))


def edges_into(survey: Survey, number: int) -> list[Edge]:
    """The results of all present hosts with this one."""
    edges = (survey.edges.get((source, number)) for source in survey.present())
    return [edge for edge in edges if edge is not None]


def working_address(survey: Survey, number: int) -> str | None:
    """An address of the host that others reach, if any."""
    edges = edges_into(survey, number)
    if any(edge.data == OPEN for edge in edges):
        return survey.hosts[number].address

    for edge in edges:
        for address, outcome in (edge.others or {}).items():
            if outcome == OPEN:
                return address

    return None


def _interfaces(survey: Survey) -> Iterator[Finding]:
    """Hosts whose gloo or NCCL would use a network without other hosts: a container's bridge, or
    the loopback."""
    for number in survey.present():
        host = survey.hosts[number]
        works = working_address(survey, number)
        if works is None:
            continue  # where all ports are closed, that is reported elsewhere

        tried = [edge.others or {} for edge in edges_into(survey, number)]
        outcomes = [outcome for addresses in tried for outcome in addresses.items()]
        yield from _interface(host, "gloo", works, outcomes)
        if host.facts is not None and host.facts.get("gpus"):
            yield from _interface(host, "NCCL", works, outcomes)


def _interface(
    host: HostRecord,
    library: str,
    works: str,
    outcomes: list[tuple[str, str]],
) -> Iterator[Finding]:
    """The interface that a library chose, if no other host reaches it:

    gloo uses docker0 (172.17.0.1), which no other host reaches; eth0 (10.0.0.4) works

    `works`: an address of the host that others reach; `outcomes`: of its further addresses."""
    variable = GLOO_VARIABLE if library == "gloo" else NCCL_VARIABLE
    chosen = host.gloo if library == "gloo" else host.nccl
    if chosen is None or chosen["address"] == works:
        return

    address = str(chosen["address"])
    tried = [outcome for tried_address, outcome in outcomes if tried_address == address]
    # An address that was not tried may be reachable, but the loopback never is.
    may_be_reached = not tried and not ipaddress.ip_address(address).is_loopback
    if OPEN in tried or may_be_reached:
        return

    name = host.interface_of(works)
    value = host.variables.get(variable)
    why = f", set by {variable}={value}" if value is not None else ""
    what = f"{library} uses {chosen['name']} ({address}{why}), which no other host reaches; "
    what += f"{name} ({works}) works"
    fix = f"export {variable}={name} on {host.name}"
    setting = VariableFix(variable, name) if name else None
    yield Finding("problem", "interface", host.name, what, fix, variable=setting)


# Packets, speed and clocks


def _black_holes(survey: Survey) -> Iterator[Finding]:
    """Links on which only small packets arrive, as behind a tunnel that drops large ones:

    large messages from b never arrive, though small ones do: an MTU black hole (nothing of 64 KiB
    arrived; packets of 1400 bytes pass)
    """
    holes = survey.links(lambda edge: edge.has_hole)
    for group in group_links(survey, holes):
        host = survey.hosts[group.host]
        edges = [survey.edges[pair] for pair in group.pairs]
        sizes = [edge.passes for edge in edges if edge.passes]
        passing = f"; packets of {min(sizes)} bytes pass" if sizes else ""
        what = (
            f"large messages {group.phrase} never arrive, though small ones do: an MTU black hole "
            f"(nothing of {LARGE_BYTES >> 10} KiB arrived{passing})"
        )
        mtu = min(sizes, default=USUAL_TUNNEL_MTU)
        device = host.interface_of(host.address) or "eth0"
        fix = f"sudo ip link set dev {device} mtu {mtu} on {host.name} (others then learn it), or fix the tunnel"
        yield Finding("problem", "mtu", group.where, what, fix)


def _slow_links(survey: Survey) -> Iterator[Finding]:
    """Links that lose the connection, or are far slower than the others:

    links from every other host carry 940 Mbit/s; others carry 9.4 Gbit/s
    """
    names = [host.name for host in survey.hosts]
    unmeasured = survey.links(lambda edge: edge.error and edge.bytes_per_s is None)
    for (source, target), edge in unmeasured.items():
        what = f"it opened, but could not be measured: {edge.error}"
        fix = "run the doctor again; if the connection is lost again, check the link"
        yield Finding("problem", "bandwidth", f"{names[source]} -> {names[target]}", what, fix)

    speeds = {pair: edge.bytes_per_s for pair, edge in survey.edges.items() if edge.bytes_per_s}
    usual = survey.usual_speed()
    slow = [pair for pair, speed in speeds.items() if speed < SLOW_SHARE * usual]

    for group in group_links(survey, slow, speeds):
        rate = statistics.median_high([speeds[pair] for pair in group.pairs])
        host = survey.hosts[group.host]
        device = host.interface_of(host.address) or "eth0"
        what = f"links {group.phrase} carry {bit_rate(rate)}; others carry {bit_rate(usual)}"
        fix = (
            f"ethtool {device}; tc qdisc show dev {device} on {host.name}: check link speed and limits (in a cloud: "
            "the network of the instance's size)"
        )
        yield Finding("problem", "bandwidth", group.where, what, fix)


def _clocks(survey: Survey) -> Iterator[Finding]:
    """Hosts whose clock differs from that of the others: `its clock is 12.0 s behind the other hosts'`."""
    clocks = {host.name: host.clock_s for host in survey.hosts if host.clock_s is not None}
    if len(clocks) < 2:
        return

    # With three or more hosts the majority is right; with two, the first one is taken as right.
    first, *_ = clocks
    usual = clocks[first] if len(clocks) == 2 else statistics.median_low(clocks.values())
    whose = f"{first}'s" if len(clocks) == 2 else "the other hosts'"

    for name, clock in clocks.items():
        offset = abs(clock - usual)
        if offset >= CLOCK_WARNING_S:
            level: Level = "problem" if offset >= CLOCK_PROBLEM_S else "warning"
            direction = "ahead of" if clock > usual else "behind"
            what = f"its clock is {offset:,.1f} s {direction} {whose}"
            fix = f"sudo chronyc makestep on {name} (or start chrony or ntpd there)"
            yield Finding(level, "clock", name, what, fix)
