"""DL135: a job asks for a signal before its end, and nothing handles it in time."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL135")


def check_shell(script: Script) -> Iterator[Finding]:
    option = script.sbatch.by_name.get("signal") or ""
    to_shell, _, signal = option.rpartition(":")
    name = signal.partition("@")[0].removeprefix("SIG")
    traps = [command for command in script.commands if command.words[0].plain == "trap"]
    traps = [trap for trap in traps if {name, f"SIG{name}"} & {word.plain for word in trap.words}]
    if not option or not traps or not launches(script):
        return
    place = traps[0].words[0]
    last = launches(script)[-1].command
    if "B" not in to_shell:
        message = f"--signal={option} goes to the steps of srun, not to the batch script"
        yield RULE.at(script, place, message, fix=f"write --signal=B:{option}")
    elif not last.is_background and not last.is_conditional and traps[0].start < last.start:
        message = f"bash runs this only when {last.words[0].plain or 'the training'} has ended"
        yield RULE.at(script, place, message, fix="start the training with & and then wait")
