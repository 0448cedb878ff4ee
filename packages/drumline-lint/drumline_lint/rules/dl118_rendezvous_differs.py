"""DL118: every node computes an address, a port or an id of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes
from drumline_lint.reading.environment import variable
from drumline_lint.reading.job_settings import ADDRESS, PORT, RANK, SIZE, job_setting
from drumline_lint.reading.launchers import PYTHON, Launch, launches, training_file
from drumline_lint.reading.rendezvous import LOOPBACK, address_flag, least_nodes, port_flag
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Kind, Piece, Word

RULE = rule("DL118")
_OWN_HOST = re.compile(
    r"\$\(\s*(?:hostname|uname -n)\b[^)]*\)|`(?:hostname|uname -n)\b[^`]*`|status\.(?:podIP|hostIP)|metadata\.name"
)
_OTHER_BATCH = re.compile(r"^#(?:PBS|BSUB|PJM|COBALT|\$ -)", re.MULTILINE)
_OWN_HOST_NAMES = {"HOSTNAME", "SLURMD_NODENAME", "POD_IP", "MY_POD_IP"}
_SETTINGS = {ADDRESS: "address", PORT: "port", SIZE: "number of members"}
_RANDOM = re.compile(r"\bRANDOM\b|\bshuf\b|\buuidgen\b|\bdate \+%|\bsocket\b|\$\$|\bmktemp\b")


def check_shell(script: Script) -> Iterator[Finding]:
    members = [launch for part in (*script.siblings, script) for launch in launches(part)]
    for before, launch in itertools.pairwise(members):
        if launch in launches(script):
            yield from _between(script, before, launch)
    for launch in launches(script):
        if not _is_evaluated_on_each_node(launch):
            continue
        for place, what, value in _rendezvous_words(launch):
            if how := _own_value(launch, value):
                message = (
                    f"every node computes its own {what}, by {how}: they do not find each other"
                )
                yield RULE.at(script, place, message)
                break


def _between(script: Script, before: Launch, launch: Launch) -> Iterator[Finding]:
    """What a launch and the one of the rank before it say of their rendezvous."""
    ranks = [job_setting(part, RANK).number for part in (before, launch)]
    is_next = None not in ranks and ranks[1] == (ranks[0] or 0) + 1
    is_same = before.kind == launch.kind and training_file(before) == training_file(launch)
    if not is_next or not is_same:
        return
    for what, name in _SETTINGS.items():
        first = job_setting(before, what)
        second = job_setting(launch, what)
        is_local = what == ADDRESS and {first.value, second.value} & LOOPBACK
        differs = first.value and second.value and first.value != second.value
        if differs and second.place is not None and not is_local:
            message = f"the {name} is {second.value} here and {first.value} for the rank before it"
            yield RULE.at(script, second.place, message)


def _is_evaluated_on_each_node(launch: Launch) -> bool:
    nodes = least_nodes(launch) if launch.kind != PYTHON else None
    started = started_on_nodes(launch) or 1
    if launch.script.container is not None:
        return launch.script.container.kind != "image" and max(nodes or 1, started) > 1
    if launch.srun is not None or launch.is_elsewhere:
        return launch.is_expanded_late and max(nodes or 1, started) > 1
    # A script without a scheduler is started by hand on each node.
    is_batch = bool(launch.script.sbatch.by_name) or _OTHER_BATCH.search(launch.script.text)
    return not is_batch and not launch.command.is_conditional and (nodes or 1) > 1


def _rendezvous_words(launch: Launch) -> Iterator[tuple[TextRange, str, Word]]:
    flags = (
        (address_flag(launch), "address"),
        (port_flag(launch), "port"),
        (launch.flags.get("rdzv-id"), "rendezvous id"),
    )
    for flag, what in flags:
        if flag is not None and flag.value is not None:
            yield flag.word, what, flag.value
    for name, what in (("MASTER_ADDR", "address"), ("MASTER_PORT", "port")):
        assigned = variable(launch, name) if launch.kind == PYTHON else None
        if assigned is not None and (assigned.script is launch.script or launch.script.container):
            yield assigned.assignment, what, assigned.assignment.value


def _own_value(launch: Launch, word: Word, depth: int = 0) -> str:
    """What makes a word differ from node to node; empty if it does not."""
    for piece in word.pieces:
        if piece.kind is Kind.UNKNOWN and (
            _OWN_HOST.fullmatch(piece.text) or _RANDOM.search(piece.text)
        ):
            return piece.text
        if piece.kind is Kind.VARIABLE and (how := _own_variable(launch, piece, depth)):
            return how
    return ""


def _own_variable(launch: Launch, piece: Piece, depth: int) -> str:
    scope: Script | None = launch.script
    while scope is not None and depth < 4:
        assigned = scope.variables.get(piece.text, [])
        if assigned:
            is_certain = len(assigned) == 1 and not assigned[0].command.is_conditional
            return _own_value(launch, assigned[0].value, depth + 1) if is_certain else ""
        # A batch script computes its variables once, for all nodes.
        scope = scope.outer if launch.script.container else None
    return f"${piece.text}" if piece.text in {"RANDOM", *_OWN_HOST_NAMES} else ""
