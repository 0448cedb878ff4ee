"""Checks several hosts, from the start to the findings: over ssh, or without it, with this process
as node 0; and what differs across them: versions, GPUs, packages, variables, code and data.

problem: c: torch differs across hosts: 2.13.0 on a and b; 2.11.0 on c
problem: c: the code in /job differs from that on a and b: train.py differs
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from drumline.base.errors import ExitCode
from drumline.base.text import join_names, plural
from drumline.launch.hosts import Host
from drumline.launch.ssh.client import remote_module, ssh_words
from drumline.launch.ssh.host_connection import HostConnection, StartTimes
from drumline.launch.ssh.hosts_job import variables_for_ranks
from drumline.tools.doctor.doctor_report import result_line
from drumline.tools.doctor.finding import Finding, JsonObject, Level, has_problems
from drumline.tools.doctor.machine.folder_hashes import MAX_DATA_FILES, sort_key
from drumline.tools.doctor.machine.known_variables import MAY_DIFFER, MUST_AGREE
from drumline.tools.doctor.machine.machine_checks import machine_findings, num_visible_gpus
from drumline.tools.doctor.machine.machine_facts import Facts, HostFacts, HostSettings
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
from drumline.tools.doctor.ranks.rank_processes import (
    Backend,
    HostRanks,
    RankOutcome,
    collective_findings,
)

MAX_PACKAGES = 10
SAME_ENVIRONMENT = (
    "install the same on all hosts: pip freeze > all.txt on one, pip install -r all.txt on others"
)
COMPARED = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "FI_PROVIDER")
UNSET = "unset"
NODE_SERVER = "drumline.tools.doctor.pairs.node_server"
# Shorter than the time limit for a host's answer, so that ssh itself reports what is wrong.
SSH_CONNECT_S = 6
# For the start of Python on a slow disk, while no host has answered.
MAX_START_S = 60.0
# Importing torch from a cold file server takes half a minute; the collectives themselves a second.
LIMIT_S = 90.0
ANSWER_MARGIN_S = 10.0


# What differs across hosts


@dataclass(frozen=True)
class HostDifference:
    """A fact that is not the same everywhere: each value with its hosts, the most common first:

    HostDifference('torch', [('2.13.0', ['a', 'b']), ('2.11.0', ['c'])])
    """

    name: str
    groups: list[tuple[str, list[str]]]

    @property
    def usual(self) -> str:
        """The value of most hosts."""
        return self.groups[0][0]

    @property
    def odd_hosts(self) -> list[str]:
        """Those that do not have the usual value."""
        return [host for _, hosts in self.groups[1:] for host in hosts]

    def text(self) -> str:
        """`2.13.0 on a and b; 2.11.0 on c`."""
        return "; ".join(f"{value} on {join_names(hosts)}" for value, hosts in self.groups)

    def finding(self, level: Level, fix: str) -> Finding:
        """The difference, reported for the hosts that do not have the usual value."""
        what = f"{self.name} differs across hosts: {self.text()}"
        return Finding(level, "differences", join_names(self.odd_hosts), what, fix)


def differences(tables: Mapping[str, Mapping[str, str | None]]) -> Iterator[HostDifference]:
    """What is not the same everywhere. `tables`: what each host has, by name. Of two equally common
    values, the first host's comes first."""
    names = dict.fromkeys(name for table in tables.values() for name in table)
    for name in names:
        hosts_of: dict[str, list[str]] = {}
        for host, table in tables.items():
            hosts_of.setdefault(table.get(name) or "none", []).append(host)

        if len(hosts_of) > 1:
            groups = sorted(hosts_of.items(), key=lambda group: -len(group[1]))
            yield HostDifference(name, groups)


# Versions, machines and variables


def _traits(facts: Facts) -> dict[str, str | None]:
    """What should be the same on all hosts: `{'Python': '3.12.3', 'torch': '2.13.0', ...}`."""
    gpus = Counter(gpu["name"] for gpu in facts["gpus"])
    chosen = facts["nccl_interface"] if facts["gpus"] else facts["gloo_interface"]
    mtus = {interface["name"]: str(interface["mtu"]) for interface in facts["interfaces"]}

    return {
        "Python": facts["python"],
        "torch": facts["torch"],
        "CUDA (of torch)": facts["cuda"],
        "NCCL": facts["nccl"],
        "drumline": facts["packages"].get("drumline"),
        "driver": facts["driver"],
        "GPUs": ", ".join(f"{count} x {name}" for name, count in sorted(gpus.items())),
        "architecture": facts["platform"].split()[-1],
        "file system of the run folder": facts["disk"].get("file_system"),
        "MTU": mtus.get(chosen),
    }


TRAIT_FIXES = {
    "driver": "install the same driver on all hosts",
    "GPUs": "leave the odd hosts out, or set slots per host: --hosts a:8,b:4",
    "architecture": "use one architecture",
    "file system of the run folder": "check that the shared volume is mounted on all hosts (mount)",
    "MTU": "set the same on all hosts: ip link set dev NAME mtu 1500",
}


