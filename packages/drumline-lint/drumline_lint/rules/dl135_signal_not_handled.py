"""DL135: a job asks for a signal before its end, and nothing handles it in time."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parser import Command, Word
from drumline_lint.reading.slurm import header_lines

RULE = rule("DL135")


def check_shell(script: Script) -> Iterator[Finding]:
    option = script.sbatch.by_name.get("signal") or ""
    started = launches(script)
    if not option or not started:
        return
    to_shell, _, signal = option.rpartition(":")
    name = signal.partition("@")[0].upper().removeprefix("SIG")
    traps = [command for command in script.commands if _traps(command, name)]
    steps = [launch for launch in started if launch.srun is not None]
    if "B" not in to_shell:
        if traps or not (steps or "srun" in script.text):
            message = f"--signal={option} goes to the steps of srun, not to the batch script"
            line = next(line for line in header_lines(script.text) if "--signal" in line.text)
            place = traps[0].words[0] if traps else Word(line.start, line.end, ())
            yield RULE.at(script, place, message, fix=f"write --signal=B:{option}")
        return
    last = started[-1]
    is_late = not last.command.is_background and not last.command.is_conditional
    if traps and is_late and traps[0].start < last.command.start:
        message = f"bash runs this only when {_first_word(last.command)} has ended"
        fix = "start the training with & and then wait"
        yield RULE.at(script, traps[0].words[0], message, fix=fix)


def _traps(command: Command, signal: str) -> bool:
    words = [(word.plain or "").upper().removeprefix("SIG") for word in command.words]
    numbers = {"USR1": "10", "USR2": "12", "TERM": "15", "INT": "2"}
    return words[0] == "TRAP" and bool({signal, numbers.get(signal, signal)} & set(words[2:]))


def _first_word(command: Command) -> str:
    return command.words[0].plain or "the training"
