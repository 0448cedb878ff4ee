"""DL131: a variable that the script sets does not reach the ranks.

Problems are reported once for each place, of which several launches may have the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Container, Script, TextRange
from drumline_lint.reading.shell_parser import Word

RULE = rule("DL131")

# Hydra's mpiexec passes all variables, Open MPI's mpirun none to other hosts.
_OPEN_MPI = re.compile(r"--?(?:x|mca|map-by|bind-to|npernode|hostfile|H|host)")
_HYDRA = re.compile(r"--?(?:genv\w*|ppn|f|hosts|perhost|envall|iface)")
_HOSTS = {"-H", "-host", "--host", "-hostfile", "--hostfile"}

_SCHEDULER = re.compile(r"^#(?:SBATCH|PBS|BSUB)|\bPBS_|\bSLURM_|\bLSB_", re.MULTILINE)
_EXPORTS_ALL = re.compile(r"^\s*set\s+(?:-\w*a|-o\s+allexport)", re.MULTILINE)

_NAME = re.compile(r"(?<!\\)\$\{?([A-Za-z_]\w*)")
_NEEDED = re.compile(r"(?:\$\$|\\\$)\{?([A-Za-z_]\w*)(?!\w*:?[-+=])")
# Printing it is no use of it.
_ADDRESS_IN_USE = re.compile(r"^(?![ \t]*echo\b)[^#\n]*\$\{?MASTER_ADDR", re.MULTILINE)
_READ_BY_RANKS = ("MASTER_ADDR", "MASTER_PORT")
Problem = tuple[TextRange, str, str]
"""Where a variable is lost, a message, and a fix."""


def check_shell(script: Script) -> Iterator[Finding]:
    """Variables that mpirun, srun or another shell does not pass to the ranks.

    For example:

        export MASTER_ADDR=gpu1
        mpirun -np 8 --host gpu1:4,gpu2:4 python train.py
    """
    if script.container is not None:
        yield from _in_merge(script, script.container)
        return
    if _EXPORTS_ALL.search(script.text):
        return

    reported: set[int] = set()
    for launch in launches(script):
        problems = [*_by_mpirun(script, launch), *_by_srun(script, launch), *_in_shell(launch)]
        for place, message, fix in problems:
            if place.start not in reported:
                reported.add(place.start)
                yield RULE.at(script, place, message, fix=fix)


def _in_merge(script: Script, container: Container) -> Iterator[Finding]:
    """A service of Compose whose environment replaces that of `<<`, of which its command needs
    more.

    For example:

        first: &first
          command: bash -c "torchrun --nnodes=2 --node-rank=$$NODE_RANK --master-addr=$$ADDR train.py"
          environment: {ADDR: first, NODE_RANK: "0"}
        second:
          <<: *first
          environment: {NODE_RANK: "1"}
    """
    if not container.replaced or not script.environment:
        return

    for launch in launches(script):
        values = [flag.value for flag in launch.flags.values() if flag.value is not None]
        names = {name for word in (*values, *launch.arguments) for name in _needed(word)}
        if launch.kind == PYTHON and "RANK" in {item.name for item in script.environment}:
            names |= {*_READ_BY_RANKS, "WORLD_SIZE"}

        lost = sorted(names & container.replaced - launch.script.variables.keys())
        if lost:
            message = (
                f"this environment replaces the one that `<<` brings: the service has no {lost[0]}"
            )
            fix = "merge it here, too: environment: {<<: *name, ...}"
            yield RULE.at(script, script.environment[0], message, fix=fix)
            return


def _needed(word: Word) -> list[str]:
    """`ADDR` of `$$ADDR`, which Compose leaves to the shell; not of `$${ADDR:-first}`."""
    return _NEEDED.findall(word.text)


def _by_mpirun(script: Script, launch: Launch) -> Iterator[Problem]:
    """What Open MPI does not pass to other hosts: it needs `-x MASTER_ADDR`.

    For example:

        export MASTER_ADDR=gpu1
        mpirun --host gpu1,gpu2 python train.py
    """
    words = [word.plain or word.head for word in launch.mpirun]
    is_open_mpi = any(map(_OPEN_MPI.fullmatch, words)) and not any(map(_HYDRA.fullmatch, words))
    if launch.kind != PYTHON or not is_open_mpi or _HOSTS.isdisjoint(words):
        return
    if "mca_base_env_list" in " ".join(words) or _SCHEDULER.search(script.text):
        return

    passed = {word.partition("=")[0] for word in words}
    missing = [name for name in _READ_BY_RANKS if name in script.exported - passed]
    if missing:
        message = f"mpirun does not pass {missing[0]} to the other hosts"
        yield launch.mpirun[0], message, f"add {' '.join(f'-x {name}' for name in missing)}"


def _by_srun(script: Script, launch: Launch) -> Iterator[Problem]:
    """What the tasks of srun do not get.

    For example:

        export DATA=/scratch/data
        MASTER_ADDR=gpu1
        srun --export=NCCL_DEBUG python train.py
    """
    if launch.srun is None or launch.srun_word is None:
        return

    listed = (launch.srun.by_name.get("export") or "ALL").split(",")
    lost = sorted(script.exported - {part.partition("=")[0] for part in listed})
    if lost and "ALL" not in listed:
        message = (
            f"srun --export={','.join(listed)} passes nothing else: the tasks get no {lost[0]}"
        )
        yield launch.srun_word, message, "write --export=ALL before the list"

    # A rank reads MASTER_ADDR from its environment.
    assigned = script.variables.get("MASTER_ADDR", [])
    is_local = bool(assigned) and "MASTER_ADDR" not in script.exported
    if launch.kind == PYTHON and is_local and not _ADDRESS_IN_USE.search(script.text):
        message = "MASTER_ADDR is not exported: the tasks of srun do not see it"
        yield assigned[0], message, "write export MASTER_ADDR"


def _in_shell(launch: Launch) -> Iterator[Problem]:
    """Variables of this shell that the words of another shell name.

    For example:

        PORT=29500
        ssh gpu1 'torchrun --master-port=$PORT train.py'
    """
    outer = launch.script.outer
    passed = {word.head.partition("=")[0] for word in launch.docker}
    if outer is None or "--env-file" in passed or launch.mpirun:
        return

    is_closed = launch.is_elsewhere or bool(launch.docker)
    where = "in that shell"
    if launch.docker:
        where = "in the container"
    elif launch.is_elsewhere:
        where = "on the other host"

    values = [flag.value for flag in launch.flags.values() if flag.value]
    for word in (*values, *launch.arguments):
        for name in _NAME.findall(word.text):
            if name in passed or name in launch.script.variables:
                continue

            assigned = outer.variables.get(name, [])
            is_seen = not is_closed and any(item.is_seen for item in assigned)
            if assigned and not is_seen:
                fix = "" if is_closed else f"export {name}"
                yield word, f"${name} is empty {where}: only this script sets it", fix
