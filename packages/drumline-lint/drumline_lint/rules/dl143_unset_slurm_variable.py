"""DL143: a variable that Slurm does not set for this job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Kind, Word

RULE = rule("DL143")
# Slurm sets each only if the job has asked for it by this option.
_OPTIONS = {
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_PER_TASK": "gpus-per-task",
    "SLURM_GPUS": "gpus",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
_IN_ARITHMETIC = re.compile(r"\b(SLURM_\w+)")
_ASKS = {"nodes", "ntasks", "gres", "gpus", "gpus-per-node", "gpus-per-task", "ntasks-per-node"}


def check_shell(script: Script) -> Iterator[Finding]:
    options = script.sbatch.by_name.keys()
    if not _ASKS & options or not launches(script):
        return
    unset = {name for name, option in _OPTIONS.items() if option not in options}
    for command in script.commands:
        for word in command.words if command.words[0].plain != "echo" else ():
            for name in sorted(_names_in(word) & unset - script.variables.keys()):
                unset.remove(name)
                message = f"${name} is empty: Slurm sets it for --{_OPTIONS[name]} only"
                yield RULE.at(script, word, message, fix=f"add #SBATCH --{_OPTIONS[name]}")


def _names_in(word: Word) -> set[str]:
    names: set[str] = set()
    for piece in word.pieces:
        if piece.kind is Kind.VARIABLE:
            names.add(piece.text)
        elif piece.kind is Kind.UNKNOWN and piece.text.startswith("$(("):
            names.update(_IN_ARITHMETIC.findall(re.sub(r"\$\{\w+:?-[^}]*\}", "", piece.text)))
    return names
