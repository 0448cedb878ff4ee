"""DL141: the address of the first node is a name that a container cannot resolve."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.environment import variable
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import LOOPBACK, address_flag, host_of
from drumline_lint.reading.shell import Container, Script, TextRange
from drumline_lint.reading.shell_parser import Kind

RULE = rule("DL141")
_ADDRESS = re.compile(r"[0-9.]+|\[?[0-9a-fA-F]*:[0-9a-fA-F:]*\]?")


def check_shell(script: Script) -> Iterator[Finding]:
    container = script.container
    if container is None:
        return
    for launch in launches(script):
        yield from _index(script, container, launch)
        address = _address(launch)
        if address is None:
            continue
        place, host = address
        if host in LOOPBACK or _ADDRESS.fullmatch(host):
            continue
        if container.hosts and "." not in host and host not in container.hosts:
            message = f"no service of this file is called {host}"
            yield RULE.at(script, place, message)
        elif container.unresolved:
            yield RULE.at(script, place, f"{host} is not resolved: {container.unresolved}")


def _address(launch: Launch) -> tuple[TextRange, str] | None:
    flag = address_flag(launch)
    if flag is not None and flag.value is not None:
        host = host_of(launch, flag.value)
        return (flag.word, host) if host else None
    address = variable(launch, "MASTER_ADDR") if launch.kind == PYTHON else None
    host = address.script.constant(address.assignment.value) if address else None
    return (address.assignment, host) if address and host else None


def _index(script: Script, container: Container, launch: Launch) -> Iterator[Finding]:
    if container.is_indexed:
        return
    for flag in launch.flags.values():
        for piece in flag.value.pieces if flag.value else ():
            if piece.kind is not Kind.TEXT and "JOB_COMPLETION_INDEX" in piece.text:
                message = (
                    "only pods of a Job with completionMode: Indexed have JOB_COMPLETION_INDEX"
                )
                yield RULE.at(script, flag.word, message)
