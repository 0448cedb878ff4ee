"""DL126: a PyTorchJob whose container the operator does not find."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.shell import Script

RULE = rule("DL126")


def check_shell(script: Script) -> Iterator[Finding]:
    container = script.container
    if container is None or container.kind != "PyTorchJob" or container.name is None:
        return
    if "pytorch" not in container.names_in_pod:
        message = f"the operator looks for a container named pytorch, and this one is {container.name.plain}"
        yield RULE.at(script, container.name, message)
