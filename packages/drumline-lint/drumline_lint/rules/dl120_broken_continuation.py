"""DL120: a command ends before its last lines."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.environment import scopes
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Command

RULE = rule("DL120")
_LATER_FLAG = re.compile(r"--?[A-Za-z][\w-]*=?$|--[A-Za-z]")
_BLANK_AFTER_BACKSLASH = re.compile(r"\\[ \t]+\n")
_COMMENT = re.compile(r"\\\r?\n[ \t]*#")
_EMPTY_LINE = re.compile(r"\\\r?\n[ \t]*\r?\n")


def check_shell(script: Script) -> Iterator[Finding]:
    started = sorted(launch.name[0].start for launch in launches(script))
    for scope in scopes(script, launches(script)):
        if scope.container is not None and scope.outer is None:
            continue
        commands = sorted(scope.commands, key=lambda command: command.start)
        for before, command in itertools.pairwise(commands):
            if _is_rest(command) and _has_one(started, before):
                how = _how(script.text[before.start : command.start])
                message = f"the command ends {how}: this line is a command of its own, and fails"
                yield RULE.at(script, command.words[0], message)


def _has_one(started: Sequence[int], command: Command) -> bool:
    """Whether a launcher begins in a command."""
    position = bisect_left(started, command.start)
    return position < len(started) and started[position] <= command.end


def _is_rest(command: Command) -> bool:
    return _LATER_FLAG.match(command.words[0].head) is not None


def _how(text: str) -> str:
    if _COMMENT.search(text):
        return "at the comment between its lines"
    if _BLANK_AFTER_BACKSLASH.search(text):
        return "at a backslash with a blank after it"
    if _EMPTY_LINE.search(text):
        return "at the empty line between its lines"
    return "at a line without a backslash"
