"""DL102: a port that is written down, where other jobs may run on the same host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import PYTHON, Flag, Launch, launches
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Kind, Word

FROM_JOB = "$((20000 + SLURM_JOB_ID % 20000))"
RULE = rule("DL102")
LAST_PORT = 65535
DEFAULTS = {"static": "29500", "c10d": "29400"}


def check_shell(script: Script) -> Iterator[Finding]:
    """Of flags, and of MASTER_PORT where a rank reads it itself."""
    seen: set[int] = set()
    for finding, start in [*_too_high(script), *_of_flags(script), *_of_variable(script)]:
        if start not in seen:
            seen.add(start)
            yield finding


def _too_high(script: Script) -> Iterator[tuple[Finding, int]]:
    given = [_port(script, launch) for launch in launches(script) if launch.is_torchrun]
    given += [
        Port(script.constant(one.value), False, one)
        for one in script.assignments
        if one.name == "MASTER_PORT" and not one.is_appended
    ]
    for port in given:
        if port is not None and _is_fixed(port) and int(port.value or 0) > LAST_PORT:
            said = f"port {port.value} does not exist, the last is {LAST_PORT}: the ranks fail before they meet"
            yield RULE.at(script, port.source, said, fix="give a port from 1024 to 65535"), port.source.start


def _of_flags(script: Script) -> Iterator[tuple[Finding, int]]:
    for launch in launches(script):
        if not launch.is_torchrun or "standalone" in launch.flags or backend(script, launch) not in DEFAULTS:
            continue
        port = _port(script, launch)
        if _is_on_shared_slurm(script, launch):
            if port is not None and _is_fixed(port):
                yield _on_slurm(script, port), port.source.start
            elif port is None and (default := _default(script, launch)):
                yield _by_default(script, launch, default), launch.name[0].start
        elif not script.on_slurm and port is not None and _is_fixed(port) and _is_on_one_node(script, launch):
            yield _on_one_node(script, port), port.source.start


def _of_variable(script: Script) -> Iterator[tuple[Finding, int]]:
    """torchrun sets MASTER_PORT and does not read it; a script that srun starts does."""
    ranks = [launch for launch in launches(script) if launch.kind == PYTHON and launch.srun is not None]
    if not any(_is_on_shared_slurm(script, launch) for launch in ranks):
        return
    for assignment in script.assignments:
        if assignment.name != "MASTER_PORT" or assignment.command.is_conditional:
            continue
        value = script.constant(assignment.value)
        is_seen = assignment.is_exported or assignment.name in script.exported
        if is_seen and _is_fixed(Port(value, False, assignment)):
            yield _on_slurm(script, Port(value, False, assignment)), assignment.start


def _port(script: Script, launch: Launch) -> Port | None:
    meeting = endpoint(launch)
    if meeting is not None and meeting.value is not None:
        port = port_in(script, meeting.value)
        is_named = port.value is not None or script.constant(meeting.value) is None
        return port if is_named else None
    flag = launch.flags.get("master-port")
    return port_alone(script, flag.value) if flag and flag.value else None


def _default(script: Script, launch: Launch) -> str:
    """The port that torchrun takes when several nodes meet and none is named; one node gets a free one."""
    how = backend(script, launch) or ""
    # Each has an address of its own; static refuses an endpoint without a port.
    is_met = endpoint(launch) is None and "master-addr" in launch.flags if how == "static" else bool(endpoint(launch))
    if not is_met or not launch.is_sure or has_several_nodes(script, launch) is not True:
        return ""
    return DEFAULTS.get(how, "")


def _is_fixed(port: Port) -> bool:
    return port.value is not None and port.value.isascii() and port.value.isdigit() and int(port.value) > 0


def _is_on_shared_slurm(script: Script, launch: Launch) -> bool:
    if not script.on_slurm or launch.is_elsewhere:
        return False
    # In a batch file, srun's --exclusive is about the job's own steps.
    if script.sbatch.by_name:
        return not script.sbatch.has_whole_nodes
    # A script without a header may have been given its options on sbatch's command line.
    return launch.srun is not None and launch.srun.is_sure and not launch.srun.has_whole_nodes


def _is_on_one_node(script: Script, launch: Launch) -> bool:
    if launch.is_elsewhere or not launch.is_sure or has_several_nodes(script, launch) is not False:
        return False
    meeting = endpoint(launch)
    return meeting is None or (meeting.value is not None and host_in(script, meeting.value) in LOCAL)


def _on_slurm(script: Script, port: Port) -> Finding:
    return RULE.at(
        script,
        port.source,
        f"port {port.value} is the same for every job of this script, and Slurm may put two on one host: the second "
        "fails, or joins the first",
        fix=f"take it from the job's number: {FROM_JOB}; or ask for whole nodes with #SBATCH --exclusive",
    )


def _by_default(script: Script, launch: Launch, default: str) -> Finding:
    return RULE.at(
        script,
        launch.name[-1],
        f"no port is given, so torchrun takes {default} for every job, and Slurm may put two on one host: the second "
        "fails, or joins the first",
        fix=f"give a port from the job's number: {FROM_JOB}; or ask for whole nodes with #SBATCH --exclusive",
    )


def _on_one_node(script: Script, port: Port) -> Finding:
    return RULE.at(
        script,
        port.source,
        f"torchrun runs on one node and is given port {port.value}: a second run on this machine fails, or joins the "
        "first, though neither needs a known port",
        fix="leave the port out and use torchrun --standalone, which takes a free one",
    )


LOCAL = {"localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0"}  # noqa: S104
_DEEPEST = 8


@dataclass(frozen=True)
class Port:
    """The port in a word, or all that is known of it."""

    value: str | None
    """None where it is not known, or not given."""
    is_computed: bool
    """Whether the script works it out, as from the job's number."""
    source: TextRange
    """Where it is written."""