def compare_hosts(facts: HostFacts) -> list[Finding]:
    """What differs, from the facts of each host."""
    if len(facts) < 2:
        return []

    parts = (_compare_traits, _compare_packages, _compare_variables, _compare_folders)
    return [finding for part in parts for finding in part(facts)]


def _compare_traits(facts: HostFacts) -> Iterator[Finding]:
    """Versions, GPUs, the architecture, the file system and the MTU.

    A difference of these is a problem where ranks cannot train together, and a warning where they can.
    """
    # Versions of Python that differ only in the patch number are compatible.
    minors = {tuple(host_facts["python"].split(".")[:2]) for host_facts in facts.values()}
    tables = {host: _traits(host_facts) for host, host_facts in facts.items()}
    for difference in differences(tables):
        is_compatible = difference.name == "Python" and len(minors) == 1
        is_warning = is_compatible or difference.name in TRAIT_FIXES
        fix = TRAIT_FIXES.get(difference.name, SAME_ENVIRONMENT)
        yield difference.finding("warning" if is_warning else "problem", fix)


def _compare_packages(facts: HostFacts) -> Iterator[Finding]:
    """One finding, so that an old environment is one line and not forty:

    2 packages differ across hosts: numpy 2.3.1 on a and b; 1.26.4 on c; rich 14.0 on a and b; none on c
    """
    tables = {host: host_facts["packages"] for host, host_facts in facts.items()}
    different = [
        difference
        for difference in differences(tables)
        if difference.name not in ("torch", "drumline")
    ]
    if not different:
        return

    different.sort(key=lambda difference: difference.name)
    hosts = dict.fromkeys(host for difference in different for host in difference.odd_hosts)
    shown = [f"{difference.name} {difference.text()}" for difference in different[:MAX_PACKAGES]]
    num_hidden = len(different) - MAX_PACKAGES

    if num_hidden > 0:
        shown.append(f"and {num_hidden} more")

    verb = "differs" if len(different) == 1 else "differ"
    what = f"{plural(len(different), 'package')} {verb} across hosts: {'; '.join(shown)}"
    fix = "pip freeze > all.txt on a host that is right, pip install -r all.txt on these"
    yield Finding("warning", "differences", join_names(hosts), what, fix)


def _compare_variables(facts: HostFacts) -> Iterator[Finding]:
    """Those that ranks must agree on are problems: `NCCL_ALGO differs across hosts: Ring on a; unset
    on b and c`."""
    variables = {host: host_facts["variables"] for host, host_facts in facts.items()}
    compared = {
        name
        for values in variables.values()
        for name in values
        if name.startswith(COMPARED) and not name.startswith(MAY_DIFFER)
    }
    tables = {
        host: {name: values.get(name, UNSET) for name in sorted(compared)}
        for host, values in variables.items()
    }

    for difference in differences(tables):
        name = difference.name
        value = difference.usual
        command = f"unset {name}" if value == UNSET else f"export {name}={value}"
        fix = f"{command} on all hosts, or in the environment of the launcher"
        yield difference.finding("problem" if name in MUST_AGREE else "warning", fix)


# Code and data


def _compare_folders(facts: HostFacts) -> Iterator[Finding]:
    """One finding for each version of the code or data that differs from that of most hosts. A
    missing folder is a separate finding."""
    for name, (changes, fix) in COMPARED_FOLDERS.items():
        folders = {
            host: host_facts[name]
            for host, host_facts in facts.items()
            if "files" in (host_facts.get(name) or {})
        }
        hashes = {host: {name: folder["hash"]} for host, folder in folders.items()}
        for difference in differences(hashes):
            (_, usual), *odd = difference.groups
            for _, hosts in odd:
                folder = folders[hosts[0]]
                changed = join_names(changes(folders[usual[0]], folder))
                what = (
                    f"the {name} in {folder['folder']} differs from that on {join_names(usual)}: "
                    f"{changed or 'names or sizes of files differ'}"
                )
                yield Finding("problem", name, join_names(hosts), what, fix)

        partly = [host for host, folder in folders.items() if not folder.get("complete", True)]
        if partly:
            what = f"the data has many files; the first {MAX_DATA_FILES:,} were compared"
            yield Finding("note", name, join_names(partly), what)


def _changed_files(usual: Facts, odd: Facts) -> Iterator[str]:
    """`train.py is missing`, `old.py is extra`, `model.py differs`."""
    right = usual["files"]
    here = odd["files"]
    names = right.keys() | here.keys()

    for name in sorted(names, key=sort_key):
        if name not in here:
            yield f"{name} is missing"
        elif name not in right:
            yield f"{name} is extra"
        elif right[name] != here[name]:
            yield f"{name} differs"


def _changed_sizes(usual: Facts, odd: Facts) -> Iterator[str]:
    """`12 files instead of 13`, `1000 bytes instead of 2000`."""
    for name in ("files", "bytes"):
        if usual[name] != odd[name]:
            yield f"{odd[name]} {name} instead of {usual[name]}"


COMPARED_FOLDERS = {
    "code": (
        _changed_files,
        "drumline launch --sync copies the code first; or use git pull or rsync",
    ),
    "data": (_changed_sizes, "copy it again, or mount the same volume"),
}


