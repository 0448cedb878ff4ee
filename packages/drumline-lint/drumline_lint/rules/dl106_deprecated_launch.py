"""DL106: torch.distributed.launch, which torchrun has replaced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Edit, Finding, Severity, rule
from drumline_lint.program.imports import any_text_near, connected
from drumline_lint.program.program import Program
from drumline_lint.program.tree import owner_of
from drumline_lint.reading.launchers import OLD_LAUNCH, Launch, launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.source import Source

RULE = rule("DL106", only_distributed=False)

_REPLACE = "start it with torchrun, and read LOCAL_RANK"

# The launcher of older releases adds --local_rank.
_NEW_TORCH = re.compile(r"torchrun|torch[\"' ]*[=>~]=?[\"'=>~ ]*2\.|torch\.compile|weights_only")
# `torch==1.11.0`, `pytorch=1.12`, `"torch>=1.8,<2.0"`
_OLD_TORCH = re.compile(
    r"\b(?:py)?torch[\"' ]*(?:(?:={1,3}|~=|<=?)[\"' ^~]*1\.|[=<>~!][^\n#;]*< *2(?:\.0)*(?![.\d]))"
)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A script that does not take --local-rank, which the launcher adds.

    For `python -m torch.distributed.launch train.py`:

        parser.add_argument("--local_rank", type=int)
        parser.parse_args()

    Of a README the place is in the script.
    """
    if "parse_args()" not in source.text or "local-rank" in source.text:
        return

    yield from _shown_in_readme(program, source)
    for launch in program.launches_of(source):
        if launch.kind != OLD_LAUNCH or not launch.is_sure or "use-env" in launch.flags:
            continue
        if _has_old_torch(program, launch.script):
            continue

        texts = [launch.script.text, *(file.text for file in connected(program, source))]
        takes_old = any("--local_rank" in text for text in texts)
        if not takes_old or any(map(_NEW_TORCH.search, texts)):
            message = f"torch.distributed.launch adds --local-rank, which {source.path.name} does not take"
            place = launch.name[-1]
            yield RULE.at(launch.script, place, message, fix=_REPLACE, severity=Severity.WARNING)


def _shown_in_readme(program: Program, source: Source) -> Iterator[Finding]:
    """A parser that takes neither --local_rank nor --local-rank, where a README starts the script by
    the old launcher, which adds the one or the other."""
    shown = [launch for launch in program.starts_of(source) if launch.script.is_readme]
    old = [launch for launch in shown if launch.kind == OLD_LAUNCH and launch.is_sure]
    if not old or any("use-env" in launch.flags for launch in old):
        return
    if any_text_near(program, source, "--local", "REMAINDER", "parents="):
        return

    readme = old[0].script.path.name
    for call in program.index(source).calls.get("parse_args", ()):
        if _is_of_argparse(program, call):
            message = (
                f"{readme} starts this with torch.distributed.launch, which adds --local-rank: "
                "the parser has no such option"
            )
            yield RULE.at(source, call, message, fix=_REPLACE, severity=Severity.WARNING)


def _is_of_argparse(program: Program, call: ast.Call) -> bool:
    """`parser.parse_args()`, after `parser = argparse.ArgumentParser()`."""
    return bool(program.made(owner_of(call), "argparse.ArgumentParser")) and not call.args


def _has_old_torch(program: Program, script: Script) -> bool:
    """Whether requirements beside the script, or in a folder above it, pin torch below 2.0.

    The launcher of such a version adds --local_rank:

        torch==1.13.1
    """
    folders = set(script.path.parents)
    return any(
        path.parent in folders and _OLD_TORCH.search(text) is not None
        for path, text in program.documents.items()
    )


def check_shell(script: Script) -> Iterator[Finding]:
    """The old launcher itself: `python -m torch.distributed.launch --use-env train.py`.

    The fix is mechanical if the script already reads LOCAL_RANK, which --use-env shows.
    """
    for launch in launches(script):
        if launch.kind != OLD_LAUNCH:
            continue

        message = "torch.distributed.launch is deprecated in favour of torchrun"
        if "use-env" in launch.flags:
            fix = "write torch.distributed.run or torchrun, without --use-env"
            edits = _edits(script, launch)
            yield RULE.at(script, launch.name[-1], message, fix=fix, edits=edits)
        else:
            message += (
                "; it adds --local-rank to the arguments of the script, which torchrun does not"
            )
            yield RULE.at(script, launch.name[-1], message)


def _edits(script: Script, launch: Launch) -> list[Edit]:
    """Edits that write the name of the new launcher, and remove --use-env.

    For example:

        python -m torch.distributed.run train.py
    """
    name = launch.name[-1]
    flag = launch.flags["use-env"].word
    is_here = launch.command.start < name.start < flag.start < launch.command.end
    # YAML and Dockerfiles may have a word in quotes, or on a line of its own.
    if script.container is not None or not is_here:
        return []

    blanks = re.compile(r"[ \t]*").match(script.text, flag.end)
    assert blanks is not None
    flag_and_blanks = Word(flag.start, blanks.end())
    return [_edit(script, name, "torch.distributed.run"), _edit(script, flag_and_blanks, "")]


def _edit(script: Script, span: Word, text: str) -> Edit:
    return Edit(start=script.position(span.start), end=script.position(span.end), text=text)
