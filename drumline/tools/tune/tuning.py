"""Which variables of NCCL, gloo and OpenMP a cluster needs, each with its reason: those that the
doctor's findings call for, and a few that follow from its facts and measurements. Everything else
is better left to NCCL."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.base.text import bit_rate, join_names
from drumline.net.interfaces import NCCL_LAST, NCCL_VARIABLE
from drumline.tools.doctor.finding import Fault, Finding, VariableFix
from drumline.tools.doctor.machine.machine_checks import num_visible_gpus
from drumline.tools.doctor.pairs.pair_checks import edges_into, working_address
from drumline.tools.doctor.pairs.survey import OPEN, Survey

# For these NCCL opens several connections by itself: AWS and Google Cloud.
KNOWN_VENDORS = ("0x1d0f", "0x1ae0")
FAST_GBIT = 25.0
# What one connection carries of a link, if nothing limits it.
FULL_SHARE = 0.7
# what the manual of NCCL gives for 100 Gbit/s; with MAX_PER_THREAD its limit of 64 connections
SOCKET_THREADS = 4
MAX_PER_THREAD = 16
GBIT = 1e9 / 8
PLUGIN = "libnccl-net.so"
# One value is right for every host, whatever its cards and processors.
CLUSTER_WIDE = ("NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TunedVariable:
    """A variable, for all hosts or for some, and why."""

    name: str
    value: str | None  # None: to unset
    reason: str
    hosts: tuple[str, ...] = ()  # as `hostname` prints them; empty: all

    def line(self) -> str:
        """A line for a shell."""
        command = str(VariableFix(self.name, self.value))
        if self.hosts:
            names = "|".join(map(shlex.quote, self.hosts))
            command = f'case "$(hostname)" in {names}) {command};; esac'
        return f"{command}  # {self.reason}"


def tuned_variables(findings: Sequence[Finding], hosts: Mapping[str, Facts]) -> list[TunedVariable]:
    """One for each variable and value, from findings whose fix is a variable; for a host the first
    one counts. `hosts`: the facts, by the name that findings have."""
    chosen: dict[str, dict[str, Finding]] = {}
    for finding in findings:
        if finding.variable is not None and finding.level != "note":
            chosen.setdefault(finding.variable.name, {}).setdefault(finding.where, finding)
    return [
        variable
        for name, findings_of_host in chosen.items()
        for variable in _variables_of(name, findings_of_host, hosts)
    ]


def _variables_of(
    name: str, findings_of_host: Mapping[str, Finding], hosts: Mapping[str, Facts]
) -> Iterator[TunedVariable]:
    """One for each value that hosts need of a variable."""
    hosts_by_value: dict[str | None, list[str]] = {}
    for host, finding in findings_of_host.items():
        value = finding.variable.value if finding.variable else None
        hosts_by_value.setdefault(value, []).append(host)
    for value, needing in hosts_by_value.items():
        reason = findings_of_host[needing[0]].what
        # Where only some hosts need it, and it changes nothing or is right on all of the others, it
        # is set on all.
        if len(hosts_by_value) == 1 and all(
            host in needing or _fits(facts, name, value) for host, facts in hosts.items()
        ):
            some = f"{join_names(needing)}: " if len(needing) < len(hosts) else ""
            yield TunedVariable(name=name, value=value, reason=f"{some}{reason}")
        else:
            host_names = [str(hosts[host]["host"]) if host in hosts else host for host in needing]
            yield TunedVariable(name=name, value=value, reason=reason, hosts=tuple(host_names))


def _fits(facts: Facts, name: str, value: str | None) -> bool:
    """Whether a host that does not need a variable may have it."""
    if not name.endswith("_SOCKET_IFNAME"):
        return value is None or name in CLUSTER_WIDE
    library = name.partition("_")[0].lower()
    return value is not None and bool(facts[f"{library}_interface"] == value.removeprefix("="))


def tuning_findings(hosts: Mapping[str, Facts], survey: Survey | None = None) -> list[Finding]:
    """What is not wrong but could be faster, or would be wrong with NCCL on several hosts."""
    rules = [*_threads(hosts), *_efa(hosts), *_infiniband(hosts)]
    if survey is not None and len(hosts) > 1:
        rules += [*_nccl_interfaces(hosts, survey), *_sockets(hosts, survey)]
    return rules


def _threads(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Threads are counted from all processors, whatever a container or a scheduler allows."""
    for host, facts in hosts.items():
        cpus = facts["cpus"]
        ranks = max(1, num_visible_gpus(facts))
        threads = facts["threads"] or ""
        usable = int(min(cpus["usable"], cpus["quota"] or cpus["usable"]))
        fix = VariableFix("OMP_NUM_THREADS", str(max(1, usable // ranks)))
        if threads.isdigit() and int(threads) * ranks > max(usable, ranks):
            what = (
                f"{ranks} ranks with OMP_NUM_THREADS={threads} are more threads than the {usable} "
                "processors it may use"
            )
            yield Finding.of_fault("threads", host, Fault("warning", what, fix))
        elif not threads and usable < cpus["count"]:
            what = (
                f"a process may use {usable} of {cpus['count']} processors, and would start a thread "
                "for each of them"
            )
            yield Finding.of_fault("threads", host, Fault("warning", what, fix))


def _efa(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """NCCL loads EFA's plugin if it is called PLUGIN; since its version 1.6 the plugin chooses EFA
    by itself."""
    for host, facts in _with_gpus(hosts).items():
        name = Path(facts["cards"]["nccl_plugin"] or "").name
        if not _cards(facts, "EFA"):
            continue
        if not name:
            what = f"EFA is there, but not its NCCL plugin ({PLUGIN}): NCCL uses TCP, many times slower"
            fix = (
                "install aws-ofi-nccl (/opt/amazon/ofi-nccl), and add its folder to LD_LIBRARY_PATH"
            )
            yield Finding("problem", "EFA", host, what, fix)
        elif name != PLUGIN and "NCCL_NET_PLUGIN" not in facts["variables"]:
            what = (
                f"EFA's plugin is called {name}, and NCCL looks for {PLUGIN} only: it would use TCP"
            )
            short = name.removeprefix("libnccl-net-").removesuffix(".so")
            variable = VariableFix("NCCL_NET_PLUGIN", short)
            yield Finding.of_fault("EFA", host, Fault("warning", what, variable))


def _infiniband(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """NCCL connects only cards of one kind, and only hosts that all have some."""
    gpu_hosts = _with_gpus(hosts)
    infiniband = {host: _cards(facts, "InfiniBand") for host, facts in gpu_hosts.items()}
    roce = {host: _cards(facts, "RoCE") for host, facts in gpu_hosts.items()}
    have = [host for host in gpu_hosts if infiniband[host] or roce[host]]
    lack = [host for host in gpu_hosts if host not in have]
    if have and lack:
        what = (
            f"{join_names(have)} can use InfiniBand or RoCE, but {join_names(lack)} cannot: no "
            "card has an active port"
        )
        yield from _on_each(hosts, "InfiniBand", what, VariableFix("NCCL_IB_DISABLE", "1"))
        return
    usable = infiniband if all(infiniband.values()) else roce
    for host in have:
        if infiniband[host] and roce[host]:
            kinds = (
                f"InfiniBand ({join_names(infiniband[host])}) and RoCE ({join_names(roce[host])})"
            )
            what = f"NCCL cannot connect {kinds}: cards of one kind only"
            fix = VariableFix("NCCL_IB_HCA", f"={','.join(usable[host])}")
            yield Finding.of_fault("InfiniBand", host, Fault("warning", what, fix))


def _nccl_interfaces(hosts: Mapping[str, Facts], survey: Survey) -> Iterator[Finding]:
    """NCCL uses all interfaces but bridges of containers and the loopback, also those that no other
    host reaches."""
    for number in survey.present():
        host = survey.hosts[number]
        works = working_address(survey, number)
        name = host.interface_of(works)
        if name is None or host.name not in _with_gpus(hosts) or NCCL_VARIABLE in host.variables:
            continue
        unreached = _unreached_interfaces(survey, number)
        if unreached:
            names = [interface["name"] for interface in host.interfaces]
            is_prefix = any(longer.startswith(name) and longer != name for longer in names)
            fix = VariableFix(NCCL_VARIABLE, f"={name}" if is_prefix else name)
            what = f"NCCL would also use {join_names(unreached)}, which no other host reaches; {name} ({works}) works"
            yield Finding.of_fault("interface", host.name, Fault("warning", what, fix))


def _unreached_interfaces(survey: Survey, number: int) -> list[str]:
    """Those of a host that NCCL would use and no other host reaches: `eth1 (10.1.0.1)`."""
    interfaces = survey.hosts[number].interfaces
    outcomes: dict[str, set[str]] = {}
    for edge in edges_into(survey, number):
        for address, outcome in (edge.others or {}).items():
            outcomes.setdefault(address, set()).add(outcome)
    # With IP over InfiniBand it uses that alone.
    over_ib = [
        interface
        for interface in interfaces
        if interface["name"].startswith("ib") and interface["is_up"] and interface["address"]
    ]
    usable = over_ib or [
        interface for interface in interfaces if not interface["name"].startswith(NCCL_LAST)
    ]
    return [
        f"{interface['name']} ({interface['address']})"
        for interface in usable
        if OPEN not in outcomes.get(str(interface["address"]), {OPEN})
    ]


def _sockets(hosts: Mapping[str, Facts], survey: Survey) -> Iterator[Finding]:
    """Over TCP NCCL opens one connection between two GPUs, which may not fill a fast link."""
    gpu_hosts = _with_gpus(hosts)
    if len(gpu_hosts) < 2 or all(facts["cards"]["rdma"] for facts in gpu_hosts.values()):
        return
    links = []
    present = [survey.hosts[number] for number in survey.present()]
    for host in present:
        if host.name not in gpu_hosts:
            continue
        link = gpu_hosts[host.name]["cards"]["interfaces"].get(host.interface_of(host.address), {})
        if not link.get("gbit") or link["gbit"] < FAST_GBIT or link["vendor"] in KNOWN_VENDORS:
            return
        links.append(link["gbit"])
    measured = survey.usual_speed()
    slowest = min(links, default=0.0) * GBIT
    if not 0 < measured < FULL_SHARE * slowest:
        return
    what = f"one connection carries {bit_rate(measured)} of the link's {bit_rate(slowest)}, and there is no InfiniBand"
    per_thread = min(MAX_PER_THREAD, math.ceil(slowest / measured / SOCKET_THREADS))
    yield from _on_each(
        hosts, "sockets", what, VariableFix("NCCL_SOCKET_NTHREADS", str(SOCKET_THREADS))
    )
    if per_thread > 1:
        connections = f"{SOCKET_THREADS * per_thread} connections fill the link"
        yield from _on_each(
            hosts, "sockets", connections, VariableFix("NCCL_NSOCKS_PERTHREAD", str(per_thread))
        )


def _on_each(
    hosts: Mapping[str, Facts], check: str, what: str, fix: VariableFix
) -> Iterator[Finding]:
    return (Finding.of_fault(check, host, Fault("warning", what, fix)) for host in hosts)


def _with_gpus(hosts: Mapping[str, Facts]) -> dict[str, Facts]:
    """NCCL is used only there; hosts with another version of drumline report no cards."""
    return {host: facts for host, facts in hosts.items() if facts["gpus"] and "cards" in facts}


def _cards(facts: Facts, kind: str) -> list[str]:
    return [card["name"] for card in facts["cards"]["rdma"] if card["kind"] == kind]
