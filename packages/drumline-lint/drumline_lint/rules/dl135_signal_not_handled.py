"""DL135: a job asks for a signal before its end, and nothing handles it in time.

Slurm sends it to the steps of srun, unless the option begins with B:, and bash runs a trap only when
the command in front has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Command

RULE = rule("DL135")


def check_shell(script: Script) -> Iterator[Finding]:
    """A trap that the signal does not get to, or that runs only when the training has ended.

    For example:

        #SBATCH --signal=USR1@120
        trap 'touch stop' USR1
        torchrun train.py
    """
    option = script.sbatch.by_name.get("signal") or ""
    to_shell, _, signal = option.rpartition(":")
    name = signal.partition("@")[0].removeprefix("SIG")
    started = launches(script)
    trap = _trap(script, name)
    if not option or trap is None or not started:
        return

    last = started[-1].command
    if "B" not in to_shell:
        message = f"--signal={option} goes to the steps of srun, not to the batch script"
        yield RULE.at(script, trap.words[0], message, fix=f"write --signal=B:{option}")

    elif not last.is_background and not last.is_conditional and trap.start < last.start:
        message = f"bash runs this only when {last.words[0].plain or 'the training'} has ended"
        fix = "start the training with & and then wait"
        yield RULE.at(script, trap.words[0], message, fix=fix)


def _trap(script: Script, name: str) -> Command | None:
    """The first command that handles a signal: `trap 'touch stop' SIGUSR1`."""
    for command in script.commands:
        words = {word.plain for word in command.words}
        if command.words[0].plain == "trap" and words & {name, f"SIG{name}"}:
            return command
    return None
