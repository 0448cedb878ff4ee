"""DL131: a variable that the script sets does not reach the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Kind

RULE = rule("DL131")
# Hydra's mpiexec passes all variables, Open MPI's mpirun none to other hosts.
_OPEN_MPI = re.compile(
    r"--?(?:x|mca|map-by|bind-to|npernode|allow-run-as-root|oversubscribe|hostfile|H|host)"
)
_HYDRA = re.compile(r"--?(?:genv\w*|ppn|f|hosts|perhost|envall|iface)")
_HOSTS = {"-H", "-host", "--host", "-hostfile", "--hostfile", "-machinefile", "--machinefile"}
_SCHEDULER = re.compile(
    r"^#(?:SBATCH|PBS|BSUB|PJM|COBALT|\$ -)|\bPBS_|\bSLURM_|\bLSB_", re.MULTILINE
)
_EXPORTS_ALL = re.compile(r"^\s*set\s+(?:-\w*a|-o\s+allexport)", re.MULTILINE)
_READ_BY_RANKS = ("MASTER_ADDR", "MASTER_PORT")


def check_shell(script: Script) -> Iterator[Finding]:
    if script.container is not None:
        return
    reported: set[int] = set()
    for launch in launches(script):
        for place, message, fix in [
            *_by_mpirun(script, launch),
            *_by_srun(script, launch),
            *_not_exported(script, launch),
            *_in_other_shell(launch),
        ]:
            if place.start not in reported:
                reported.add(place.start)
                yield RULE.at(script, place, message, fix=fix)


Problem = tuple[TextRange, str, str]


def _exported(script: Script) -> set[str]:
    return {
        assignment.name
        for assignment in script.assignments
        if not assignment.is_for_command
        and (assignment.is_exported or assignment.name in script.exported)
    }


def _by_mpirun(script: Script, launch: Launch) -> Iterator[Problem]:
    words = [word.plain or word.head for word in launch.mpirun]
    is_open_mpi = any(map(_OPEN_MPI.fullmatch, words)) and not any(map(_HYDRA.fullmatch, words))
    has_hosts = not _HOSTS.isdisjoint(words)
    if launch.kind != PYTHON or not is_open_mpi or not has_hosts or _SCHEDULER.search(script.text):
        return
    passed = {word.partition("=")[0] for word in words}
    missing = [name for name in _READ_BY_RANKS if name in _exported(script) - passed]
    if missing and not any(word.startswith("mca_base_env_list") for word in words):
        message = f"mpirun does not pass {missing[0]} to the other hosts"
        yield launch.mpirun[0], message, f"add {' '.join(f'-x {name}' for name in missing)}"


def _by_srun(script: Script, launch: Launch) -> Iterator[Problem]:
    if launch.srun is None or launch.srun_word is None:
        return
    exported = _exported(script)
    listed = launch.srun.by_name.get("export")
    if listed and "ALL" not in listed.split(","):
        names = {part.partition("=")[0] for part in listed.split(",")}
        lost = sorted(exported - names)
        if lost:
            message = f"srun --export={listed} passes nothing else: the tasks get no {lost[0]}"
            yield launch.srun_word, message, f"write --export=ALL,{listed.removeprefix('NONE')}"
    is_none = script.sbatch.by_name.get("export") == "NONE" and "export" not in launch.srun.by_name
    if is_none and exported and "SLURM_EXPORT_ENV" not in script.text:
        message = f"#SBATCH --export=NONE holds for srun, too: the tasks get no {min(exported)}"
        yield launch.srun_word, message, "write srun --export=ALL, or unset SLURM_EXPORT_ENV"


def _not_exported(script: Script, launch: Launch) -> Iterator[Problem]:
    """A rank reads MASTER_ADDR from its environment."""
    if launch.kind != PYTHON or launch.srun is None or _EXPORTS_ALL.search(script.text):
        return
    assigned = script.variables.get("MASTER_ADDR", [])
    # Printing it is no use of it.
    used = re.search(r"^(?![ \t]*echo\b)[^#\n]*\$\{?MASTER_ADDR", script.text, re.MULTILINE)
    is_local = bool(assigned) and not any(assignment.is_exported for assignment in assigned)
    if is_local and "MASTER_ADDR" not in script.exported and not used:
        message = "MASTER_ADDR is not exported: the tasks of srun do not see it"
        yield assigned[0], message, "write export MASTER_ADDR"


def _in_other_shell(launch: Launch) -> Iterator[Problem]:
    """`ssh host '... $PORT'`: that shell does not have the variables of this one."""
    outer = launch.script.outer
    if outer is None or outer.container is not None or _EXPORTS_ALL.search(outer.text):
        return
    passed = {(word.plain or "").partition("=")[0] for word in (*launch.docker, *launch.mpirun)}
    is_closed = launch.is_elsewhere or bool(launch.docker)
    if "--env-file" in passed or launch.mpirun:
        return
    words = [flag.value for flag in launch.flags.values() if flag.value]
    for word in (*words, *launch.arguments):
        for piece in word.pieces:
            name = piece.text
            if piece.kind is not Kind.VARIABLE or name in passed or name in launch.script.variables:
                continue
            assigned = outer.variables.get(name, [])
            is_seen = not is_closed and (
                name in outer.exported or any(assignment.is_exported for assignment in assigned)
            )
            if assigned and not is_seen and not name.isdigit():
                where = "on the other host" if launch.is_elsewhere else "in that shell"
                if launch.docker:
                    where = "in the container"
                fix = "" if is_closed else f"export {name}"
                yield word, f"${name} is empty {where}: only this script sets it", fix
