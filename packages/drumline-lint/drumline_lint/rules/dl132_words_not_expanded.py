"""DL132: the words of a command are not what a shell would make of them.

A shell splits words at blanks, and is not there for the list of words of a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL132")

_LITERAL = re.compile(r"\\\$\{?([A-Z_][A-Z0-9_]*)\b")
# Others may be replaced before the manifest is applied, as by envsubst.
_SET_IN_PODS = set(
    "JOB_COMPLETION_INDEX HOSTNAME RANK WORLD_SIZE LOCAL_RANK NODE_RANK MASTER_ADDR MASTER_PORT".split()
)
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
# `GPUS=0, 1` and `PORT= 29500`: what comes after the blank is a command, or a name to export.
_CUT_VALUE = re.compile(r"[A-Z_][A-Z0-9_]*=(?:[\d,]*,)?[ \t]+\d[\d,]*(?=[ \t\n,;&]|$)")


def check_shell(script: Script) -> Iterator[Finding]:
    """Assignments with blanks, and variables in a manifest that no shell reads.

        PORT = 29500
        torchrun --master-port=$PORT train.py

    In the command of a container:

        command: ["torchrun", "--node-rank=$JOB_COMPLETION_INDEX", "train.py"]
    """
    started = launches(script)
    if script.container is not None:
        for launch in started:
            if launch.script is script:
                yield from _literal(script, launch)

    elif started or "CUDA_VISIBLE_DEVICES" in script.text:
        yield from _blanks(script)


def _blanks(script: Script) -> Iterator[Finding]:
    """Values with a blank before them, or in them.

    For example:

        PORT = 29500
        export PORT = 29500
        CUDA_VISIBLE_DEVICES=0, 1 torchrun train.py
    """
    for command in script.commands:
        words = command.words[1:] if command.words[0].plain == "export" else command.words
        if not words:
            continue

        is_apart = len(words) > 1 and words[1].head.startswith("=")
        is_assigned = is_apart and _NAME.fullmatch(words[0].plain or "")
        if is_assigned or _CUT_VALUE.match(script.text, words[0].start):
            message = "a value ends at a blank, and has none before it: the shell takes the rest for other words"
            fix = "write NAME=value without blanks"
            severity = Severity.NOTE if is_apart and not _is_read(script, words[0].head) else None
            yield RULE.at(script, words[0], message, fix=fix, severity=severity)


def _is_read(script: Script, name: str) -> bool:
    """Whether the script uses the variable, CUDA or a launcher does, or the script ends here."""
    if name.startswith("CUDA") or name in _SET_IN_PODS or "set -e" in script.text:
        return True

    return re.search(rf"\$\{{?{name}\b", script.text) is not None


def _literal(script: Script, launch: Launch) -> Iterator[Finding]:
    """A variable in a list of words, which no shell reads.

    For example:

        command: ["torchrun", "--node-rank=$JOB_COMPLETION_INDEX", "train.py"]
    """
    variables = _SET_IN_PODS | {assignment.name for assignment in script.environment}
    values = [flag.value for flag in launch.flags.values() if flag.value is not None]

    for word in (*values, *launch.arguments):
        name = _LITERAL.search(word.text)
        if name is None or name[1] not in variables:
            continue

        message = f"no shell reads this command: ${name[1]} stays as it is written"
        is_image = script.container is not None and script.container.kind == "image"
        fix = "" if is_image else f"write $({name[1]}), which Kubernetes expands"
        yield RULE.at(script, word, message, fix=fix)
