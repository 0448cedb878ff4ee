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
_PARTS = ("gres", "gpus", "mem", "cpus", "array")


def check_shell(script: Script) -> Iterator[Finding]:
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
    """Where a job asks for nodes alone, it gets whole ones."""
    asks_for_parts = any(name.startswith(_PARTS) for name in script.sbatch.by_name)
    is_known = not launch.is_elsewhere and "{{" not in script.text
    return asks_for_parts and is_known and not script.sbatch.has_whole_nodes


def _port(launch: Launch) -> tuple[TextRange, int | None]:
    """torchrun sets MASTER_PORT and does not read it; a rank that srun starts reads it."""
    if launch.kind == PYTHON:
        # Without an array, it may not be read.
        is_read = launch.srun is not None and "array" in launch.script.sbatch.by_name
        port = variable(launch, "MASTER_PORT") if is_read else None
        return (port, whole_number(port.constant)) if port else (launch.name[-1], None)
    flag = port_flag(launch) if launch.is_torchrun and "standalone" not in launch.flags else None
    if flag is None or flag.value is None or backend(launch) not in {"static", "c10d"}:
        return launch.name[-1], None
    written = launch.script.substituted(flag.value.text)
    return launch.script.source_of(flag.value), whole_number(written.rpartition(":")[2])


def _side_by_side(script: Script) -> Iterator[Finding]:
    """Launches in the background that listen on the same port of this host."""
    waits = [command.start for command in script.commands if command.words[0].plain == "wait"]
    functions = _functions(script, waits)
    earlier: dict[int, int] = {}
    for launch in launches(script):
        starts = _background_starts(launch, functions)
        is_local = not launch.is_elsewhere and launch.srun is None and not launch.docker
        is_alone = launch.is_torchrun and most_nodes(launch) == 1 and backend(launch) == "static"
        if not starts or not is_local or not is_alone:
            continue
        place, port = _port(launch)
        port = port if port_flag(launch) else _DEFAULT
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


@dataclass(frozen=True)
class _Function:
    """Where a function of the shell begins and ends, and the commands that call it."""

    start: int
    end: int
    calls: list[Command]
    waits: bool


def _functions(script: Script, waits: list[int]) -> list[_Function]:
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
    """Where it is put in the background: itself, or calls of the function that it is in."""
    start = launch.command.start
    is_background = launch.command.is_background
    around = [function for function in functions if function.start < start < function.end]
    if not around or launch.command.loop:
        return [start] if is_background and not launch.command.loop else []
    is_left_running = is_background and not around[0].waits
    return [call.start for call in around[0].calls if is_left_running or call.is_background]
