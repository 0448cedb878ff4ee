"""DL116: a batch script expands a variable that differs from task to task."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import TASK_VARIABLES, started_on_nodes, tasks_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import DYNAMIC_BACKENDS, backend
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Kind, Word

RULE = rule("DL116")
_RANKS = {"RANK", "LOCAL_RANK", "NODE_RANK"}
_STARTS_ITSELF = re.compile(r"srun[^\n]*(?:\$0|\$\{0\}|BASH_SOURCE)")


def check_shell(script: Script) -> Iterator[Finding]:
    if not script.sbatch.by_name or _STARTS_ITSELF.search(script.text):
        return
    started = [launch for launch in launches(script) if _has_several_tasks(launch)]
    reported: set[int] = set()
    for launch in started:
        for word in _early_words(launch):
            name = _task_variable(script, word)
            if name and word.start not in reported:
                reported.add(word.start)
                yield RULE.at(script, word, _message(name))
    # torchrun and others set the ranks of their processes themselves.
    has_ranks = any(launch.kind == PYTHON for launch in started)
    read = {"CUDA_VISIBLE_DEVICES", *(_RANKS if has_ranks else ())}
    for assignment in script.assignments if started else ():
        name = _task_variable(script, assignment.value) if assignment.name in read else ""
        is_exported = assignment.is_exported or assignment.name in script.exported
        if name and is_exported and assignment.start not in reported:
            yield RULE.at(script, assignment, _message(name))


def _message(name: str) -> str:
    return f"the batch script expands ${name} before srun starts anything: it is 0 for every task"


def _has_several_tasks(launch: Launch) -> bool:
    if launch.srun is None:
        return False
    return started_on_nodes(launch) != 1 or tasks_per_node(launch) != 1


def _early_words(launch: Launch) -> Iterator[Word]:
    """The words that the batch script's own shell puts together."""
    if launch.is_expanded_late:
        return
    # c10d gives each node its rank, and ignores that of the flag.
    is_assigned = backend(launch) in DYNAMIC_BACKENDS
    for name, flag in launch.flags.items():
        is_ignored = is_assigned and name in {"node-rank", "machine-rank"}
        if flag.value is not None and not is_ignored:
            yield flag.value
    yield from launch.arguments


def _task_variable(script: Script, word: Word, depth: int = 0) -> str:
    """The variable of a task in a word, or in the only value of a variable in it."""
    for piece in word.pieces:
        name = piece.text if piece.kind is Kind.VARIABLE else _named_in(piece.text)
        if piece.kind is Kind.TEXT or not name:
            continue
        if name in TASK_VARIABLES:
            return name
        assigned = script.variables.get(name, [])
        if len(assigned) == 1 and depth < 4:
            return _task_variable(script, assigned[0].value, depth + 1)
    return ""


def _named_in(expansion: str) -> str:
    """Of `${SLURM_NODEID:-0}` or `$((SLURM_PROCID + 1))`."""
    names = re.findall(r"\b[A-Za-z_]\w*", expansion) if not expansion.startswith("$(s") else []
    return next((name for name in names if name in TASK_VARIABLES), "")
