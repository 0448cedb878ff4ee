"""DL119: a training ends when the script or the session ends that started it."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import ACCELERATE, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL119")
_WAITS = {"wait", "fg", "sleep", "tail", "inotifywait"}


def check_shell(script: Script) -> Iterator[Finding]:
    """A script that is started by hand may leave its processes behind; a job may not."""
    is_job = bool(script.sbatch.by_name) or script.container is not None
    started = launches(script)
    in_front = [launch.command.start for launch in started if not launch.command.is_background]
    for launch in started:
        is_last = launch.command.start > max(in_front, default=-1)
        if is_job and is_last and not _waits(script) and not _waits(launch.script):
            what = "Slurm ends the job" if script.sbatch.by_name else "the container ends"
            message = f"{launch.kind} runs in the background, and {what} when the script has ended"
            yield RULE.at(script, launch.srun_word or launch.name[-1], message)
        handles_hangup = launch.is_torchrun or launch.kind == ACCELERATE
        before = script.text[launch.command.start : launch.name[0].start].split()
        is_kept = "setsid" in before or "signals-to-handle" in launch.flags
        if "nohup" in before and handles_hangup and not is_job and not is_kept:
            message = f"{launch.kind} handles SIGHUP itself, so it ends with the session in spite of nohup"
            fix = "start it with setsid, or within tmux"
            place = launch.command.words[0]
            # What a script leaves behind is not a job of the shell that started the script.
            is_left = launch.command.is_background and not _waits(script)
            severity = Severity.NOTE if is_left else Severity.WARNING
            yield RULE.at(script, place, message, fix=fix, severity=severity)


def _waits(script: Script) -> bool:
    names = {(command.words[0].plain or "").rsplit("/", 1)[-1] for command in script.commands}
    return bool(names & _WAITS)
