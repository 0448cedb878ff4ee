"""`drumline attach JOB`: the lines of a detached job, as its launch would show them."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.cli.jobs_command import question, read_job_command
from drumline.launch.detached.commands import attach_to_job

HELP = """\
usage: drumline attach JOB [--hosts A,B]

Shows what the ranks of a detached job have written so far, and what they write, until it ends. Ctrl-C detaches
again; the job continues.
"""
EXIT_CODES = "exit codes: those of drumline launch when the job ends; 0 after Ctrl-C; 3 no host of it is reached\n"


def run(argv: Sequence[str]) -> int:
    flags, name = read_job_command("attach", argv, {}, HELP, EXIT_CODES)
    return attach_to_job(question(flags), name)
