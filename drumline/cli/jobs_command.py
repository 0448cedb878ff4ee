"""`drumline jobs [--hosts a,b]`: a table of detached jobs; and what `attach` and `stop` share with it."""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

from drumline.base.errors import ExitCode, UsageError
from drumline.base.json_output import wrap_output
from drumline.base.text import columns, duration, print_message, show_lines
from drumline.cli.command_line import HELP_FLAG, OUTPUT_FLAGS, read_command, show_json
from drumline.config import Flags, FlagTable
from drumline.launch.detached.commands import THIS_MACHINE, Question, list_jobs
from drumline.launch.detached.job_folder import ENDED, JobRecord, wrong_job_name
from drumline.launch.hosts import Host, listed_hosts
from drumline.launch.node_plan import NodePlan
from drumline.launch.ssh.client import ssh_client

HELP = """\
usage: drumline jobs [--hosts A,B] [--json]

Lists the jobs that `drumline launch --detach` has started on these hosts [this one], the newest first. States:

  starting    its nodes wait for each other
  running     step: the last one that is known; scripts have none
  waiting     for the space on a disk, a folder, or the end of a pause
  down        its keeper does not run: the host was rebooted, and does not start it again; or it was killed
  done, preempted, stopped, failed
              it has ended; the lines of its ranks can still be read: drumline attach JOB
"""
EXIT_CODES = "exit codes: 0 success, 2 wrong usage, 3 a host is unreachable\n"
HOST_FLAGS: FlagTable = {
    "hosts": (str, "A,B", "Hosts of the job, over ssh; one is enough [this machine]."),
    "hostfile": (str, "FILE", "The same from a file, one on a line."),
    "ssh": (
        str,
        "COMMAND",
        "How to call OpenSSH's client [DRUMLINE_SSH, or ssh], such as 'ssh -F file'.",
    ),
    "python": (str, "PATH", "The Python to run on the hosts [the one that runs this]."),
}
HEADINGS = ("job", "state", "step", "since", "hosts", "run")
ENDINGS: Mapping[int | None, str] = {
    ExitCode.SUCCESS: "done",
    ExitCode.PREEMPTED: "preempted",
    ExitCode.INTERRUPTED: "stopped",
}


def run(argv: Sequence[str]) -> int:
    """A table of all jobs, or JSON; then the hosts that did not answer."""
    table = {"over ssh": HOST_FLAGS, "output": OUTPUT_FLAGS}
    flags = read_command("jobs", argv, table, HELP, ends_with=EXIT_CODES, max_positional=0)
    answers = list_jobs(question(flags))
    by_name: dict[str, dict[str, JobRecord]] = defaultdict(dict)
    for host, records in answers.records.items():
        for record in records:
            by_name[record.name][host.address] = record

    jobs = sorted(by_name.values(), key=lambda nodes: -max(node.since for node in nodes.values()))
    if flags.values.json:
        show_json(jobs, indent=1)
    elif jobs:
        show_lines(columns([HEADINGS, *map(_cells, jobs)]))
    elif reached := [host for host in answers.job.hosts if host not in answers.errors]:
        where = ", ".join(host.address for host in reached)
        show_lines([f"there are no detached jobs on {where}"])

    for error in answers.errors.values():
        what, *further_lines = error.lines()
        print_message(f"error: {what}", *further_lines)
    return ExitCode.PREFLIGHT_FAILED if answers.errors else ExitCode.SUCCESS


def question(flags: Flags) -> Question:
    """To the hosts of the flags, or to this machine."""
    verb_flags = flags.values
    hosts: Sequence[Host] = [THIS_MACHINE]
    if "hosts" in verb_flags and "hostfile" in verb_flags:
        raise UsageError("--hosts and --hostfile exclude each other: each lists the hosts")
    if "hosts" in verb_flags or "hostfile" in verb_flags:
        hosts = listed_hosts(verb_flags.hosts, verb_flags.hostfile)

    return Question(
        hosts=hosts,
        nodes=[NodePlan()] * len(hosts),
        client=ssh_client(verb_flags.ssh, os.environ),
        python=verb_flags.get("python", sys.executable),
        python_path=os.environ.get("PYTHONPATH"),
        request={"action": "list", "name": None},
    )


def read_job_command(
    verb: str, argv: Sequence[str], flags_of_verb: FlagTable, usage: str, exit_codes: str
) -> tuple[Flags, str]:
    """The flags, and the name of the job."""
    table = {"": {**flags_of_verb, **HELP_FLAG}, "over ssh": HOST_FLAGS}
    flags = read_command(verb, argv, table, usage, ends_with=exit_codes)
    if not flags.positional:
        raise UsageError("no JOB was given", next_step="`drumline jobs` lists them")
    name = flags.positional[0]
    if wrong := wrong_job_name(name):
        raise UsageError(wrong, next_step="`drumline jobs` lists them")
    wrap_output()
    return flags, name


def _cells(nodes: Mapping[str, JobRecord]) -> tuple[str, ...]:
    """`nodes`: by host."""
    records = list(nodes.values())
    states = {host: _state(record) for host, record in nodes.items()}
    state = states[next(iter(states))]
    if len(set(states.values())) > 1:
        state = ", ".join(f"{state} on {host}" for host, state in states.items())
    step = max(record.step for record in records)
    age = duration(max(0.0, time.time() - records[0].since))
    return (
        records[0].name,
        state,
        f"{step:,}" if step else "-",
        f"{age} ago",
        ",".join(records[0].hosts),
        records[0].run or "-",
    )


def _state(record: JobRecord) -> str:
    if record.state != ENDED:
        return record.state
    return ENDINGS.get(record.code, f"failed (exit code {record.code})")
