"""DL106: torch.distributed.launch, which torchrun has replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Edit, Finding, Severity, rule
from drumline_lint.program.imports import connected
from drumline_lint.program.program import Program
from drumline_lint.reading.launchers import OLD_LAUNCH, Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.source import Source

RULE = rule("DL106", only_distributed=False)
# The launcher of older releases adds --local_rank.
_NEW_TORCH = re.compile(r"torchrun|torch[\"' ]*[=>~]=?[\"'=>~ ]*2\.|torch\.compile|weights_only")
# `torch==1.11.0`, `pytorch=1.12`, `"torch>=1.8,<2.0"`
_OLD_TORCH = re.compile(
    r"\b(?:py)?torch[\"' ]*(?:(?:={1,3}|~=|<=?)[\"' ^~]*1\.|[=<>~!][^\n#;]*< *2(?:\.0)*(?![.\d]))"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """It adds --local-rank, which a script has to take."""
    for launch in program.launches_of(source):
        is_added = launch.kind == OLD_LAUNCH and launch.is_sure and "use-env" not in launch.flags
        is_refused = "parse_args()" in source.text and "local-rank" not in source.text
        if not is_added or not is_refused or _has_old_torch(program, launch.script):
            continue
        texts = [launch.script.text, *(file.text for file in connected(program, source))]
        takes_old = any("--local_rank" in text for text in texts)
        is_new = any(_NEW_TORCH.search(text) for text in texts)
        if is_new or not takes_old:
            message = f"torch.distributed.launch adds --local-rank, which {source.path.name} does not take"
            fix = "start it with torchrun, and read LOCAL_RANK"
            yield RULE.at(
                launch.script, launch.name[-1], message, fix=fix, severity=Severity.WARNING
            )


def _has_old_torch(program: Program, script: Script) -> bool:
    """Whether requirements beside the script, or in a folder above it, pin torch below 2.0, whose
    launcher adds --local_rank."""
    folders = set(script.path.parents)
    return any(
        path.parent in folders and _OLD_TORCH.search(text) is not None
        for path, text in program.documents.items()
    )


def check_shell(script: Script) -> Iterator[Finding]:
    """The fix is mechanical if the script already reads LOCAL_RANK, which --use-env shows."""
    for launch in launches(script):
        if launch.kind == OLD_LAUNCH:
            uses_env = "use-env" in launch.flags
            message = "torch.distributed.launch is deprecated in favour of torchrun"
            if not uses_env:
                message += (
                    "; it adds --local-rank to the arguments of the script, which torchrun does not"
                )
            fix = "write torch.distributed.run or torchrun, without --use-env" if uses_env else ""
            edits = _edits(script, launch) if uses_env else ()
            yield RULE.at(script, launch.name[-1], message, fix=fix, edits=edits)


def _edits(script: Script, launch: Launch) -> list[Edit]:
    flag = launch.flags["use-env"].word
    is_here = launch.command.start < launch.name[-1].start < flag.start < launch.command.end
    # YAML and Dockerfiles may have a word in quotes, or on a line of its own.
    if script.container is not None or not is_here:
        return []
    blanks = re.compile(r"[ \t]*").match(script.text, flag.end)
    assert blanks is not None
    flag_and_blanks = Word(flag.start, blanks.end())
    return [
        _edit(script, launch.name[-1], "torch.distributed.run"),
        _edit(script, flag_and_blanks, ""),
    ]


def _edit(script: Script, span: Word, text: str) -> Edit:
    return Edit(start=script.position(span.start), end=script.position(span.end), text=text)
