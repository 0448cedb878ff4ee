"""The variables that the processes of a launch see, and where they are set."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline_lint.reading.container_words import container_variable
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.shell import Assignment, Script

_NAME_AND_VALUE = re.compile(r"([A-Za-z_]\w*)=(.*)")
_COMMENT = re.compile(r"(?:^|\s)#(?!SBATCH|!)(.*)")
_ASSIGNMENT_LINE = re.compile(r"\s*(?:export\s+)?[A-Za-z_]\w*=[^#]*$")
_LONGEST_COMMENT = 1000


@dataclass(frozen=True)
class ScopedAssignment:
    """An assignment, and the script that gives its variables their values."""

    script: Script
    assignment: Assignment


def variable(launch: Launch, name: str) -> ScopedAssignment | None:
    """The only assignment of a variable that the launcher's processes see."""
    scope: Script | None = launch.script
    while scope is not None:
        for_command = scope.command_variables.get(launch.command.start, [])
        for_command = [assignment for assignment in for_command if assignment.name == name]
        assigned = for_command or scope.variables.get(name, [])
        if assigned:
            is_always = assigned is for_command or not assigned[0].command.is_conditional
            is_only = len(assigned) == 1 and is_always
            is_seen = assigned[0].is_exported or name in scope.exported
            return ScopedAssignment(scope, assigned[0]) if is_only and is_seen else None
        scope = scope.outer
    return None


def scopes(script: Script, launched: Sequence[Launch]) -> list[Script]:
    """The script, and the code in it that other shells read."""
    inner = [launch.script for launch in launched if launch.script is not script]
    return [script, *dict.fromkeys(inner)]


def launch_variables(script: Script) -> list[ScopedAssignment]:
    """The variables that the processes of any launch see, also by `docker run -e` and `mpirun
    -x`."""
    launched = launches(script)
    exported = [
        ScopedAssignment(scope, assignment)
        for scope in scopes(script, launched)
        for assignment in scope.assignments
        if assignment.is_exported or assignment.name in scope.exported
    ]
    return [*exported, *(item for launch in launched for item in _runner_variables(launch))]


def _runner_variables(launch: Launch) -> Iterator[ScopedAssignment]:
    for words in (launch.docker, launch.mpirun):
        for option, word in itertools.pairwise(words):
            pair = _NAME_AND_VALUE.fullmatch(word.plain or "")
            if option.plain in {"-e", "--env", "-x", "-genv"} and pair:
                value = word.behind(len(pair[1]) + 1)
                yield ScopedAssignment(
                    launch.script, container_variable(pair[1], value, (word.start, word.end))
                )


def comment_at(item: ScopedAssignment) -> str:
    """The comment behind an assignment, or above the assignments that it is one of."""
    text = item.script.text
    start = text.rfind("\n", 0, item.assignment.start) + 1
    end = text.find("\n", start)
    line = text[start : end if end >= 0 else len(text)]
    above = text[max(0, start - _LONGEST_COMMENT) : start].splitlines()
    comments = [line]
    while above and _ASSIGNMENT_LINE.match(above[-1]):
        above.pop()
    while above and _COMMENT.match(above[-1].strip()):
        comments.append(above.pop())
    return " ".join(match[1] for match in map(_COMMENT.search, comments) if match)
