"""Checks several hosts, from the start to the findings: over ssh, or without it, with this process
as node 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drumline.base.errors import ExitCode
from drumline.base.text import plural
from drumline.launch.hosts import Host
from drumline.launch.ssh.client import remote_module, ssh_words
from drumline.launch.ssh.host_connection import HostConnection
from drumline.launch.ssh.hosts_job import variables_for_ranks
from drumline.tools.doctor.doctor_report import result_line
from drumline.tools.doctor.finding import Finding, has_problems
from drumline.tools.doctor.host_differences import compare_hosts
from drumline.tools.doctor.machine.machine_checks import machine_findings, num_visible_gpus
from drumline.tools.doctor.machine.machine_facts import HostSettings
from drumline.tools.doctor.pairs.examination import (
    ANSWER_S,
    START_S,
    Coordinator,
    NodeClient,
    Progress,
    examine,
)
from drumline.tools.doctor.pairs.pair_checks import pair_findings
from drumline.tools.doctor.pairs.survey import HostRecord, Survey
from drumline.tools.doctor.pairs.without_ssh import DoctorRendezvous, NodeOptions
from drumline.tools.doctor.ranks.rank_processes import HostRanks, collective_findings

NODE_SERVER = "drumline.tools.doctor.pairs.node_server"
# Shorter than the time limit for a host's answer, so that ssh itself reports what is wrong.
SSH_CONNECT_S = 6
# Importing torch from a cold file server takes half a minute; the collectives themselves a second.
LIMIT_S = 90.0
ANSWER_MARGIN_S = 10.0


@dataclass(frozen=True)
class DoctorOptions:
    settings: HostSettings
    with_collectives: bool = True
    procs: int | None = (
        None  # ranks of each host in the collectives; None: one for each GPU, or one
    )
    backend: str = "auto"


@dataclass
class DoctorResult:
    survey: Survey
    findings: list[Finding] = field(default_factory=list)
    collectives: list[dict[str, Any]] | None = None

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.PREFLIGHT_FAILED if has_problems(self.findings) else ExitCode.SUCCESS


async def check_over_ssh(
    hosts: Sequence[Host],
    options: DoctorOptions,
    *,
    port: int,
    client: Sequence[str],
    python: str,
    progress: Progress,
) -> DoctorResult:
    """From any machine that reaches the hosts by ssh."""
    survey = Survey([HostRecord(host.name, host.address) for host in hosts], port)
    ssh = [*client, "-o", f"ConnectTimeout={SSH_CONNECT_S}"]
    command = remote_module(NODE_SERVER, python, None)
    clients = [
        NodeClient(
            HostConnection(host, ssh_words(ssh, host, command, cwd=Path.cwd()), START_S),
            python=python,
        )
        for host in hosts
    ]
    slots = {number: host.slots for number, host in enumerate(hosts)}
    return await _examine(survey, clients, options, slots, progress)


async def check_as_node_zero(
    node: NodeOptions, options: DoctorOptions, progress: Progress
) -> DoctorResult:
    """As node 0, which the other nodes connect to."""
    rendezvous = DoctorRendezvous(node)
    await rendezvous.wait(progress)
    hosts = [HostRecord("node 0", node.master, address=rendezvous.address)]
    hosts += [_joined_host(number, rendezvous) for number in range(1, node.nodes)]
    here = HostConnection(Host("node 0"), [sys.executable, "-m", NODE_SERVER], START_S)
    joined = [rendezvous.joined.get(number) for number in range(1, node.nodes)]
    clients = [NodeClient(here), *joined]
    return await _examine(Survey(hosts, node.port, by_ssh=False), clients, options, {}, progress)


def _joined_host(number: int, rendezvous: DoctorRendezvous) -> HostRecord:
    """The record of a node, marked absent if it has not joined."""
    node = rendezvous.options
    host = HostRecord(f"node {number}", "", address=rendezvous.addresses.get(number))
    if number not in rendezvous.joined:
        place = f"--nodes {node.nodes} --node-rank {number} --master {node.endpoint}"
        late = f"it did not connect to {rendezvous.address}:{node.port} within {node.wait_s:g} s"
        host.absent = rendezvous.refused.get(number, late)
        host.absent_fix = (
            f"run `drumline doctor {place}` there and read its output; --wait S leaves more time"
        )
    return host


async def _examine(
    survey: Survey,
    clients: Sequence[NodeClient | None],
    options: DoctorOptions,
    slots: Mapping[int, int | None],
    progress: Progress,
) -> DoctorResult:
    settings = options.settings
    sent = {
        # The variables that `drumline launch` passes to ranks on other hosts: the doctor checks
        # with the same.
        "variables": variables_for_ranks([], settings.environment),
        "run_folder": settings.run_folder,
        "code": settings.code,
        "data": settings.data,
    }
    coordinator = Coordinator(survey, clients, sent, progress)
    result = DoctorResult(survey)
    ending: dict[str, Any] = {}
    try:
        await examine(coordinator)
        network = pair_findings(survey)
        facts = check_facts(survey)
        if options.with_collectives and not has_problems(network):
            procs = {
                number: slots.get(number)
                or options.procs
                or num_visible_gpus(host.facts or {})
                or 1
                for number, host in enumerate(survey.hosts)
                if host.absent is None
            }
            result.collectives = await collectives_on_hosts(coordinator, procs, options.backend)
            names = {host.hostname: host.name for host in survey.hosts}
            network = [*pair_findings(survey), *collective_findings(result.collectives, names)]
        result.findings = [*network, *facts]
        ending = {"result": result_line(result.findings), "code": int(result.exit_code)}
    finally:
        await coordinator.close(**ending)  # an interrupted check has no result
    return result


async def collectives_on_hosts(
    coordinator: Coordinator, procs: Mapping[int, int], backend: str
) -> list[dict[str, Any]]:
    """The outcome of each rank, in the order of ranks; `procs`: how many ranks each host has."""
    survey = coordinator.survey
    present = survey.present()
    world_size = sum(procs[number] for number in present)
    coordinator.progress(f"a process group of {plural(world_size, 'rank')}")
    await coordinator.ask_all(
        "close", ANSWER_S, {number: {} for number in present}, lambda *_: None
    )
    first = survey.hosts[present[0]]
    address = str(first.called if survey.by_ssh else first.address)
    requests: dict[int, dict[str, Any]] = {}
    first_rank = 0
    for number in present:
        ranks = HostRanks(
            first_rank, procs[number], world_size, address, survey.rendezvous_port, LIMIT_S, backend
        )
        requests[number] = asdict(ranks)
        first_rank += procs[number]
    outcomes: dict[int, list[dict[str, Any]]] = {}

    def read(number: int, answer: Any) -> None:
        host = survey.hosts[number].name
        outcomes[number] = [{"host": host, **outcome} for outcome in answer]

    await coordinator.ask_all("collectives", LIMIT_S + ANSWER_MARGIN_S, requests, read)
    return [outcome for _, host_outcomes in sorted(outcomes.items()) for outcome in host_outcomes]


def check_facts(survey: Survey) -> list[Finding]:
    findings = []
    facts_of_hosts = {}
    for host in survey.hosts:
        if host.facts is None:
            continue
        try:
            machine = machine_findings(host.facts, many_hosts=len(survey.hosts) > 1)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            what = f"its facts cannot be read ({error!r}): its version of drumline is different"
            fix = "install the same drumline on all hosts"
            findings.append(Finding("problem", "version", host.name, what, fix))
            host.facts = None  # must not be used
            continue
        facts_of_hosts[host.name] = host.facts
        findings += [replace(finding, where=host.name) for finding in machine]
    return [*compare_hosts(facts_of_hosts), *findings]