# From the start to the findings


@dataclass(frozen=True)
class DoctorOptions:
    """What is checked on every host."""

    settings: HostSettings
    with_collectives: bool = True
    procs: int | None = None
    """Ranks of each host in the collectives; None: one for each GPU, or one."""
    backend: Backend = "auto"


@dataclass
class DoctorResult:
    """All that a check of several hosts has shown."""

    survey: Survey
    findings: list[Finding] = field(default_factory=list)
    collectives: list[RankOutcome] | None = None

    @property
    def exit_code(self) -> ExitCode:
        """Whether the hosts are ready to train."""
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
    """From any machine that reaches the hosts by ssh: the doctor's program is started on each, and ends
    with the check."""
    survey = Survey([HostRecord(host.name, host.address) for host in hosts], port)
    ssh = [*client, "-o", f"ConnectTimeout={SSH_CONNECT_S}"]
    command = remote_module(NODE_SERVER, python, None)
    cwd = Path.cwd()
    start_times = StartTimes(START_S, MAX_START_S)

    clients = []
    for host in hosts:
        words = ssh_words(ssh, host, command, cwd=cwd)
        connection = HostConnection(host, words, START_S, start_times=start_times)
        clients.append(NodeClient(connection, python=python))

    slots = {number: host.slots for number, host in enumerate(hosts)}

    return await _examine(survey, clients, options, slots, progress)


async def check_as_node_zero(
    node: NodeOptions, options: DoctorOptions, progress: Progress
) -> DoctorResult:
    """As node 0, which the other nodes connect to.

    Nodes that have not joined in time are absent, and the others are checked.
    """
    rendezvous = DoctorRendezvous(node)
    await rendezvous.wait(progress)
    hosts = [HostRecord("node 0", node.master, address=rendezvous.address)]
    hosts += [_joined_host(number, rendezvous) for number in range(1, node.nodes)]
    here = HostConnection(Host("node 0"), [sys.executable, "-m", NODE_SERVER], START_S)
    joined = [rendezvous.joined.get(number) for number in range(1, node.nodes)]
    clients = [NodeClient(here), *joined]

    return await _examine(Survey(hosts, node.port, by_ssh=False), clients, options, {}, progress)


def _joined_host(number: int, rendezvous: DoctorRendezvous) -> HostRecord:
    """The record of a node, marked absent if it has not joined: `it did not connect to 10.0.0.4:29500
    within 60 s`."""
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
    """The survey, then the collectives, if no pair of hosts has a problem.

    An interrupted check sends the hosts no result, and they report that.
    """
    settings = options.settings
    # The variables that `drumline launch` passes to ranks on other hosts.
    sent = replace(settings, environment=variables_for_ranks([], settings.environment))
    coordinator = Coordinator(survey, clients, sent, progress)
    result = DoctorResult(survey)

    ending: JsonObject = {}
    try:
        await examine(coordinator)
        network = pair_findings(survey)
        facts = check_facts(survey)

        if options.with_collectives and not has_problems(network):
            procs = {}
            for number in survey.present():
                num_gpus = num_visible_gpus(survey.hosts[number].facts or {})
                procs[number] = slots.get(number) or options.procs or num_gpus or 1

            result.collectives = await collectives_on_hosts(coordinator, procs, options.backend)
            names = {host.hostname: host.name for host in survey.hosts}
            network = [*pair_findings(survey), *collective_findings(result.collectives, names)]

        result.findings = [*network, *facts]
        ending = {"result": result_line(result.findings), "code": int(result.exit_code)}
    finally:
        await coordinator.close(**ending)  # an interrupted check has no result

    return result


async def collectives_on_hosts(
    coordinator: Coordinator, procs: Mapping[int, int], backend: Backend
) -> list[RankOutcome]:
    """One process group over all hosts: the outcome of each rank, in the order of ranks.

    `procs`: how many ranks each host has."""
    survey = coordinator.survey
    world_size = sum(procs.values())
    coordinator.progress(f"a process group of {plural(world_size, 'rank')}")
    await coordinator.ask_all("close", ANSWER_S, {number: {} for number in procs}, object)

    first = survey.hosts[min(procs)]
    address = str(first.called if survey.by_ssh else first.address)

    requests: dict[int, JsonObject] = {}
    first_rank = 0
    for number, num_procs in procs.items():
        ranks = HostRanks(
            first_rank,
            num_procs,
            world_size,
            address,
            survey.rendezvous_port,
            LIMIT_S,
            backend,
        )
        requests[number] = asdict(ranks)
        first_rank += num_procs

    limit_s = LIMIT_S + ANSWER_MARGIN_S
    answers = await coordinator.ask_all("collectives", limit_s, requests, list[RankOutcome])
    return [
        {"host": survey.hosts[number].name, **outcome}
        for number, outcomes in sorted(answers.items())
        for outcome in outcomes
    ]


def check_facts(survey: Survey) -> list[Finding]:
    """What is wrong with each host, and what differs across them.

    A host whose facts cannot be read has another version of drumline, and is left out of comparisons.
    """
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
