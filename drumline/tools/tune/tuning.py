"""Which variables of NCCL, gloo and OpenMP a cluster needs, each with its reason: those that the
doctor's findings call for, and a few that follow from its facts and measurements. Everything else
is better left to NCCL.

    export NCCL_SOCKET_IFNAME=eth0  # NCCL would also use docker0 (172.17.0.1), ...
    export OMP_NUM_THREADS=8  # a process may use 8 of 64 processors, and would start a thread ...
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.base.text import bit_rate, join_names
from drumline.net.interfaces import NCCL_LAST, NCCL_VARIABLE
from drumline.tools.doctor.finding import Finding, VariableFix
from drumline.tools.doctor.machine.machine_checks import num_visible_gpus
from drumline.tools.doctor.machine.machine_facts import Facts, HostFacts
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
NO_INFINIBAND = VariableFix("NCCL_IB_DISABLE", "1")
# One value is right for every host, whatever its cards and processors.
CLUSTER_WIDE = ("NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")


@dataclass(frozen=True, kw_only=True)
class TunedVariable:
    """A variable, for all hosts or for some, and why."""

    name: str
    value: str | None
    """None: to unset."""
    reason: str
    hosts: tuple[str, ...] = ()
    """As `hostname` prints them; empty: all."""

    def line(self) -> str:
        """A line for a shell, for all hosts or for some:

        export NCCL_SOCKET_IFNAME=eth0  # NCCL would also use docker0 (172.17.0.1), ...
        case "$(hostname)" in a|b) export OMP_NUM_THREADS=8;; esac  # a process may use 8 of ...
        """
        command = str(VariableFix(self.name, self.value))
        if self.hosts:
            names = "|".join(map(shlex.quote, self.hosts))
            command = f'case "$(hostname)" in {names}) {command};; esac'

        return f"{command}  # {self.reason}"


def tuned_variables(findings: Sequence[Finding], hosts: HostFacts) -> list[TunedVariable]:
    """One for each variable and value, from findings whose fix is a variable; for a host the first
    one counts.

    `hosts`: the facts, by the name that findings have."""
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
    name: str,
    findings_of_host: Mapping[str, Finding],
    hosts: HostFacts,
) -> Iterator[TunedVariable]:
    """One for each value that hosts need of a variable."""
    hosts_by_value: dict[str | None, list[str]] = {}
    for host, finding in findings_of_host.items():
        value = finding.variable.value if finding.variable else None
        hosts_by_value.setdefault(value, []).append(host)

    for value, needing in hosts_by_value.items():
        reason = findings_of_host[needing[0]].what
        without = [host for host in hosts if host not in needing]
        host_names: list[str] = []

        # Where only some hosts need it, and it changes nothing or is right on all of the others, it
        # is set on all.
        fits_all = all(_fits(hosts[host], name, value) for host in without)
        if len(hosts_by_value) > 1 or not fits_all:
            host_names = [hosts[host]["host"] if host in hosts else host for host in needing]
        elif without:
            reason = f"{join_names(needing)}: {reason}"

        yield TunedVariable(name=name, value=value, reason=reason, hosts=tuple(host_names))


def _fits(facts: Facts, name: str, value: str | None) -> bool:
    """Whether a host that does not need a variable may have it."""
    if not name.endswith("_SOCKET_IFNAME"):
        return value is None or name in CLUSTER_WIDE

    library = name.partition("_")[0].lower()
    interface = facts[f"{library}_interface"]
    return interface is not None and value in (interface, f"={interface}")


def tuning_findings(hosts: HostFacts, survey: Survey | None = None) -> list[Finding]:
    """What is not wrong but could be faster, or would be wrong with NCCL on several hosts."""
    # NCCL is used only with GPUs; hosts with another version of drumline report no cards.
    gpu_hosts = {host: facts for host, facts in hosts.items() if facts["gpus"] and "cards" in facts}
    findings = [*_threads(hosts), *_efa(gpu_hosts)]

    if cause := _missing_infiniband(gpu_hosts):
        findings += [_warning("InfiniBand", host, cause, NO_INFINIBAND) for host in hosts]
    else:
        findings += _mixed_cards(gpu_hosts)

    if survey is not None and len(hosts) > 1:
        findings += _nccl_interfaces(gpu_hosts, survey)
        for what, variable in _sockets(gpu_hosts, survey):
            findings += [_warning("sockets", host, what, variable) for host in hosts]

    return findings


def _warning(
    check: str,
    host: str,
    what: str,
    variable: VariableFix,
) -> Finding:
    """A variable that would help a host; the fix is the line that sets it."""
    return Finding("warning", check, host, what, str(variable), variable=variable)


def _threads(hosts: HostFacts) -> Iterator[Finding]:
    """Threads are counted from all processors, whatever a container or a scheduler allows:

    8 ranks with OMP_NUM_THREADS=16 are more threads than the 64 processors it may use
    """
    for host, facts in hosts.items():
        cpus = facts["cpus"]
        ranks = max(1, num_visible_gpus(facts))
        usable = int(min(cpus["usable"], cpus["quota"] or cpus["usable"]))
        what = _too_many_threads(facts["threads"] or "", ranks, usable, cpus["count"])

        if what is not None:
            fix = VariableFix("OMP_NUM_THREADS", str(max(1, usable // ranks)))
            yield _warning("threads", host, what, fix)


def _too_many_threads(threads: str, ranks: int, usable: int, count: int) -> str | None:
    """Whether the ranks of a host start more threads than it has processors for them.

    `threads`: OMP_NUM_THREADS, empty where it is not set; `usable`: of `count` processors."""
    if not threads and usable < count:
        return (
            f"a process may use {usable} of {count} processors, and would start a thread "
            "for each of them"
        )

    if threads.isdigit() and int(threads) * ranks > max(usable, ranks):
        return (
            f"{ranks} ranks with OMP_NUM_THREADS={threads} are more threads than the {usable} "
            "processors it may use"
        )

    return None


def _efa(hosts: HostFacts) -> Iterator[Finding]:
    """NCCL loads EFA's plugin if it is called PLUGIN; since its version 1.6 the plugin chooses EFA
    by itself."""
    for host, facts in hosts.items():
        if not _cards(facts, "EFA"):
            continue

        name = Path(facts["cards"]["nccl_plugin"] or "").name
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
            yield _warning("EFA", host, what, VariableFix("NCCL_NET_PLUGIN", short))


def _missing_infiniband(hosts: HostFacts) -> str | None:
    """NCCL connects only hosts that all have such cards: `a and b can use InfiniBand or RoCE, but c
    cannot: no card has an active port`; None: all have them, or none."""
    have = [host for host, facts in hosts.items() if _cards(facts, "InfiniBand", "RoCE")]
    lack = [host for host in hosts if host not in have]
    if not have or not lack:
        return None

    return (
        f"{join_names(have)} can use InfiniBand or RoCE, but {join_names(lack)} cannot: no "
        "card has an active port"
    )


def _mixed_cards(hosts: HostFacts) -> Iterator[Finding]:
    """NCCL connects only cards of one kind: `NCCL cannot connect InfiniBand (mlx5_0) and RoCE (mlx5_1):
    cards of one kind only`."""
    all_have_infiniband = all(_cards(facts, "InfiniBand") for facts in hosts.values())
    for host, facts in hosts.items():
        infiniband = _cards(facts, "InfiniBand")
        roce = _cards(facts, "RoCE")
        if infiniband and roce:
            kinds = f"InfiniBand ({join_names(infiniband)}) and RoCE ({join_names(roce)})"
            what = f"NCCL cannot connect {kinds}: cards of one kind only"
            usable = infiniband if all_have_infiniband else roce
            fix = VariableFix("NCCL_IB_HCA", f"={','.join(usable)}")
            yield _warning("InfiniBand", host, what, fix)


def _nccl_interfaces(hosts: HostFacts, survey: Survey) -> Iterator[Finding]:
    """NCCL uses all interfaces but bridges of containers and the loopback, also those that no other
    host reaches.

    NCCL would also use docker0 (172.17.0.1), which no other host reaches; eth0 (10.0.0.4) works
    """
    for number in survey.present():
        host = survey.hosts[number]
        works = working_address(survey, number)
        name = host.interface_of(works)
        if name is None or host.name not in hosts or NCCL_VARIABLE in host.variables:
            continue

        unreached = _unreached_interfaces(survey, number)
        if not unreached:
            continue

        # NCCL takes a name for a prefix: `eth1` is `eth10`, too.
        names = [interface["name"] for interface in host.interfaces]
        is_prefix = any(longer.startswith(name) and longer != name for longer in names)
        fix = VariableFix(NCCL_VARIABLE, f"={name}" if is_prefix else name)
        what = f"NCCL would also use {join_names(unreached)}, which no other host reaches; {name} ({works}) works"
        yield _warning("interface", host.name, what, fix)


def _unreached_interfaces(survey: Survey, number: int) -> list[str]:
    """Those of a host that NCCL would use and no other host reaches: `eth1 (10.1.0.1)`."""
    tried: set[str] = set()
    reached: set[str] = set()
    for edge in edges_into(survey, number):
        for address, outcome in (edge.others or {}).items():
            tried.add(address)
            if outcome == OPEN:
                reached.add(address)

    return [
        f"{interface['name']} ({interface['address']})"
        for interface in _nccl_choice(survey.hosts[number].interfaces)
        if interface["address"] in tried - reached
    ]


def _nccl_choice(interfaces: Sequence[Facts]) -> list[Facts]:
    """The interfaces that NCCL uses by itself: with IP over InfiniBand that alone."""
    over_ib = [
        interface
        for interface in interfaces
        if interface["name"].startswith("ib") and interface["is_up"] and interface["address"]
    ]
    if over_ib:
        return over_ib

    return [interface for interface in interfaces if not interface["name"].startswith(NCCL_LAST)]


def _sockets(hosts: HostFacts, survey: Survey) -> Iterator[tuple[str, VariableFix]]:
    """Over TCP NCCL opens one connection between two GPUs, which may not fill a fast link: what is
    seen of that, and the variable that adds connections.

    one connection carries 9.4 Gbit/s of the link's 100 Gbit/s, and there is no InfiniBand
    16 connections fill the link
    """
    if len(hosts) < 2 or all(facts["cards"]["rdma"] for facts in hosts.values()):
        return

    slowest_gbit = _slowest_gbit(hosts, survey)
    if slowest_gbit < FAST_GBIT:
        return

    slowest = slowest_gbit * GBIT
    measured = survey.usual_speed()
    if not 0 < measured < FULL_SHARE * slowest:
        return

    what = f"one connection carries {bit_rate(measured)} of the link's {bit_rate(slowest)}, and there is no InfiniBand"
    yield what, VariableFix("NCCL_SOCKET_NTHREADS", str(SOCKET_THREADS))

    per_thread = min(MAX_PER_THREAD, math.ceil(slowest / measured / SOCKET_THREADS))
    if per_thread > 1:
        what = f"{SOCKET_THREADS * per_thread} connections fill the link"
        yield what, VariableFix("NCCL_NSOCKS_PERTHREAD", str(per_thread))


def _slowest_gbit(hosts: HostFacts, survey: Survey) -> float:
    """The rate of the slowest card by which hosts reach each other; 0: not known, or NCCL opens
    several connections on these by itself."""
    links = [
        hosts[host.name]["cards"]["interfaces"].get(host.interface_of(host.address), {})
        for host in survey.hosts
        if host.absent is None and host.name in hosts
    ]
    if any(link.get("vendor") in KNOWN_VENDORS for link in links):
        return 0.0

    return min((link.get("gbit") or 0.0 for link in links), default=0.0)


def _cards(facts: Facts, *kinds: str) -> list[str]:
    """The names of the cards of these kinds."""
    return [card["name"] for card in facts["cards"]["rdma"] if card["kind"] in kinds]
