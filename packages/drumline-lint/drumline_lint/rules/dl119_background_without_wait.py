"""DL119: a job ends while its training runs in the background."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL119")
_WAITS = {"wait", "fg", "sleep", "tail", "inotifywait"}


def check_shell(script: Script) -> Iterator[Finding]:
    """A script that is started by hand may leave its processes behind; a job may not."""
    is_job = bool(script.sbatch.by_name) or script.container is not None
    if not is_job or _waits(script):
        return
    started = launches(script)
    last_in_front = max(
        (launch.command.start for launch in started if not launch.command.is_background), default=0
    )
    for launch in started:
        is_last = launch.command.start > last_in_front
        if launch.command.is_background and is_last and not _waits(launch.script):
            what = "Slurm ends the job" if script.sbatch.by_name else "the container ends"
            message = f"{launch.kind} runs in the background, and {what} when the script has ended"
            yield RULE.at(script, launch.srun_word or launch.name[-1], message)


def _waits(script: Script) -> bool:
    names = {(command.words[0].plain or "").rsplit("/", 1)[-1] for command in script.commands}
    return bool(names & _WAITS)
