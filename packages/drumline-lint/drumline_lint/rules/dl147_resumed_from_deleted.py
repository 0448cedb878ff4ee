"""DL147: a script deletes the checkpoints that its training resumes from."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Command, Word

RULE = rule("DL147")
_RESUMES = re.compile(r"resum|restart|continue", re.IGNORECASE)
_OF_RUN = re.compile(r"ckpt|checkpoint|resum|restart|out|save|work|run|exp|log", re.IGNORECASE)
_IF_THERE = re.compile(r"(?:\[+|test)[ \t]+-[de][^\n;]*&&[ \t]*$")


def check_shell(script: Script) -> Iterator[Finding]:
    for command in script.commands:
        if not _deletes_always(script, command):
            continue
        for launch in launches(script):
            folders = [_written(script, word) for word in command.words[1:]]
            if command.start < launch.command.start and _resumes_from(script, launch, folders):
                message = "the job deletes its checkpoints whenever it starts, so it never resumes"
                yield RULE.at(script, command.words[0], message)
                break


def _deletes_always(script: Script, command: Command) -> bool:
    is_tree = any(re.fullmatch(r"-\w*[rR]\w*", word.plain or "") for word in command.words[1:])
    if command.words[0].plain != "rm" or not is_tree:
        return False
    line = script.text[script.text.rfind("\n", 0, command.start) + 1 : command.start]
    return not command.is_conditional or _IF_THERE.search(line) is not None


def _resumes_from(script: Script, launch: Launch, folders: list[str]) -> bool:
    written = [_written(script, word) for word in launch.arguments]
    resumes = "requeue" in script.sbatch.by_name or any(map(_RESUMES.search, written))
    return resumes and any(
        folder and not folder.startswith("-") and folder in argument
        for folder in folders
        for option, argument in itertools.pairwise(["", *written])
        if _OF_RUN.search(argument if "=" in argument else option)
    )


def _written(script: Script, word: Word) -> str:
    return re.sub(r"[\"'{}]", "", script.text[word.start : word.end]).removesuffix("/*").rstrip("/")
