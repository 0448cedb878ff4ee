"""DL119: a training ends when the script or the session ends that started it."""

from __future__ import annotations

from collections.abc import Iterator, Set

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.launchers import ACCELERATE, Launch, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL119")

_STAYS = {"wait", "fg", "tail", "inotifywait"}
_PAUSES = {"sleep"}


def check_shell(script: Script) -> Iterator[Finding]:
    """A training in the background of a job, and one that `nohup` does not keep alive.

    A script that is started by hand may leave its processes behind; a job may not.

        #SBATCH --nodes=1
        torchrun train.py &
    """
    is_job = bool(script.sbatch.by_name) or script.container is not None
    started = launches(script)
    if not is_job:
        for launch in started:
            yield from _hung_up(script, launch)
        return

    in_front = [launch.command.start for launch in started if not launch.command.is_background]
    last_in_front = max(in_front, default=-1)

    for launch in started:
        is_last = launch.command.start > last_in_front
        if is_last and not any(_runs(part, _STAYS | _PAUSES) for part in (script, launch.script)):
            what = "Slurm ends the job" if script.sbatch.by_name else "the container ends"
            message = f"{launch.kind} runs in the background, and {what} when the script has ended"
            yield RULE.at(script, launch.srun_word or launch.name[-1], message)


def _hung_up(script: Script, launch: Launch) -> Iterator[Finding]:
    """A launcher that handles SIGHUP itself, from which `nohup` does not protect it.

    For example:

        nohup torchrun train.py &
    """
    if not launch.is_torchrun and launch.kind != ACCELERATE:
        return

    before = script.text[launch.command.start : launch.name[0].start].split()
    if "nohup" not in before or "setsid" in before or "signals-to-handle" in launch.flags:
        return

    message = f"{launch.kind} handles SIGHUP itself, so it ends with the session in spite of nohup"
    fix = "start it with setsid, or within tmux"
    # What a script leaves behind is not a job of the shell that started the script. A pause between
    # two launches ends before.
    is_left = launch.command.is_background and not _runs(script, _STAYS)
    severity = Severity.NOTE if is_left else Severity.WARNING
    yield RULE.at(script, launch.command.words[0], message, fix=fix, severity=severity)


def _runs(script: Script, commands: Set[str]) -> bool:
    """Whether one of these keeps it running.

    For example:

        wait
        tail -f train.log
    """
    names = [command.words[0].plain or "" for command in script.commands]
    return any(name.rpartition("/")[2] in commands for name in names)
