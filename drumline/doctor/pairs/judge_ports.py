"""Ports that are closed, and lines on which large messages vanish."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator

from drumline.doctor.finding import Finding
from drumline.doctor.pairs.gathered import Gathered, Way, gather
from drumline.doctor.pairs.judge_names import leads_astray
from drumline.doctor.pairs.probe import LARGE_BYTES, Outcome
from drumline.doctor.pairs.survey import Survey
from drumline.net.reasons import OPEN_DATA, OPEN_RENDEZVOUS, Reason, explained_closed
from drumline.text import join_names

REASONS = {
    "silent": Reason.NO_ANSWER,
    "refused": Reason.REFUSED,
    "unreachable": Reason.NO_ROUTE,
    "stranger": Reason.WRONG_HOST,
}
# What tunnels leave of the usual 1500 bytes; said when no size at all was seen to pass.
USUAL_TUNNEL_MTU = 1400


def meeting_findings(survey: Survey) -> Iterator[Finding]:
    """The rendezvous port, on the first host."""
    port, first = survey.meeting_port, survey.hosts[0]
    if first.meeting_error is not None:
        what = f"nothing can listen on the rendezvous port {port}: {first.meeting_error}"
        fix = f"ss -ltnp 'sport = :{port}' on {first.name} shows who has it; end that, or give another --port"
        yield Finding(level="problem", check="rendezvous port", where=first.name, what=what, fix=fix)
        return
    tried = {way: edge.meeting for way, edge in survey.edges.items() if edge.meeting is not None}
    # A name that leads elsewhere is told as such; what is open or closed there is not this host's.
    closed = {way for way, outcome in tried.items() if outcome != "open" and not leads_astray(survey, way)}
    for found in gather(survey, closed):
        why = _why([tried[way] for way in found.ways])
        what = f"the rendezvous port {port} is closed {found.phrase} ({why})"
        fix = OPEN_RENDEZVOUS.format(port=port, host=first.name)
        yield Finding(level="problem", check="rendezvous port", where=found.where, what=what, fix=fix)


def data_findings(survey: Survey) -> Iterator[Finding]:
    """High ports: gloo and NCCL take any of them, in either direction."""
    closed = {way: edge.data for way, edge in survey.edges.items() if edge.data not in (None, "open")}
    if len(survey.here()) > 2 and closed and closed.keys() == set(survey.pairs()):
        what = f"data ports closed between all of them ({_why(closed.values())})"
        fix = OPEN_DATA.format(where="on each")
        yield Finding(level="problem", check="data ports", where="every host", what=what, fix=fix)
        return
    for found in gather(survey, closed.keys()):
        why = _why([closed[way] for way in found.ways])
        what = f"data ports closed {found.phrase} ({why}){_way_back(survey, found, closed)}"
        fix = OPEN_DATA.format(where=_where_to_open(survey, found))
        yield Finding(level="problem", check="data ports", where=found.where, what=what, fix=fix)


def _where_to_open(survey: Survey, found: Gathered) -> str:
    if found.ways[0][0] == found.host:
        return f"out of {survey.hosts[found.host].name}"
    ends = sorted({target for _, target in found.ways})
    return f"on {join_names([survey.hosts[number].name for number in ends])}"


def _way_back(survey: Survey, found: Gathered, closed: Collection[Way]) -> str:
    """The security-group case is told from a dead line by it."""
    if found.phrase == "both ways":
        return ""
    back = [(target, source) for source, target in found.ways if (target, source) in survey.edges]
    shut = [way for way in back if way in closed]
    if len(shut) == len(found.ways):
        return "; so is the way back"
    if not shut:
        return "; the way back is open"
    return f"; the way back is closed to {join_names([survey.hosts[target].name for _, target in shut])}"


def hole_findings(survey: Survey) -> Iterator[Finding]:
    """MTU black holes."""
    for found in gather(survey, {way for way, edge in survey.edges.items() if edge.has_hole}):
        host = survey.hosts[found.host]
        sizes = [size for size in (survey.edges[way].passes for way in found.ways) if size]
        passing = f"; packets of {min(sizes)} bytes pass" if sizes else ""
        what = (
            f"large messages {found.phrase} never arrive, though small ones do: an MTU black hole "
            f"(nothing of {LARGE_BYTES >> 10} KiB came{passing})"
        )
        mtu = min(sizes, default=USUAL_TUNNEL_MTU)
        device = host.interface_of(host.address) or "eth0"
        fix = f"sudo ip link set dev {device} mtu {mtu} on {host.name} (others then learn it), or mend the tunnel"
        yield Finding(level="problem", check="mtu", where=found.where, what=what, fix=fix)


def _why(outcomes: Collection[Outcome | None]) -> str:
    return explained_closed(REASONS[statistics.mode(str(outcome) for outcome in outcomes)])
