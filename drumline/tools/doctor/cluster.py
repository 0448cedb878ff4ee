"""Checks several hosts, from the start to the findings: over ssh, or without it, with this process
as node 0; and what differs across them: versions, GPUs, packages, variables, code and data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from drumline.base.errors import ExitCode
from drumline.base.text import join_names, plural
from drumline.launch.hosts import Host
from drumline.launch.ssh.client import remote_module, ssh_words
from drumline.launch.ssh.host_connection import HostConnection
from drumline.launch.ssh.hosts_job import variables_for_ranks
from drumline.tools.doctor.doctor_report import result_line
from drumline.tools.doctor.finding import Finding, Level, has_problems
from drumline.tools.doctor.machine.folder_hashes import MAX_DATA_FILES, sort_key
from drumline.tools.doctor.machine.known_variables import MAY_DIFFER, MUST_AGREE
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

Facts = Mapping[str, Any]
MAX_VALUES = 4
MAX_PACKAGES = 10
MAX_FINDINGS = 5
SAME_ENVIRONMENT = (
    "install the same on all hosts: pip freeze > all.txt on one, pip install -r all.txt on others"
)
COMPARED = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "FI_PROVIDER")
NODE_SERVER = "drumline.tools.doctor.pairs.node_server"
# Shorter than the time limit for a host's answer, so that ssh itself reports what is wrong.
SSH_CONNECT_S = 6
# Importing torch from a cold file server takes half a minute; the collectives themselves a second.
LIMIT_S = 90.0
ANSWER_MARGIN_S = 10.0


# What differs across hosts


@dataclass(frozen=True)
class ComparedValue:
    """One compared fact: each value with its hosts, the most common first."""

    name: str
    groups: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def differs(self) -> bool:
        return len(self.groups) > 1

    @property
    def odd_hosts(self) -> tuple[str, ...]:
        """The hosts whose value differs from that of most."""
        return tuple(host for _, hosts in self.groups[1:] for host in hosts)

    def text(self) -> str:
        """`2.13.0 on a and b; 2.11.0 on c`."""
        shown = [f"{value} on {join_names(hosts)}" for value, hosts in self.groups[:MAX_VALUES]]
        num_hidden = len(self.groups) - MAX_VALUES
        return "; ".join(shown) + (f"; and {num_hidden} more values" if num_hidden > 0 else "")

    def finding(self, level: Level, fix: str) -> Finding:
        what = f"{self.name} differs across hosts: {self.text()}"
        return Finding(level, "differences", join_names(self.odd_hosts), what, fix)


def compare_values(
    name: str, values: Mapping[str, str | None], *, unset: str = "none"
) -> ComparedValue:
    """Hosts grouped by value; of two equally common values, the first host's comes first."""
    hosts: dict[str | None, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    ordered = sorted(hosts.items(), key=lambda item: -len(item[1]))
    groups = ((unset if value is None else value, tuple(names)) for value, names in ordered)
    return ComparedValue(name, tuple(groups))


# Versions and machines


def _gpus(facts: Facts) -> str | None:
    names = [gpu["name"] for gpu in facts["gpus"]]
    return ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names))) or None


def _mtu(facts: Facts) -> str | None:
    chosen = facts["nccl_interface"] if facts["gpus"] else facts["gloo_interface"]
    return next(
        (str(interface["mtu"]) for interface in facts["interfaces"] if interface["name"] == chosen),
        None,
    )


class Trait(NamedTuple):
    """A fact that should be the same on all hosts; level and fix are those of a difference."""

    name: str
    value_of: Callable[[Facts], str | None]
    level: Level
    fix: str


TRAITS = (
    Trait("Python", lambda facts: facts["python"], "warning", SAME_ENVIRONMENT),
    Trait("torch", lambda facts: facts["torch"], "problem", SAME_ENVIRONMENT),
    Trait("CUDA (of torch)", lambda facts: facts["cuda"], "problem", SAME_ENVIRONMENT),
    Trait("NCCL", lambda facts: facts["nccl"], "problem", SAME_ENVIRONMENT),
    Trait("drumline", lambda facts: facts["packages"].get("drumline"), "problem", SAME_ENVIRONMENT),
    Trait(
        "driver", lambda facts: facts["driver"], "warning", "install the same driver on all hosts"
    ),
    Trait(
        "GPUs", _gpus, "warning", "leave the odd hosts out, or set slots per host: --hosts a:8,b:4"
    ),
    Trait(
        "architecture",
        lambda facts: facts["platform"].split()[-1],
        "warning",
        "use one architecture",
    ),
    Trait(
        "file system of the run folder",
        lambda facts: facts["disk"].get("file_system"),
        "warning",
        "check that the shared volume is mounted on all hosts (mount)",
    ),
    Trait("MTU", _mtu, "warning", "set the same on all hosts: ip link set dev NAME mtu 1500"),
)


