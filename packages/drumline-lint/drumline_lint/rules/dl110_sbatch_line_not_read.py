"""DL110: a line for sbatch that sbatch does not read, or does not read as it is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.slurm import HeaderLine, header_lines

RULE = rule("DL110")
# What a template makes of such a file is not seen.
_TEMPLATE = re.compile(r"\{%|<%|\{\{")
_COMMENT = re.compile(
    r"^#[ \t]+SBATCH[ \t]+(?:--[a-z-]+(?:[= ]\S+)?|-[A-Za-z] ?\S*)[ \t]*(?:#.*)?$", re.MULTILINE
)
_VARIABLE = re.compile(r"(?<!\\)\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*)")


def check_shell(script: Script) -> Iterator[Finding]:
    if "SBATCH" not in script.text or script.container or _TEMPLATE.search(script.text):
        return
    lines = list(header_lines(script.text))
    comments = list(_COMMENT.finditer(script.text))
    # Beside lines that are read, such a line has been taken out.
    if len(comments) > 1 and not lines:
        message = "sbatch does not read this line: it is a comment, as are all others like it"
        place = Word(*comments[0].span(), ())
        yield RULE.at(script, place, message, fix="write #SBATCH without a blank")
    late = [line for line in lines if line.is_late]
    if late:
        further = f", nor the {len(late) - 1} like it below" if len(late) > 1 else ""
        message = f"sbatch does not read this line{further}: it comes after the first command"
        yield RULE.at(script, _place(late[0]), message, fix="move it above the first command")
    for line in lines:
        if not line.is_late and (variable := _VARIABLE.search(line.text)):
            message = (
                f"sbatch does not expand {variable[0]}: it reads this line before any shell does"
            )
            fix = "write the value, or give the option on sbatch's command line"
            yield RULE.at(script, _place(line), message, fix=fix)


def _place(line: HeaderLine) -> Word:
    return Word(line.start, line.end, ())
