"""DL102: a port that is written down, where other jobs may run on the same host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import backend, most_nodes, port_flag, variable
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Command
from drumline_lint.reading.slurm import whole_number

RULE = rule("DL102")

_DEFAULT = 29500
# `run() {`, and lines that begin another branch of an if or a case.
_FUNCTION = re.compile(r"^(?:function[ \t]+)?([\w-]+)[ \t]*\(\)", re.MULTILINE)
_ALTERNATIVE = re.compile(r"^[ \t]*(?:else|elif)\b|;;", re.MULTILINE)
_ON_SLURM = (
    "is the same for every job of this script, and Slurm may put two on one host: the second fails, "
    "or joins the first"
)
_FIX = (
    "take it from the job's number: $((20000 + SLURM_JOB_ID % 20000)); or ask for whole nodes with "
    "#SBATCH --exclusive"
)
# Options that ask for a part of a node.
_PARTS = ("gres", "gpus", "mem", "cpus", "array")


def check_shell(script: Script) -> Iterator[Finding]:
    """A constant port in a job that may share its hosts, and launches side by side on one port.

    For example:

        #SBATCH --gres=gpu:4
        torchrun --nproc-per-node=4 --master-port=29500 train.py
    """
    if script.container is not None:
        return  # It has a network, and so all ports, of its own.

    yield from _side_by_side(script)

    is_array = "array" in script.sbatch.by_name
    for launch in launches(script):
        place, port = _port(launch)
        if port and _shares_hosts(script, launch):
            message = f"port {port} {_ON_SLURM}"
            # The tasks of an array begin together; whether other jobs do is not in the file.
            severity = None if is_array else Severity.NOTE
            yield RULE.at(script, place, message, fix=_FIX, severity=severity)


def _shares_hosts(script: Script, launch: Launch) -> bool:
    """Whether the job asks for parts of nodes: who asks for nodes alone gets whole ones."""
    if launch.is_elsewhere or "{{" in script.text or script.sbatch.has_whole_nodes:
        return False

    return any(name.startswith(_PARTS) for name in script.sbatch.by_name)


def _port(launch: Launch) -> tuple[TextRange, int | None]:
    """The port that is written for a launch, and where.

    For example:

        torchrun sets MASTER_PORT and does not read it; a rank that srun starts reads it.
    """
    script = launch.script
    if launch.kind == PYTHON:
        # Without an array, it may not be read.
        is_read = launch.srun is not None and "array" in script.sbatch.by_name
        port = variable(launch, "MASTER_PORT") if is_read else None
        return (port, whole_number(port.constant)) if port else (launch.name[-1], None)

    is_fixed = launch.is_torchrun and "standalone" not in launch.flags
    flag = port_flag(launch) if is_fixed else None
    if flag is None or flag.value is None or backend(launch) not in {"static", "c10d"}:
        return launch.name[-1], None

    text = script.substituted(flag.value.text)
    return script.source_of(flag.value), whole_number(text.rpartition(":")[2])


# Launches in the background


def _side_by_side(script: Script) -> Iterator[Finding]:
    """Launches in the background that listen on the same port of this host.

    For example:

        torchrun --nproc-per-node=2 train.py --seed 1 &
        torchrun --nproc-per-node=2 train.py --seed 2 &
    """
    waits = [command.start for command in script.commands if command.words[0].plain == "wait"]
    functions = _functions(script, waits)
    earlier: dict[int, int] = {}

    for launch in launches(script):
        starts = _background_starts(launch, functions)
        if not starts or not _is_alone_here(launch):
            continue

        place, port = _port(launch)
        if not port_flag(launch):
            port = _DEFAULT
        if not port:
            continue

        for start in starts:
            is_first = port not in earlier or any(earlier[port] < wait < start for wait in waits)
            if not is_first and not _ALTERNATIVE.search(script.text, earlier[port], start):
                message = f"the launch before it runs beside this one, and has port {port}, too"
                fix = "give each a --master-port, or --standalone"
                yield RULE.at(script, place, message, fix=fix)
                break
            earlier[port] = start


def _is_alone_here(launch: Launch) -> bool:
    """Whether it is a job of one node, this host, with a fixed port.

    For example:

        torchrun --nproc-per-node=2 --master-port=29501 train.py
    """
    if launch.is_elsewhere or launch.srun is not None or launch.docker:
        return False

    return launch.is_torchrun and most_nodes(launch) == 1 and backend(launch) == "static"


@dataclass(frozen=True)
class _Function:
    """Where a function of the shell begins and ends, and the commands that call it."""

    start: int
    end: int
    calls: list[Command]
    waits: bool


def _functions(script: Script, waits: list[int]) -> list[_Function]:
    """The functions of a script; `waits` is where its commands `wait` are."""
    calls: dict[str, list[Command]] = {}
    for command in script.commands:
        calls.setdefault(command.words[0].plain or "", []).append(command)

    functions = []
    for header in _FUNCTION.finditer(script.text):
        end = script.text.find("\n}", header.end())
        has_wait = any(header.start() < wait < end for wait in waits)
        functions.append(_Function(header.start(), end, calls.get(header[1], []), has_wait))
    return functions


def _background_starts(launch: Launch, functions: list[_Function]) -> list[int]:
    """Where it is put in the background: itself, or calls of the function that it is in.

    Both calls of `run`, here:

        run() {
            torchrun train.py --seed $1
        }
        run 1 &
        run 2 &
    """
    if launch.command.loop:
        return []

    start = launch.command.start
    is_background = launch.command.is_background
    around = [function for function in functions if function.start < start < function.end]
    if not around:
        return [start] if is_background else []

    is_left_running = is_background and not around[0].waits
    return [call.start for call in around[0].calls if is_left_running or call.is_background]
