"""DL143: a variable that Slurm does not set for this job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL143")

# Slurm sets each only if the job has asked for it by this option.
_OPTIONS = {
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_PER_TASK": "gpus-per-task",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
}
_NAME = re.compile(r"(?<!\\)\$\{?(SLURM_\w+)\b(?!:)|\b(SLURM_\w+)\b(?=[^{}]*\)\))")


def check_shell(script: Script) -> Iterator[Finding]:
    """Variables in the words of a command, for which the job has not asked.

    For example:

        #SBATCH --nodes=2
        srun torchrun --nproc-per-node=$SLURM_GPUS_PER_NODE train.py
    """
    options = script.sbatch.by_name.keys()
    unset = {name for name, option in _OPTIONS.items() if option not in options}
    if options.isdisjoint({"nodes", "ntasks", "gres", "gpus-per-node"}) or not launches(script):
        return

    for command in script.commands:
        if command.words[0].plain == "echo":
            continue

        for word in command.words:
            names = {first or second for first, second in _NAME.findall(word.text)}
            for name in sorted(names & unset - script.variables.keys()):
                unset.remove(name)
                message = f"${name} is empty: Slurm sets it for --{_OPTIONS[name]} only"
                yield RULE.at(script, word, message, fix=f"add #SBATCH --{_OPTIONS[name]}")
