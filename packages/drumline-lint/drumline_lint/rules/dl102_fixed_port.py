"""DL102: a port that is written down, where other jobs may run on the same host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import backend, most_nodes
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Kind, Word
from drumline_lint.reading.slurm import ALL_GPUS

RULE = rule("DL102")
DEFAULTS = {"static": "29500", "c10d": "29400"}
ON_SLURM = (
    "for every job{same}, and Slurm may put two on one host: the second fails, or joins the first"
)
FROM_JOB = "from the job's number: $((20000 + SLURM_JOB_ID % 20000)); or ask for whole nodes with #SBATCH --exclusive"
_DEEPEST = 8
_PARTS = re.compile(r"gres|gpus|mem|cpus|array")


@dataclass(frozen=True)
class Port:
    """The port in a word."""

    value: str | None
    """None where it is not known, or not given."""
    source: TextRange
    """Where it is written."""

    @property
    def is_fixed(self) -> bool:
        return (
            self.value is not None
            and self.value.isascii()
            and self.value.isdigit()
            and int(self.value) > 0
        )


def check_shell(script: Script) -> Iterator[Finding]:
    """Of flags, and of MASTER_PORT where a rank reads it itself."""
    if script.container is not None:
        return  # It has a network, and so all ports, of its own.
    reported: set[int] = set()
    for finding, start in [*_of_flags(script), *_of_variable(script), *_side_by_side(script)]:
        if start not in reported:
            reported.add(start)
            yield finding


def _of_flags(script: Script) -> Iterator[tuple[Finding, int]]:
    for launch in launches(script):
        how = backend(launch)
        if not launch.is_torchrun or "standalone" in launch.flags or how not in DEFAULTS:
            continue
        port = _port(script, launch)
        if _is_on_shared_slurm(script, launch):
            if port is not None and port.is_fixed:
                yield _on_slurm(script, port), port.source.start
            elif port is None and _takes_default(launch, how):
                message = f"no port is given, so torchrun takes {DEFAULTS[how]} {ON_SLURM.format(same='')}"
                yield (
                    RULE.at(script, launch.name[-1], message, fix=f"give a port {FROM_JOB}"),
                    launch.name[0].start,
                )


def _of_variable(script: Script) -> Iterator[tuple[Finding, int]]:
    """torchrun sets MASTER_PORT and does not read it; a script that srun starts often does, and the
    tasks of an array begin together."""
    ranks = [
        launch for launch in launches(script) if launch.kind == PYTHON and launch.srun is not None
    ]
    is_array = "array" in script.sbatch.by_name
    if not is_array or not any(_is_on_shared_slurm(script, launch) for launch in ranks):
        return
    for assignment in script.assignments:
        port = Port(script.constant(assignment.value), assignment)
        is_seen = assignment.is_exported or assignment.name in script.exported
        if (
            assignment.name == "MASTER_PORT"
            and is_seen
            and port.is_fixed
            and not assignment.command.is_conditional
        ):
            yield _on_slurm(script, port), assignment.start


def _on_slurm(script: Script, port: Port) -> Finding:
    message = f"port {port.value} is the same {ON_SLURM.format(same=' of this script')}"
    return RULE.at(script, port.source, message, fix=f"take it {FROM_JOB}")


def _takes_default(launch: Launch, how: str) -> bool:
    """Where several nodes rendezvous and no port is named; one node gets a free one."""
    endpoint = launch.flags.get("rdzv-endpoint")
    # Each has an address of its own; static refuses an endpoint without a port.
    needs_port = (
        endpoint is None and "master-addr" in launch.flags
        if how == "static"
        else endpoint is not None
    )
    is_array = "array" in launch.script.sbatch.by_name
    return (
        (needs_port or is_array) and launch.is_sure and ((most_nodes(launch) or 1) > 1 or is_array)
    )


def _is_on_shared_slurm(script: Script, launch: Launch) -> bool:
    if "{{" in script.text:  # What a template asks for is not seen.
        return False
    # Where a job asks for nodes alone, it gets whole ones.
    asks_for_parts = any(map(_PARTS.match, script.sbatch.by_name))
    if not asks_for_parts or launch.is_elsewhere or script.sbatch.has_whole_nodes:
        return False
    per_task = (script.sbatch.by_name.get("gpus-per-task") or "").rpartition(":")[2]
    uses_all_gpus = (processes_per_node(launch) or 1) >= ALL_GPUS or per_task == "8"
    return not uses_all_gpus or "array" in script.sbatch.by_name


def _side_by_side(script: Script) -> Iterator[tuple[Finding, int]]:
    """Launches in the background that listen on the same port of this host."""
    ports: dict[str, Launch] = {}
    for launch in launches(script):
        is_local = not launch.is_elsewhere and launch.srun is None and not launch.docker
        if not launch.command.is_background or not is_local or not launch.is_torchrun:
            continue
        if most_nodes(launch) != 1 or backend(launch) != "static" or launch.command.loop:
            continue
        port = _port(script, launch)
        value = DEFAULTS["static"] if port is None else port.value or ""
        if value in ports and not _are_waited_for(script, ports[value], launch):
            message = f"the launch before it runs beside this one, and has port {value}, too"
            place = port.source if port is not None else launch.name[-1]
            fix = "give each a --master-port, or --standalone"
            yield RULE.at(script, place, message, fix=fix), place.start
        elif value:
            ports[value] = launch


def _are_waited_for(script: Script, first: Launch, second: Launch) -> bool:
    waits = [command.start for command in script.commands if command.words[0].plain == "wait"]
    return any(first.command.start < wait < second.command.start for wait in waits)


def _port(script: Script, launch: Launch) -> Port | None:
    """None where none is given."""
    endpoint = launch.flags.get("rdzv-endpoint")
    if endpoint is not None and endpoint.value is not None:
        port = _port_in(script, endpoint.value)
        is_named = port.value is not None or script.constant(endpoint.value) is None
        return port if is_named else None
    flag = launch.flags.get("master-port")
    return (
        Port(script.constant(flag.value), script.source_of(flag.value))
        if flag and flag.value
        else None
    )


def _port_in(script: Script, word: Word, depth: int = 0) -> Port:
    """Of `host:port`, where either may come from a variable."""
    pieces = word.pieces
    last = pieces[-1] if pieces else None
    if last is not None and last.kind is Kind.TEXT:
        _, colon, port = last.text.rpartition(":")
        return Port(port if colon else None, word)
    if last is None or last.kind is not Kind.VARIABLE:
        return Port(None, word)
    if len(pieces) == 1:
        assigned = script.variables.get(last.text, [])
        is_known = len(assigned) == 1 and depth < _DEEPEST
        return _port_in(script, assigned[0].value, depth + 1) if is_known else Port(None, word)
    if pieces[-2].kind is not Kind.TEXT or not pieces[-2].text.endswith(":"):
        return Port(None, word)
    alone = Word(word.start, word.end, (last,))
    return Port(script.constant(alone), script.source_of(alone))
