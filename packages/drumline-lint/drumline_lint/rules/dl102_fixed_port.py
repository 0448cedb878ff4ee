"""DL102: a port that is written down, where other jobs may run on the same host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import LOOPBACK, backend, most_nodes
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Kind, Word

RULE = rule("DL102")
DEFAULTS = {"static": "29500", "c10d": "29400"}
ON_SLURM = (
    "for every job{same}, and Slurm may put two on one host: the second fails, or joins the first"
)
FROM_JOB = "from the job's number: $((20000 + SLURM_JOB_ID % 20000)); or ask for whole nodes with #SBATCH --exclusive"
_SEVERAL_NODES = re.compile(
    r"#.*(?:nnodes|multi[- ]?(?:node|machine)|(?:several|more|other|each|every|second|two) (?:node|machine|host)s?)",
    re.IGNORECASE,
)
_DEEPEST = 8


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
    for finding, start in [*_of_flags(script), *_of_variable(script)]:
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
        elif (
            not script.on_slurm
            and port is not None
            and port.is_fixed
            and _is_on_one_node(script, launch)
            and not _is_meant_for_several(script, launch)
            and not _runs_beside_another(script, launch)
        ):
            message = (
                f"torchrun runs on one node and is given port {port.value}: a second run on this machine fails, or "
                "joins the first, though neither needs a known port"
            )
            fix = "leave the port out and use torchrun --standalone, which takes a free one"
            # whoever chose another port than the default has met a second run already
            severity = Severity.NOTE
            finding = RULE.at(script, port.source, message, fix=fix, severity=severity)
            yield finding, port.source.start


def _of_variable(script: Script) -> Iterator[tuple[Finding, int]]:
    """torchrun sets MASTER_PORT and does not read it; a script that srun starts does."""
    ranks = [
        launch for launch in launches(script) if launch.kind == PYTHON and launch.srun is not None
    ]
    if not any(_is_on_shared_slurm(script, launch) for launch in ranks):
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
    return needs_port and launch.is_sure and (most_nodes(launch) or 1) > 1


def _is_on_shared_slurm(script: Script, launch: Launch) -> bool:
    if not script.on_slurm or launch.is_elsewhere:
        return False
    # In a batch file, srun's --exclusive is about the job's own steps.
    if script.sbatch.by_name:
        return not script.sbatch.has_whole_nodes
    # A script without a header may have been given its options on sbatch's command line.
    return launch.srun is not None and launch.srun.is_sure and not launch.srun.has_whole_nodes


def _is_on_one_node(script: Script, launch: Launch) -> bool:
    if launch.is_elsewhere or not launch.is_sure or most_nodes(launch) != 1:
        return False
    endpoint = launch.flags.get("rdzv-endpoint")
    if endpoint is None or endpoint.value is None:
        return endpoint is None
    host, colon, _ = (script.constant(endpoint.value) or endpoint.value.head).rpartition(":")
    return (host if colon else script.constant(endpoint.value)) in LOOPBACK


def _runs_beside_another(script: Script, launch: Launch) -> bool:
    """Whether its port is there to keep two runs of this script apart."""
    return launch.command.is_background and len(launches(script)) > 1


def _is_meant_for_several(script: Script, launch: Launch) -> bool:
    """Whether the script is a template for several nodes, which --standalone would take away."""
    has_address = "master-addr" in launch.flags
    is_elsewhere = has_address and launch.value("master-addr") not in LOOPBACK
    return is_elsewhere or "node-rank" in launch.flags or bool(_SEVERAL_NODES.search(script.text))


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
