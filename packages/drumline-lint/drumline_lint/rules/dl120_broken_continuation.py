"""DL120: a command ends before its last lines.

A line that continues ends with a backslash; a comment, a blank or an empty line behind it ends the
command.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL120")

_LATER_FLAG = re.compile(r"--?[A-Za-z][\w-]*=?$|--[A-Za-z]")
_CAUSES = (
    (re.compile(r"\\(?:[ \t]*\r?\n)?[ \t]*#"), "at the comment between its lines"),
    (re.compile(r"\\[ \t]+\n"), "at a backslash with a blank after it"),
    (re.compile(r"\\\r?\n[ \t]*\r?\n"), "at the empty line between its lines"),
    (re.compile(""), "at a line without a backslash"),
)


def check_shell(script: Script) -> Iterator[Finding]:
    """A command that is a flag, after a launch.

    For example:

        torchrun --nproc-per-node=4 train.py
            --lr 0.1
    """
    started = launches(script)
    starts = [launch.name[0].start for launch in started]

    for scope in dict.fromkeys([script, *(launch.script for launch in started)]):
        if scope.container is not None and scope.outer is None:
            continue

        for before, command in itertools.pairwise(scope.commands):
            if not _LATER_FLAG.match(command.words[0].head):
                continue

            if any(before.start <= start <= before.end for start in starts):
                text = script.text[before.start : command.start]
                how = next(cause for pattern, cause in _CAUSES if pattern.search(text))
                message = f"the command ends {how}: this line is a command of its own, and fails"
                yield RULE.at(script, command.words[0], message)
