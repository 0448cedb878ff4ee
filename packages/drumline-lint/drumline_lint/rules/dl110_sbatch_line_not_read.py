"""DL110: a line for sbatch that sbatch does not read, or does not read as it is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.slurm import HeaderLine, header_lines

RULE = rule("DL110")
# What a template makes of such a file is not seen.
_TEMPLATE = re.compile(r"\{%|<%|\{\{")
_COMMENT = re.compile(
    r"^#[ \t]+SBATCH[ \t]+(?:--[a-z-]+(?:[= ]\S+)?|-[A-Za-z] ?\S*)[ \t]*(?:#.*)?$", re.MULTILINE
)
_MISSPELLED = re.compile(r"^#(?!SBATCH)(?i:sbatch)[ \t]+-.*$", re.MULTILINE)
_VARIABLE = re.compile(r"(?<!\\)\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*)|(?<=[= ])~(?=/)")
_BLANK_AT_EQUALS = re.compile(r"--[\w-]+(?:[ \t]+=|=[ \t])|\s-[Nncpt]=")
_WITHOUT_DASHES = re.compile(r"[ \t]+[a-z][a-z-]*=\S")
_NO_GPUS = re.compile(r"--gres[= ](?:gpus\b|gpu\d|\d)\S*")
_MEGABYTES = re.compile(r"--mem(?:-per-cpu|-per-gpu)?[= ][1-9]\d{0,2}(?=\s|$)")
# Numbers that people write for hours or days.
_MINUTES = re.compile(r"(?:--time[= ]|-t ?)(?:24|48|72|96|168)(?=\s|$)")
_LOG_FILE = re.compile(r"(?:--output[= ]|-o ?)(\S+)/[^\s/]+")


def check_shell(script: Script) -> Iterator[Finding]:
    if "sbatch" not in script.text.lower() or script.container or _TEMPLATE.search(script.text):
        return
    lines = list(header_lines(script.text))
    is_file = script.line_starts is None  # Not one that another script writes.
    if lines and is_file and not script.text.startswith("#!"):
        first = Word(0, max(1, script.text.find("\n")), ())
        message = "sbatch refuses this script: its first line names no shell"
        yield RULE.at(script, first, message, fix="begin the file with #!/bin/bash")
        return
    yield from _comments(script, lines)
    late = [line for line in lines if line.is_late]
    if late:
        further = f", nor the {len(late) - 1} like it below" if len(late) > 1 else ""
        message = f"sbatch does not read this line{further}: it comes after the first command"
        yield RULE.at(script, _place(late[0]), message, fix="move it above the first command")
    for line in lines:
        if not line.is_late:
            yield from _misread(script, line, is_file=is_file)


def _comments(script: Script, lines: list[HeaderLine]) -> Iterator[Finding]:
    comments = list(_COMMENT.finditer(script.text))
    # Beside lines that are read, such a line has been taken out.
    if len(comments) > 1 and not lines:
        message = "sbatch does not read this line: it is a comment, as are all others like it"
        place = Word(*comments[0].span(), ())
        yield RULE.at(script, place, message, fix="write #SBATCH without a blank")
    for misspelled in _MISSPELLED.finditer(script.text) if lines else ():
        message = "sbatch does not read this line: it is a comment"
        place = Word(*misspelled.span(), ())
        yield RULE.at(script, place, message, fix="write #SBATCH", severity=Severity.WARNING)


def _misread(script: Script, line: HeaderLine, *, is_file: bool) -> Iterator[Finding]:
    place = _place(line)
    if is_file and (variable := _VARIABLE.search(line.text)):
        message = f"sbatch does not expand {variable[0]}: it reads this line before any shell does"
        fix = "write the value, or give the option on sbatch's command line"
        yield RULE.at(script, place, message, fix=fix)
    elif _BLANK_AT_EQUALS.search(line.text) or _WITHOUT_DASHES.match(line.text):
        fix = "write --option=value, or -N 2"
        yield RULE.at(script, place, "sbatch refuses an option that is written so", fix=fix)
    elif gres := _NO_GPUS.search(line.text):
        message = f"sbatch refuses {gres[0]}: there is no resource of that name"
        yield RULE.at(script, place, message, fix="write --gres=gpu:4, or gpu:a100:4")
    elif memory := _MEGABYTES.search(line.text):
        message = f"{memory[0]} is a number of megabytes"
        yield RULE.at(script, place, message, fix="write its unit, as in --mem=64G")
    elif minutes := _MINUTES.search(line.text):
        message = f"{minutes[0]} is a number of minutes"
        fix = "write hours as in --time=24:00:00"
        yield RULE.at(script, place, message, fix=fix, severity=Severity.WARNING)
    elif (log_file := _LOG_FILE.search(line.text)) and _is_made(script, log_file[1]):
        message = f"Slurm opens this file before the script makes {log_file[1]}: without it the job ends with no output"
        fix = "make the folder before sbatch is called"
        yield RULE.at(script, place, message, fix=fix, severity=Severity.WARNING)


def _is_made(script: Script, folder: str) -> bool:
    for command in script.commands:
        names = [(word.plain or "").rstrip("/").removeprefix("./") for word in command.words]
        if names[0] == "mkdir" and folder.removeprefix("./") in names[1:]:
            return True
    return False


def _place(line: HeaderLine) -> Word:
    return Word(line.start, line.end, ())
