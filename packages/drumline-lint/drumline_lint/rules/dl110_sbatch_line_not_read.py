"""DL110: a line for sbatch that sbatch does not read, or does not read as it is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Word
from drumline_lint.reading.slurm import header_lines

RULE = rule("DL110")

# What a template makes of such a file is not seen.
_TEMPLATE = re.compile(r"\{%|<%|\{\{")
_VARIABLE = re.compile(r"(?<!\\)\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*)")


def check_shell(script: Script) -> Iterator[Finding]:
    """Lines for sbatch after the first command, and lines with a variable.

    For example:

        #SBATCH --output=$HOME/logs/%j.out
        module load cuda
        #SBATCH --nodes=2
    """
    if "SBATCH" not in script.text or script.container or _TEMPLATE.search(script.text):
        return

    lines = header_lines(script.text)
    read = {line.text.strip() for line in lines if not line.is_late}
    late = [line for line in lines if line.is_late and line.text.strip() not in read]
    if late:
        further = f", nor the {len(late) - 1} like it below" if len(late) > 1 else ""
        message = f"sbatch does not read this line{further}: it comes after the first command"
        place = Word(late[0].start, late[0].end)
        yield RULE.at(script, place, message, fix="move it above the first command")

    for line in lines:
        variable = _VARIABLE.search(line.text)
        if variable is None or line.is_late:
            continue

        message = f"sbatch does not expand {variable[0]}: it reads this line before any shell does"
        fix = "write the value, or give the option on sbatch's command line"
        place = Word(line.start, line.end)
        # another program may put in the value first: envsubst
        yield RULE.at(script, place, message, fix=fix, severity=Severity.NOTE)
