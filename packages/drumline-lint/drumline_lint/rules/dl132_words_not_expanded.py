"""DL132: the words of a command are not what a shell would make of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Command, Kind, Word

RULE = rule("DL132")
# Training scripts have `${...}` of their own, in small letters.
_VARIABLE = re.compile(r"\$\{?([A-Z_][A-Z0-9_]*)\b\}?")

_SET_IN_PODS = set(
    "JOB_COMPLETION_INDEX HOSTNAME RANK WORLD_SIZE LOCAL_RANK NODE_RANK MASTER_ADDR MASTER_PORT".split()
)
_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")
# `GPUS=0, 1` and `PORT= 29500`: what comes after the blank is a command, or a name to export.
_CUT_VALUE = re.compile(r"[A-Z_][A-Z0-9_]*=(?:[\d,]*,)?[ \t]+\d[\d,]*(?=[ \t\n,;&]|$)")


def check_shell(script: Script) -> Iterator[Finding]:
    started = launches(script)
    if script.container is None and (started or "CUDA_VISIBLE_DEVICES" in script.text):
        for command in script.commands:
            yield from _blanks(script, command)
        yield from _all_arguments(script, started)
    for launch in started:
        if launch.misread:
            fix = "give the command as one word to `bash -c`, or each word as an item of the list"
            yield RULE.at(script, launch.name[0], launch.misread, fix=fix)
        elif script.container is not None:
            yield from _without_shell(script, launch)


def _blanks(script: Script, command: Command) -> Iterator[Finding]:
    """`PORT = 29500`, `export PORT = 29500`, `CUDA_VISIBLE_DEVICES=0, 1 torchrun ...`."""
    words = command.words
    is_export = words[0].plain == "export"
    name = words[1] if is_export and len(words) > 1 else words[0]
    after = words[2 if is_export else 1 :]
    is_apart = bool(after) and after[0].head.startswith("=")
    if (_NAME.fullmatch(name.plain or "") and is_apart) or _CUT_VALUE.match(
        script.text, name.start
    ):
        message = "a value ends at a blank, and has none before it: the shell takes the rest for other words"
        yield RULE.at(script, name, message, fix="write NAME=value without blanks")


def _all_arguments(script: Script, started: Sequence[Launch]) -> Iterator[Finding]:
    """`bash -c "torchrun train.py $@"`."""
    for command in dict.fromkeys(launch.command for launch in started):
        for word in command.words:
            is_part = len(word.pieces) > 1 and script.text[word.start] == '"'
            expanded = {piece.text for piece in word.pieces if piece.kind is not Kind.TEXT}
            if is_part and expanded & {"@", "${@}"}:
                position = script.text.find("@", word.start)
                message = (
                    "within other words, $@ ends the word after the first argument of the script"
                )
                place = Word(position, position + 1, ())
                yield RULE.at(script, place, message, fix="write $*", severity=Severity.WARNING)


def _without_shell(script: Script, launch: Launch) -> Iterator[Finding]:
    assert script.container is not None
    values = [flag.value for flag in launch.flags.values() if flag.value is not None]
    for word in (*values, *launch.arguments):
        if script.container.kind == "service":
            yield from _expanded_early(script, word)
        elif launch.script.outer is None and launch.name[0].code is not None:
            yield from _literal(script, word)


def _literal(script: Script, word: Word) -> Iterator[Finding]:
    variables = {assignment.name for assignment in script.environment}
    for piece in word.pieces:
        name = _VARIABLE.search(piece.text) if piece.kind is Kind.TEXT else None
        # Others may be replaced before the manifest is applied, as by envsubst.
        if name is not None and name[1] in _SET_IN_PODS | variables:
            message = f"no shell reads this command: {name[0]} stays as it is written"
            is_image = script.container is not None and script.container.kind == "image"
            is_expanded = name[1] != "HOSTNAME" and not is_image
            fix = f"write $({name[1]}), which Kubernetes expands" if is_expanded else ""
            yield RULE.at(script, word, message, fix=fix)
            return


def _expanded_early(script: Script, word: Word) -> Iterator[Finding]:
    """Compose takes the variables of the shell that starts it, not those of the service."""
    variables = {assignment.name: assignment.value for assignment in script.environment}
    for piece in word.pieces:
        name = piece.text.strip("${}")
        value = variables.get(name) if piece.kind is not Kind.TEXT else None
        is_passed_on = value is None or any(part.kind is not Kind.TEXT for part in value.pieces)
        if not is_passed_on and not script.text.startswith("$$", word.start):
            message = f"Compose expands ${name} before the service starts, without its environment"
            yield RULE.at(script, word, message, fix=f"write $${name} in the code of `bash -c`")
            return
