"""`drumline stop JOB`: ends a detached job on all of its hosts."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.cli.jobs_command import question, read_job_command
from drumline.config import FlagTable, switch
from drumline.launch.detached.commands import stop_job

HELP = """\
usage: drumline stop JOB [--save] [--hosts A,B]

Ends a detached job on all of its hosts, as Ctrl-C ends a launch: its ranks have --grace seconds to exit.
"""
EXIT_CODES = "exit codes: 0 it has ended, 2 wrong usage, 3 a host of it is unreachable\n"
OWN_FLAGS: FlagTable = {
    "save": switch("Save a checkpoint first, however long that takes (a task).")
}


def run(argv: Sequence[str]) -> int:
    flags, name = read_job_command("stop", argv, OWN_FLAGS, HELP, EXIT_CODES)
    return stop_job(question(flags), name, save=bool(flags.values.save))
