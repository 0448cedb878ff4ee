"""DL127: a container of several nodes that the other nodes cannot reach."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.rendezvous import least_nodes
from drumline_lint.reading.shell import Script

RULE = rule("DL127")
_NETWORK = ("--network", "--net", "--publish", "-p", "-P")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        words = launch.docker
        is_run = any(word.plain == "run" for word in words[:3])
        # An option in a variable may be this one.
        is_sure = all(word.head for word in words[:-1])
        has_network = any(word.head.startswith(_NETWORK) for word in words)
        nodes = least_nodes(launch) or 1
        if is_run and is_sure and not has_network and nodes > 1:
            message = f"{nodes} nodes rendezvous, but this container has a network of its own"
            yield RULE.at(script, words[0], message)
