"""DL118: every node computes an address, a port or an id of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import first_node, least_nodes, port_flag, variable
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Word

RULE = rule("DL118")
_OWN = re.compile(
    r"\$\(\s*(?:hostname|uname -n)\b[^)|]*\)|`(?:hostname|uname -n)\b[^`|]*`"
    r"|\$\{?(?:HOSTNAME|SLURMD_NODENAME|POD_IP|MY_POD_IP|RANDOM)\b\}?"
    r"|\$\([^;]*?\b(?:RANDOM|shuf|uuidgen|mktemp)\b[^;]*|\$\$"
)
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        for place, what, word in _rendezvous_words(launch) if _is_on_each_node(launch) else ():
            if how := _own_value(launch, word):
                message = (
                    f"every node computes its own {what}, by {how}: they do not find each other"
                )
                yield RULE.at(script, place, message)
                break


def _is_on_each_node(launch: Launch) -> bool:
    """Whether each node evaluates the words."""
    nodes = max(
        (least_nodes(launch) or 1) if launch.kind != PYTHON else 1, started_on_nodes(launch) or 1
    )
    is_started_on_each = launch.srun is not None or launch.is_elsewhere
    is_in_pod = launch.script.container is not None and launch.script.container.kind != "image"
    return nodes > 1 and (is_in_pod or (is_started_on_each and launch.is_expanded_late))


def _rendezvous_words(launch: Launch) -> Iterator[tuple[TextRange, str, Word]]:
    if address := first_node(launch):
        yield address[0], "address", address[1]
    for flag, what in ((port_flag(launch), "port"), (launch.flags.get("rdzv-id"), "rendezvous id")):
        if flag is not None and flag.value is not None:
            yield flag.word, what, flag.value
    port = variable(launch, "MASTER_PORT") if launch.kind == PYTHON else None
    if port is not None:
        yield port, "port", port.value


def _own_value(launch: Launch, word: Word, depth: int = 0) -> str:
    """What makes a word differ from node to node; empty if it does not."""
    if computed := _OWN.search(word.text):
        return computed[0]
    for name in _NAME.findall(word.text):
        # A batch script computes its variables once, for all nodes.
        assigned = launch.script.variables.get(name, [])
        if len(assigned) == 1 and not assigned[0].is_conditional and depth < 4:
            return _own_value(launch, assigned[0].value, depth + 1)
    return ""