def compare_hosts(facts: Mapping[str, Facts]) -> list[Finding]:
    """What differs, from the facts of each host."""
    if len(facts) < 2:
        return []
    parts = (_compare_traits, _compare_packages, _compare_variables, _compare_code, _compare_data)
    return [finding for part in parts for finding in part(facts)]


def _compare_traits(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    # Versions of Python that differ only in the patch number are compatible.
    minors = {tuple(host_facts["python"].split(".")[:2]) for host_facts in facts.values()}
    for trait in TRAITS:
        values = {host: trait.value_of(host_facts) for host, host_facts in facts.items()}
        row = compare_values(trait.name, values)
        if row.differs:
            is_problem = trait.name == "Python" and len(minors) > 1
            yield row.finding("problem" if is_problem else trait.level, trait.fix)


# Packages and variables


def _compare_packages(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """One finding, so that an old environment is one line and not forty."""
    names = {name for host_facts in facts.values() for name in host_facts["packages"]}
    rows = [
        compare_values(
            name, {host: host_facts["packages"].get(name) for host, host_facts in facts.items()}
        )
        for name in sorted(names - {"torch", "drumline"})
    ]
    different = [row for row in rows if row.differs]
    if different:
        hosts = dict.fromkeys(host for row in different for host in row.odd_hosts)
        verb = "differs" if len(different) == 1 else "differ"
        shown = [f"{row.name} {row.text()}" for row in different[:MAX_PACKAGES]]
        num_hidden = len(different) - MAX_PACKAGES
        hidden = f"; and {num_hidden} more" if num_hidden > 0 else ""
        what = (
            f"{plural(len(different), 'package')} {verb} across hosts: {'; '.join(shown)}{hidden}"
        )
        fix = "pip freeze > all.txt on a host that is right, pip install -r all.txt on these"
        yield Finding("warning", "differences", join_names(hosts), what, fix)


def _compare_variables(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    every = {name for host_facts in facts.values() for name in host_facts["variables"]}
    for name in sorted(
        name for name in every if name.startswith(COMPARED) and not name.startswith(MAY_DIFFER)
    ):
        row = compare_values(
            name,
            {host: host_facts["variables"].get(name) for host, host_facts in facts.items()},
            unset="unset",
        )
        if row.differs:
            usual = row.groups[0][0]
            command = f"unset {name}" if usual == "unset" else f"export {name}={usual}"
            fix = f"{command} on all hosts, or in the environment of the launcher"
            yield row.finding("problem" if name in MUST_AGREE else "warning", fix)


# Code and data


def _compare_code(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """The first files that differ are named."""

    def changes(usual: Facts, odd: Facts) -> Iterator[str]:
        right = usual["files"]
        here = odd["files"]
        for name in sorted(right.keys() | here.keys(), key=sort_key):
            if name not in here:
                yield f"{name} is missing"
            elif name not in right:
                yield f"{name} is extra"
            elif right[name] != here[name]:
                yield f"{name} differs"

    fix = "drumline launch --sync copies the code first; or use git pull or rsync"
    yield from _compare_folders("code", _existing_folders(facts, "code"), changes, fix)


def _compare_data(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    folders = _existing_folders(facts, "data")

    def changes(usual: Facts, odd: Facts) -> Iterator[str]:
        for name in ("files", "bytes"):
            if usual[name] != odd[name]:
                yield f"{odd[name]} {name} instead of {usual[name]}"

    yield from _compare_folders("data", folders, changes, "copy it again, or mount the same volume")
    if partly := [host for host, data in folders.items() if not data["complete"]]:
        what = f"the data has many files; the first {MAX_DATA_FILES:,} were compared"
        yield Finding("note", "data", join_names(partly), what)


def _existing_folders(facts: Mapping[str, Facts], name: str) -> dict[str, Facts]:
    """The hosts that have the folder; a missing folder is a separate finding."""
    folders = {host: host_facts.get(name) for host, host_facts in facts.items()}
    return {host: folder for host, folder in folders.items() if folder and "files" in folder}


def _compare_folders(
    name: str,
    folders: Mapping[str, Facts],
    changes: Callable[[Facts, Facts], Iterator[str]],
    fix: str,
) -> Iterator[Finding]:
    """One finding for each version of the code or data that differs from that of most hosts.
    `changes`: between two of them."""
    row = compare_values(name, {host: folder["hash"] for host, folder in folders.items()})
    if not row.differs:
        return
    usual = row.groups[0][1]
    for _, hosts in row.groups[1 : MAX_FINDINGS + 1]:
        changed = (
            join_names(changes(folders[usual[0]], folders[hosts[0]]))
            or "names or sizes of files differ"
        )
        what = f"the {name} in {folders[hosts[0]]['folder']} differs from that on {join_names(usual)}: {changed}"
        yield Finding("problem", name, join_names(hosts), what, fix)


# From the start to the findings


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