def flag_value(script: Script, launch: Launch, name: str) -> str | None:
    """The constant that a flag is given."""
    flag = launch.flags.get(name)
    return script.constant(flag.value) if flag and flag.value else None


def has_several_nodes(script: Script, launch: Launch) -> bool | None:
    """By --nnodes; None when only a run could tell."""
    if "standalone" in launch.flags:
        return False
    if "nnodes" not in launch.flags:
        return False if launch.is_sure else None
    most = (flag_value(script, launch, "nnodes") or "").rpartition(":")[2]
    return int(most) > 1 if most.isascii() and most.isdigit() else None


def backend(script: Script, launch: Launch) -> str | None:
    """How the nodes find each other; None when it is not known."""
    if "standalone" in launch.flags:
        return "c10d"
    if "rdzv-backend" not in launch.flags:
        return "static" if launch.is_sure else None
    return flag_value(script, launch, "rdzv-backend")


def endpoint(launch: Launch) -> Flag | None:
    """The flag that says where nodes meet."""
    return launch.flags.get("rdzv-endpoint")


def host_in(script: Script, word: Word) -> str | None:
    """Of `host:port`."""
    whole = script.constant(word)
    if whole is None:
        return word.head.rpartition(":")[0] if ":" in word.head else None
    return whole.rpartition(":")[0] if ":" in whole else whole


def port_in(script: Script, word: Word, depth: int = 0) -> Port:
    """Of `host:port`, where either may come from a variable."""
    pieces = word.pieces
    last = pieces[-1] if pieces else None
    if last is None:
        return Port(None, False, word)
    if len(pieces) == 1 and last.kind is Kind.VARIABLE:
        assigned = script.variables.get(last.text, [])
        if len(assigned) == 1 and depth < _DEEPEST:
            return port_in(script, assigned[0].value, depth + 1)
        return Port(None, bool(assigned), word)
    if last.kind is Kind.TEXT:
        _, colon, port = last.text.rpartition(":")
        return Port(port if colon else None, False, word)
    before = pieces[-2] if len(pieces) > 1 else None
    if before is None or before.kind is not Kind.TEXT or not before.text.endswith(":"):
        return Port(None, last.kind is not Kind.VARIABLE, word)
    return port_alone(script, Word(word.start, word.end, (last,)))


def port_alone(script: Script, word: Word) -> Port:
    value = script.constant(word)
    names = [piece.text for piece in word.pieces if piece.kind is Kind.VARIABLE]
    is_assigned = any(script.variables.get(name) for name in names)
    has_unknown = any(piece.kind is Kind.UNKNOWN for piece in word.pieces)
    return Port(value, value is None and (is_assigned or has_unknown), script.source_of(word))
