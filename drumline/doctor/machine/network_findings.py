"""What is wrong with a machine's name and its choice of network, before anything is sent to anyone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.doctor.finding import Finding, Level
from drumline.net.interfaces import GLOO_VARIABLE, NCCL_VARIABLE
from drumline.text import join_names

# Bridges of containers and virtual machines: other hosts are not on them.
INNER = ("docker", "br-", "virbr", "veth", "cni", "podman", "lxcbr", "lxdbr")


def network_findings(facts: Mapping[str, Any], *, many_hosts: bool) -> Iterator[Finding]:
    """For a job on this machine alone the loopback is as good as any network."""
    yield from _name(facts, many_hosts)
    yield from _choice(facts, "gloo", GLOO_VARIABLE, many_hosts)
    if facts["gpus"] or NCCL_VARIABLE in facts["variables"]:
        yield from _choice(facts, "NCCL", NCCL_VARIABLE, many_hosts)


def _name(facts: Mapping[str, Any], many_hosts: bool) -> Iterator[Finding]:
    host = facts["host"]
    if facts["name_error"]:
        yield Finding(
            level="problem" if many_hosts else "warning",
            check="host name",
            where=host,
            what=f"its own name does not resolve here ({facts['name_error']}); torchrun and gloo look it up",
            fix=f"add a line to /etc/hosts: {_own_address(facts) or 'ADDRESS'} {host}",
        )
    elif many_hosts and all(address.startswith("127.") for address in facts["addresses"]):
        yield Finding(
            level="warning",
            check="host name",
            where=host,
            what=f"its own name leads to {facts['addresses'][0]}, where no other host can reach it",
            fix=f"in /etc/hosts, let {host} be {_own_address(facts) or 'its address'}",
        )


def _choice(facts: Mapping[str, Any], library: str, variable: str, many_hosts: bool) -> Iterator[Finding]:
    chosen = facts["nccl_interface" if library == "NCCL" else "gloo_interface"]
    told = facts["variables"].get(variable)
    usable = [one for one in facts["interfaces"] if one["address"]]
    found = next((one for one in usable if one["name"] == chosen), None)
    if found is None:
        if told is not None:
            yield _finding(
                facts,
                "problem",
                f"{variable}={told} names no network of this host; there are "
                f"{join_names([one['name'] + ' ' + one['address'] for one in usable])}",
                _fix(facts, variable),
            )
        return
    reason = f"{variable}={told}" if told is not None else f"{variable} is not set"
    leads_out = _outer(facts)
    if found["address"].startswith("127."):
        level: Level = "problem" if many_hosts else "note"
        what = f"{library} would take the loopback ({chosen}; {reason}), which leads to no other host"
    elif chosen.startswith(INNER):
        level = "problem" if many_hosts else "warning"
        what = f"{library} would take {chosen} {found['address']} ({reason}), a bridge inside this host"
    else:
        return
    if leads_out is None and not many_hosts:
        return  # a machine without a network
    yield _finding(facts, level, what, _fix(facts, variable))


def _fix(facts: Mapping[str, Any], variable: str) -> str:
    outer = _outer(facts)
    return f"export {variable}={outer['name'] if outer else 'NAME'}"


def _outer(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first network that leads to other hosts, by its looks."""
    for one in facts["interfaces"]:
        address = one["address"] or "127."
        if one["is_up"] and not address.startswith("127.") and not one["name"].startswith(INNER):
            found: dict[str, Any] = one
            return found
    return None


def _own_address(facts: Mapping[str, Any]) -> str | None:
    outer = _outer(facts)
    return outer["address"] if outer else None


def _finding(facts: Mapping[str, Any], level: Level, what: str, fix: str) -> Finding:
    return Finding(level=level, check="network", where=facts["host"], what=what, fix=fix)
