"""DL122: NCCL or Gloo is bound to the loopback interface, and there are several nodes."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import has_several_nodes
from drumline_lint.reading.environment import launch_variables
from drumline_lint.reading.shell import Script

RULE = rule("DL122")
_NAMES = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


def check_shell(script: Script) -> Iterator[Finding]:
    if "SOCKET_IFNAME" not in script.text or not has_several_nodes(script):
        return
    for item in launch_variables(script):
        value = item.script.constant(item.assignment.value) or ""
        interfaces = set(value.removeprefix("=").split(","))
        if item.assignment.name in _NAMES and interfaces <= {"lo", "lo0"}:
            message = f"{item.assignment.name}={value} is the loopback interface, which no other node can reach"
            yield RULE.at(script, item.assignment, message)
