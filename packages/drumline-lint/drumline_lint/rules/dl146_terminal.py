"""DL146: a launch needs a terminal that it does not have, or does not survive the end of one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import ACCELERATE, Launch, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL146")
_TTY = re.compile(r"-[a-z]*t[a-z]*|--tty(?:=true)?")


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        if _is_ended_with_session(script, launch):
            message = f"{launch.kind} handles SIGHUP itself, so it ends with the session in spite of nohup"
            fix = "start it with setsid, or within tmux"
            yield RULE.at(script, launch.command.words[0], message, fix=fix)
        tty = [word for word in launch.docker if _TTY.fullmatch(word.plain or "")]
        if tty and script.sbatch.by_name:
            message = "a batch job has no terminal, and docker refuses -t without one"
            yield RULE.at(script, tty[0], message, fix="leave -t out", severity=Severity.ERROR)


def _is_ended_with_session(script: Script, launch: Launch) -> bool:
    before = script.text[launch.command.start : launch.name[0].start].split()
    is_handled = launch.is_torchrun or launch.kind == ACCELERATE
    is_remote = launch.is_elsewhere or launch.srun is not None or bool(script.sbatch.by_name)
    chooses = "signals-to-handle" in launch.flags or "setsid" in before
    return "nohup" in before and is_handled and not is_remote and not chooses
