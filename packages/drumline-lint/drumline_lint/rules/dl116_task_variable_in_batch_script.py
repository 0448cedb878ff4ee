"""DL116: a batch script expands a variable that differs from task to task."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import TASK_VARIABLES, started_on_nodes, tasks_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import backend
from drumline_lint.reading.shell import Script, TextRange
from drumline_lint.reading.shell_parser import Word

RULE = rule("DL116")

_RANKS = {"RANK", "LOCAL_RANK", "NODE_RANK"}
_STARTS_ITSELF = re.compile(r"srun[^\n]*(?:\$0|\$\{0\}|BASH_SOURCE)")
_NAME = re.compile(r"(?<!\\)\$\{?(\w+)")


def check_shell(script: Script) -> Iterator[Finding]:
    """A variable of tasks in a word that the batch script's own shell puts together.

    For example:

        #SBATCH --nodes=2
        srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID train.py
    """
    if not script.sbatch.by_name or _STARTS_ITSELF.search(script.text):
        return

    places: dict[int, tuple[TextRange, str]] = {}
    for launch in launches(script):
        if not _has_several_tasks(launch):
            continue

        for place, word in _early_words(script, launch):
            if name := _task_variable(script, word):
                places.setdefault(place.start, (place, name))

    for place, name in places.values():
        message = (
            f"the batch script expands ${name} before srun starts anything: it is 0 for every task"
        )
        yield RULE.at(script, place, message)


def _has_several_tasks(launch: Launch) -> bool:
    """`srun torchrun ...` in a job of two nodes, or of two tasks on a node."""
    is_several = started_on_nodes(launch) != 1 or tasks_per_node(launch) != 1
    return launch.srun is not None and is_several


def _early_words(script: Script, launch: Launch) -> Iterator[tuple[TextRange, Word]]:
    """What the batch script's own shell puts together, each with its place.

    For example:

        torchrun and others set the ranks of their processes themselves.
    """
    # c10d gives each node its rank, and ignores that of the flag.
    is_assigned = backend(launch) not in {"static", ""}
    if not launch.is_expanded_late:
        for name, flag in launch.flags.items():
            is_ignored = is_assigned and name in {"node-rank", "machine-rank"}
            if flag.value is not None and not is_ignored:
                yield flag.value, flag.value

        for word in launch.arguments:
            yield word, word

    read = {"CUDA_VISIBLE_DEVICES", *(_RANKS if launch.kind == PYTHON else ())}
    for assignment in script.assignments:
        if assignment.name in read and assignment.is_seen:
            yield assignment, assignment.value


def _task_variable(script: Script, word: Word, depth: int = 0) -> str:
    """The variable of a task in a word, or in the only value of a variable in it; empty if there is
    none.

    `SLURM_PROCID` of `$NUMBER`, after:

        NUMBER=$SLURM_PROCID
    """
    for name in _NAME.findall(word.text):
        if name in TASK_VARIABLES:
            return str(name)

        assigned = script.variables.get(name, [])
        if len(assigned) == 1 and depth < 4:
            return _task_variable(script, assigned[0].value, depth + 1)
    return ""
