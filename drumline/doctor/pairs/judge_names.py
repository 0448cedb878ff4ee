"""Names that lead nowhere, or to somewhere else than the host has its address, or two of them to one host."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.doctor.finding import Finding, Level
from drumline.doctor.pairs.addresses import outside_addresses
from drumline.doctor.pairs.gathered import Way, gather
from drumline.doctor.pairs.survey import Survey
from drumline.text import join_names


def name_findings(survey: Survey) -> Iterator[Finding]:
    """By the host that is looked for; by hand, where addresses are used, they are good to know and no more."""
    level: Level = "problem" if survey.names_matter else "note"
    unknown = {way for way, edge in survey.edges.items() if edge.addresses == []}
    for found in gather(survey, unknown):
        names = join_names(sorted({survey.hosts[target].called for _, target in found.ways}))
        hosts = sorted({survey.hosts[source].name for source, _ in found.ways})
        verb = "do" if len({target for _, target in found.ways}) > 1 else "does"
        what = f"{names} {verb} not resolve on {join_names(hosts)} ({survey.edges[found.ways[0]].name_error})"
        target = survey.hosts[found.ways[0][1]]
        line = f"{target.address or 'ADDRESS'} {target.called}"
        fix = f"add `{line}` to /etc/hosts on {join_names(hosts)} or to DNS, or give --hosts by address"
        yield Finding(level=level, check="name", where=found.where, what=what, fix=fix)
    for found in gather(survey, {way for way in survey.edges if leads_astray(survey, way)}):
        target = survey.hosts[found.ways[0][1]]
        leads = (survey.edges[found.ways[0]].addresses or [""])[0]
        there = join_names(sorted({survey.hosts[source].name for source, _ in found.ways}))
        what = f"{target.called} leads to {leads} on {there}, an address that {target.name} does not have"
        fix = f"let {target.called} lead to {target.address} in /etc/hosts on {there} or in DNS"
        yield Finding(level=level, check="name", where=found.where, what=what, fix=fix)


def double_findings(survey: Survey) -> Iterator[Finding]:
    """One machine under two names; then another, which one of them should lead to, was never looked at."""
    level: Level = "problem" if survey.names_matter else "warning"
    same: dict[tuple[str, ...], list[str]] = {}
    for number in survey.here():
        host = survey.hosts[number]
        if host.hostname and host.interfaces:
            same.setdefault((host.hostname, *outside_addresses(host.interfaces)), []).append(host.name)
    for (hostname, *addresses), names in same.items():
        if len(names) > 1:
            what = f"they are one host, which calls itself {hostname} and has {join_names(addresses)}"
            fix = (
                f"name each host once; where the names lead: for host in {' '.join(names)}; do ssh $host hostname; done"
                if survey.names_matter
                else "start one node on each host"
            )
            yield Finding(level=level, check="name", where=join_names(names), what=what, fix=fix)


def leads_astray(survey: Survey, way: Way) -> bool:
    """To an address that the host does not have; one that is translated on the way leads there all the same."""
    edge = survey.edges[way]
    if not edge.addresses or edge.meeting == "open":
        return False
    own = [one["address"] for one in survey.hosts[way[1]].interfaces]
    return bool(own) and edge.addresses[0] not in own
