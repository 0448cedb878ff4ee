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
from drumline.tools.doctor.finding import Finding, VariableFix
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
CLUSTER_WIDE = ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")

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
    tuned = []
    for name, found in chosen.items():
        by_value: dict[str | None, list[str]] = {}
        for host, finding in found.items():
            by_value.setdefault(finding.variable.value if finding.variable else None, []).append(
                host
            )
        for value, names in by_value.items():
            # Where only some hosts need it, and it changes nothing or is right on all of the
            # others, it is set on all.
            fits_all = len(by_value) == 1 and all(
                host in found or _fits(hosts[host], name, value) for host in hosts
            )
            known = tuple(str(hosts[host]["host"]) if host in hosts else host for host in names)
            some = f"{join_names(names)}: " if fits_all and len(names) < len(hosts) else ""
            reason = f"{some}{found[names[0]].what}"
            tuned.append(
                TunedVariable(
                    name=name, value=value, reason=reason, hosts=() if fits_all else known
                )
            )
    return tuned


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
        given = facts["threads"] or ""
        usable = int(min(cpus["usable"], cpus["quota"] or cpus["usable"]))
        fix = VariableFix("OMP_NUM_THREADS", str(max(1, usable // ranks)))
        if given.isdigit() and int(given) * ranks > max(usable, ranks):
            what = (
                f"{ranks} ranks with OMP_NUM_THREADS={given} are more threads than the {usable} "
                "processors it may use"
            )
            yield Finding.of_fault("threads", host, ("warning", what, fix))
        elif not given and usable < cpus["count"]:
            what = (
                f"a process may use {usable} of {cpus['count']} processors, and would start a thread "
                "for each of them"
            )
            yield Finding.of_fault("threads", host, ("warning", what, fix))


def _efa(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """NCCL loads EFA's plugin if it is called PLUGIN; since its version 1.6 the plugin chooses EFA
    by itself."""
    gpu_hosts = _with_gpus(hosts)
    have = [host for host, facts in gpu_hosts.items() if _cards(facts, "EFA")]
    plugins = {host: Path(hosts[host]["cards"]["nccl_plugin"] or "").name for host in have}
    lack = [host for host in gpu_hosts if host not in have]
    without = [host for host in have if not plugins[host]]
    if lack and any(plugins.values()):
        what = f"NCCL would use EFA on {join_names(have)} and TCP on {join_names(lack)}, and not connect them"
        yield from _on_each(hosts, "EFA", what, VariableFix("NCCL_NET", "Socket"))
    elif without and not lack:
        what = f"EFA is there, but not its NCCL plugin ({PLUGIN}): NCCL uses TCP, many times slower"
        fix = "install aws-ofi-nccl (/opt/amazon/ofi-nccl), and add its folder to LD_LIBRARY_PATH"
        yield Finding("problem", "EFA", join_names(without), what, fix)
    else:
        for host, name in plugins.items():
            if name not in (PLUGIN, "") and "NCCL_NET_PLUGIN" not in hosts[host]["variables"]:
                what = f"EFA's plugin is called {name}, and NCCL looks for {PLUGIN} only: it would use TCP"
                named = VariableFix(
                    "NCCL_NET_PLUGIN", name.removeprefix("libnccl-net-").removesuffix(".so")
                )
                yield Finding.of_fault("EFA", host, ("warning", what, named))


def _infiniband(hosts: Mapping[str, Facts]) -> Iterator[Finding]:
    """NCCL connects only cards of one kind, and only hosts that all have some."""
    kinds = {
        host: {kind: names for kind in ("InfiniBand", "RoCE") if (names := _cards(facts, kind))}
        for host, facts in _with_gpus(hosts).items()
    }
    have = [host for host, found in kinds.items() if found]
    if not have:
        return
    if lack := [host for host in kinds if host not in have]:
        what = (
            f"{join_names(have)} can use InfiniBand or RoCE, but {join_names(lack)} cannot: no "
            "card has an active port"
        )
        yield from _on_each(hosts, "InfiniBand", what, VariableFix("NCCL_IB_DISABLE", "1"))
        return
    shared = [
        kind for kind in ("InfiniBand", "RoCE") if all(kind in found for found in kinds.values())
    ]
    if not shared:
        on = {
            kind: join_names(host for host in kinds if kind in kinds[host])
            for kind in ("InfiniBand", "RoCE")
        }
        what = f"NCCL cannot connect InfiniBand ({on['InfiniBand']}) with RoCE ({on['RoCE']}): no kind is on every host"
        yield from _on_each(hosts, "InfiniBand", what, VariableFix("NCCL_IB_DISABLE", "1"))
        return
    for host, found in kinds.items():
        if len(found) > 1:
            what = f"NCCL cannot connect {join_names(f'{kind} ({join_names(found[kind])})' for kind in found)}"
            fix = VariableFix("NCCL_IB_HCA", f"={','.join(found[shared[0]])}")
            yield Finding.of_fault(
                "InfiniBand", host, ("warning", f"{what}: cards of one kind only", fix)
            )


def _nccl_interfaces(hosts: Mapping[str, Facts], survey: Survey) -> Iterator[Finding]:
    """NCCL uses all interfaces but bridges of containers and the loopback, also those that no other
    host reaches."""
    for number in survey.present():
        host = survey.hosts[number]
        works = working_address(survey, number)
        name = host.interface_of(works)
        if name is None or host.name not in _with_gpus(hosts) or NCCL_VARIABLE in host.variables:
            continue
        outcomes: dict[str, set[str]] = {}
        for edge in edges_into(survey, number):
            for address, outcome in (edge.others or {}).items():
                outcomes.setdefault(address, set()).add(outcome)
        # With IP over InfiniBand it uses that alone.
        over_ib = [
            one
            for one in host.interfaces
            if one["name"].startswith("ib") and one["is_up"] and one["address"]
        ]
        usable = over_ib or [
            one for one in host.interfaces if not one["name"].startswith(NCCL_LAST)
        ]
        unreached = [one for one in usable if OPEN not in outcomes.get(str(one["address"]), {OPEN})]
        used = [f"{one['name']} ({one['address']})" for one in unreached]
        if used:
            is_prefix = any(
                one["name"].startswith(name) and one["name"] != name for one in host.interfaces
            )
            fix = VariableFix(NCCL_VARIABLE, f"={name}" if is_prefix else name)
            what = f"NCCL would also use {join_names(used)}, which no other host reaches; {name} ({works}) works"
            yield Finding.of_fault("interface", host.name, ("warning", what, fix))


def _sockets(hosts: Mapping[str, Facts], survey: Survey) -> Iterator[Finding]:
    """Over TCP NCCL opens one connection between two GPUs, which may not fill a fast link."""
    gpu_hosts = _with_gpus(hosts)
    links = []
    if len(gpu_hosts) < 2 or all(facts["cards"]["rdma"] for facts in gpu_hosts.values()):
        return
    for host in (
        survey.hosts[number]
        for number in survey.present()
        if survey.hosts[number].name in gpu_hosts
    ):
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
        more = f"{SOCKET_THREADS * per_thread} connections fill the link"
        yield from _on_each(
            hosts, "sockets", more, VariableFix("NCCL_NSOCKS_PERTHREAD", str(per_thread))
        )


def _on_each(
    hosts: Mapping[str, Facts], check: str, what: str, fix: VariableFix
) -> Iterator[Finding]:
    return (Finding.of_fault(check, host, ("warning", what, fix)) for host in hosts)


def _with_gpus(hosts: Mapping[str, Facts]) -> dict[str, Facts]:
    """NCCL is used only there; hosts with another version of drumline report no cards."""
    return {host: facts for host, facts in hosts.items() if facts["gpus"] and "cards" in facts}


def _cards(facts: Facts, kind: str) -> list[str]:
    return [card["name"] for card in facts["cards"]["rdma"] if card["kind"] == kind]
