"""An examination of several hosts from its start to its findings: over ssh, or by hand with this process as node 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.doctor.collectives.run_collectives import collective_findings, collectives_on_hosts
from drumline.doctor.comparison import Comparison
from drumline.doctor.finding import Finding, has_problems
from drumline.doctor.host_differences import compare_hosts
from drumline.doctor.machine.machine_checks import machine_findings
from drumline.doctor.pairs.channel import Channel
from drumline.doctor.pairs.coordinator import Coordinator, Opener, Progress
from drumline.doctor.pairs.joining import Place
from drumline.doctor.pairs.judge import judge
from drumline.doctor.pairs.meeting import Meeting
from drumline.doctor.pairs.node import Subject
from drumline.doctor.pairs.survey import HostSeen, Survey
from drumline.doctor.report import verdict
from drumline.errors import ExitCode
from drumline.launch.hosts import Host
from drumline.launch.ssh.client import ssh_words
from drumline.launch.ssh.hosts_job import variables_for_ranks

NODE_MODULE = "drumline.doctor.pairs.node"
# Within the time that a host has for its first word, so that ssh itself says what is wrong: it knows best.
CONNECT_S = 6


@dataclass(frozen=True)
class Wishes:
    """What to examine beside the network."""

    subject: Subject
    with_collectives: bool = True
    procs: int | None = None
    """Ranks of each host in the collectives; None: one for each GPU, or one."""
    backend: str = "auto"


@dataclass
class Result:
    """What came out."""

    survey: Survey
    findings: list[Finding] = field(default_factory=list)
    table: list[Comparison] = field(default_factory=list)
    collectives: list[dict[str, Any]] | None = None

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.PREFLIGHT_FAILED if has_problems(self.findings) else ExitCode.SUCCESS


async def over_ssh(
    hosts: Sequence[Host],
    wishes: Wishes,
    *,
    port: int,
    client: Sequence[str],
    python: str,
    progress: Progress,
) -> Result:
    """From anywhere that reaches the hosts by ssh."""
    survey = Survey([HostSeen(host.name, host.address) for host in hosts], port)
    calls = [*client, "-o", f"ConnectTimeout={CONNECT_S}"]
    slots = {number: host.slots for number, host in enumerate(hosts)}

    def opener(host: Host) -> Opener:
        words = ssh_words(calls, host, [python, "-m", NODE_MODULE], cwd=Path.cwd())
        return lambda: Channel.start(*words)

    return await _examine(survey, [opener(host) for host in hosts], wishes, slots, progress, python)


async def by_hand(place: Place, wishes: Wishes, progress: Progress) -> Result:
    """As node 0: the others come here."""
    meeting = Meeting(place)
    await meeting.wait(progress)
    survey = Survey(
        [_host_by_hand(number, meeting) for number in range(place.nodes)],
        place.port,
        names_matter=False,
        meeting_is_tried=False,
    )

    async def own() -> Channel:
        return await Channel.start(sys.executable, "-m", NODE_MODULE)

    def opener(number: int) -> Opener:
        async def come() -> Channel:
            return meeting.came[number]

        return come

    openers = [own, *(opener(number) for number in range(1, place.nodes))]
    return await _examine(survey, openers, wishes, {}, progress)


def _host_by_hand(number: int, meeting: Meeting) -> HostSeen:
    name, place = f"node {number}", meeting.place
    if number == 0:
        return HostSeen(name, place.master, address=meeting.address)
    host = HostSeen(name, "", address=meeting.addresses.get(number))
    if number not in meeting.came:
        refused = meeting.refused.get(number)
        host.absent = (
            refused or f"it did not come to {meeting.address}:{place.port} within {place.wait_s:g} s"
        )
        host.absent_fix = (
            "start it again with that mended"
            if refused
            else f"start `drumline doctor --nodes {place.nodes} --node-rank {number} "
            f"--master {place.master}:{place.port}` there and see what it says; --wait S gives it more time"
        )
    return host


async def _examine(
    survey: Survey,
    openers: Sequence[Opener],
    wishes: Wishes,
    slots: Mapping[int, int | None],
    progress: Progress,
    python: str = sys.executable,
) -> Result:
    subject = wishes.subject
    begin = {
        # What ranks on other hosts get from whoever starts them: the doctor looks at what they will see.
        "variables": variables_for_ranks([], subject.environment),
        "run_folder": subject.run_folder,
        "code": subject.code,
        "data": subject.data,
    }
    coordinator, result = Coordinator(survey, begin, progress, python=python), Result(survey)
    try:
        await coordinator.examine(openers)
        network = judge(survey)
        facts, result.table = _judge_facts(survey)
        if wishes.with_collectives and not has_problems(network):
            procs = {
                number: _procs(survey, number, slots.get(number) or wishes.procs) for number in survey.here()
            }
            result.collectives = await collectives_on_hosts(coordinator, procs, wishes.backend)
            names = {host.hostname: host.name for host in survey.hosts}
            network = [*judge(survey), *collective_findings(result.collectives, names)]
        result.findings = [*network, *facts]
    finally:
        await coordinator.close(verdict=verdict(result.findings), code=int(result.exit_code))
    return result


def _judge_facts(survey: Survey) -> tuple[list[Finding], list[Comparison]]:
    """Of each host by itself, and what differs between them."""
    findings, known = [], {}
    for number, host in enumerate(survey.hosts):
        if host.facts is None:
            continue
        try:
            of_host = machine_findings(host.facts, many_hosts=len(survey.hosts) > 1)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            findings.append(_unreadable(host.name, error))
            continue
        known[host.name] = host.facts
        # Whether others reach the network that a library takes was tried; how it looks from inside says less.
        was_tried = any(edge.data == "open" for (_, target), edge in survey.edges.items() if target == number)
        findings += [
            replace(found, where=host.name)
            for found in of_host
            if not (was_tried and found.check == "network")
        ]
    if len(known) < 2:
        return findings, []
    differences, table = compare_hosts(known)
    return [*differences, *findings], [row for row in table if row.differs]


def _unreadable(host: str, error: Exception) -> Finding:
    return Finding(
        level="problem",
        check="version",
        where=host,
        what=f"what it says of itself has another form ({error!r}): its drumline is of another version",
        fix="install the same drumline on all hosts",
    )


def _procs(survey: Survey, number: int, wanted: int | None) -> int:
    facts = survey.hosts[number].facts or {}
    return wanted or len(facts.get("gpus") or []) or 1
