"""DL138: `conda activate` in a script whose shell has not loaded conda."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL138")
_LOADS = re.compile(
    r"^#![^\n]*\s-\w*[li]|^\s*(?:source|\.)\s|\beval\b|conda\.sh|shell\.\w+ hook|shell hook"
    r"|module\s+(?:load|add|use)[^\n]*(?:conda|mamba|forge|python|torch|\$)|\bml\s",
    re.MULTILINE | re.IGNORECASE,
)


def check_shell(script: Script) -> Iterator[Finding]:
    if script.container is not None:
        yield from _in_container(script)
    # A script without a header may be read by an interactive shell.
    elif script.sbatch.by_name and launches(script):
        yield from _activated(script, 0)


def _in_container(script: Script) -> Iterator[Finding]:
    """`bash -c "conda activate ..."`; with `-l` or `-i`, bash reads the files that load conda."""
    words = [word.plain or "" for command in script.commands for word in command.words]
    is_loaded = any(re.fullmatch(r"-\w*[li]\w*", word) for word in words)
    if is_loaded or "BASH_ENV" in script.text:
        return
    inner = [launch.script for launch in launches(script) if launch.script is not script]
    for shell in dict.fromkeys(inner):
        yield from _activated(shell, shell.commands[0].start)


def _activated(script: Script, start: int) -> Iterator[Finding]:
    for command in script.commands:
        words = [word.plain for word in command.words[:2]]
        if words in (["conda", "activate"], ["mamba", "activate"]):
            if not _LOADS.search(script.text[start : command.start]):
                message = f"this fails: this shell has not loaded the functions of {words[0]}"
                yield RULE.at(script, command.words[0], message)
            return
