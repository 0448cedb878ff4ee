"""How the nodes of a launch find each other: how many there are, their backend and their address."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from drumline_lint.reading.launchers import ACCELERATE, DEEPSPEED, PYTHON, Flag, Launch, launches
from drumline_lint.reading.shell import Assignment, Script, TextRange
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.slurm import whole_number

LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}  # noqa: S104
_NODES_FLAG = {ACCELERATE: "num-machines", DEEPSPEED: "num-nodes"}
_NAME_AND_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)")
# Options of docker and mpirun before `NAME=value`.
_PASSES_VARIABLE = {"-e", "--env", "-x", "-genv"}


def nodes_flag(launch: Launch) -> str:
    """The launcher's flag for the number of nodes."""
    return _NODES_FLAG.get(launch.kind, "nnodes")


def most_nodes(launch: Launch) -> int | None:
    """The largest number of nodes that it joins; None if it is known only at run time."""
    return _nodes(launch)[1]


def least_nodes(launch: Launch) -> int | None:
    """The number of nodes that it waits for."""
    return _nodes(launch)[0]


def _nodes(launch: Launch) -> tuple[int | None, int | None]:
    """The least and the largest number: `--nnodes 2:4` waits for 2 nodes, and 4 may join."""
    name = nodes_flag(launch)
    if name in launch.flags:
        first, _, last = (launch.value(name) or "").partition(":")
        return whole_number(first), whole_number(last or first)

    is_known = launch.is_sure and launch.kind not in {ACCELERATE, DEEPSPEED}
    count = 1 if is_known and not launch.is_of_operator else None
    return count, count


def backend(launch: Launch) -> str:
    """How the nodes find each other: `static`, `c10d`, `etcd`; empty when it is not known."""
    if "standalone" in launch.flags:
        return "c10d"
    if "rdzv-backend" not in launch.flags:
        return "static" if launch.is_sure else ""
    return launch.value("rdzv-backend") or ""


def address_flag(launch: Launch) -> Flag | None:
    """The flag whose address counts."""
    if launch.kind == ACCELERATE:
        return launch.flags.get("main-process-ip")

    endpoint = launch.flags.get("rdzv-endpoint")
    if endpoint is not None or backend(launch) != "static":
        return endpoint

    return launch.flags.get("master-addr")


def port_flag(launch: Launch) -> Flag | None:
    """The flag with the port of the first node."""
    if launch.kind == ACCELERATE:
        return launch.flags.get("main-process-port")
    return launch.flags.get("rdzv-endpoint") or launch.flags.get("master-port")


def first_node(launch: Launch) -> tuple[TextRange, Word] | None:
    """Where the address of the first node is written, and its word: a flag, or MASTER_ADDR, which a
    rank that Python starts reads itself."""
    if launch.kind == PYTHON:
        address = variable(launch, "MASTER_ADDR")
        return (address, address.value) if address else None

    flag = address_flag(launch)
    return (flag.word, flag.value) if flag and flag.value else None


def host_in(launch: Launch, address: Word) -> str:
    """The host in `host:port`; what is not known of it is left as it is written."""
    whole = launch.script.substituted(address.text)
    return whole if whole.startswith("::") else whole.partition(":")[0]


# Variables


def set_by_container(launch: Launch, word: Word) -> Assignment | None:
    """Where the environment of a container has the value of a word that is a variable."""
    name = replace(word, text=word.text.replace("$$", "$")).variable
    environment = launch.script.outermost.environment
    variables = [variable for variable in environment if variable.name == name]

    return variables[0] if len(variables) == 1 else None


def variable(launch: Launch, name: str) -> Assignment | None:
    """The only assignment of a variable that the launcher's processes see."""
    scope: Script | None = launch.script

    while scope is not None:
        if for_command := scope.command_variables.get((launch.command.start, name)):
            return for_command

        if assigned := scope.variables.get(name, []):
            is_only = len(assigned) == 1 and not assigned[0].is_conditional
            return assigned[0] if is_only and assigned[0].is_seen else None

        scope = scope.outer

    return None


def launch_variables(script: Script) -> list[Assignment]:
    """The variables that the processes of any launch see, also by `docker run -e` and `mpirun
    -x`."""
    scopes = dict.fromkeys([script, *(launch.script for launch in launches(script))])
    variables = [item for scope in scopes for item in scope.assignments if item.is_seen]

    for launch in launches(script):
        variables += _passed(launch)

    return variables


def _passed(launch: Launch) -> Iterator[Assignment]:
    """`-e NAME=value` of docker and the like, as assignments."""
    for option, word in itertools.pairwise((*launch.docker, *launch.mpirun)):
        pair = _NAME_AND_VALUE.fullmatch(word.plain or "")
        if pair and option.plain in _PASSES_VARIABLE:
            value = replace(word, text=pair[2])
            yield Assignment(launch.script, pair[1], value, word.start, word.end)
