"""`drumline tune`: the variables of NCCL and gloo for these hosts, and what logs of a job show."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drumline.base.errors import ExitCode, UsageError
from drumline.base.text import join_names, show_lines
from drumline.base.untrusted import open_regular
from drumline.cli.command_line import HELP_FLAG, check_command, misplaced, read_command, show_json
from drumline.cli.doctor_command import (
    LISTS_OF_HOSTS,
    SSH_FLAGS,
    check_hosts,
    lists_of_hosts,
    show_step,
    wrong_hosts,
)
from drumline.config import FlagTable, FlagValues, switch
from drumline.tools.doctor.cluster import DoctorOptions
from drumline.tools.doctor.doctor_report import finding_lines
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.machine.machine_checks import machine_findings
from drumline.tools.doctor.machine.machine_facts import HostSettings, host_facts
from drumline.tools.tune.log_findings import has_trouble, log_findings
from drumline.tools.tune.log_report import log_as_json, log_lines
from drumline.tools.tune.nccl_log import NcclLog
from drumline.tools.tune.tuning import TunedVariable, tuned_variables, tuning_findings

GROUPS: Mapping[str, FlagTable] = {
    "over ssh": SSH_FLAGS,
    "logs  `drumline tune --log FILE ...`; - reads stdin.": {
        "log": switch(
            "Read logs of a job instead: NCCL's (NCCL_DEBUG=INFO), torch's, the kernel's."
        )
    },
    "both": {"json": switch("Print everything as JSON, for scripts."), **HELP_FLAG},
}
USAGE = """\
usage: drumline tune [flags]
       drumline tune --log FILE ... [--json]

Prints the variables of NCCL and gloo that these hosts need, and the reason of
each, as lines for a shell. Only what a finding of `drumline doctor` or a
measurement calls for is printed: NCCL chooses the rest well.

  drumline tune --hosts a,b > cluster.sh       examine two hosts
  source cluster.sh                            then train with the variables
  eval "$(drumline tune)"                      for this machine alone

Problems that no variable solves are comments. With --log it reads logs of a
job, of NCCL, torch, torchrun, gloo, EFA, the kernel and the scheduler: what
went wrong and what to do, causes first, and which ranks are connected how. A
line that looks like an error and is not known is shown as it is.

  NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p.log torchrun ...
  drumline tune --log nccl.*.log train.log     logs of one or more ranks
  drumline train ... 2>&1 | drumline tune --log -
"""
EXIT_CODES = """\
exit codes: 0 nothing is wrong, 1 a log shows a problem or a line that is not
            explained, 2 wrong usage, 3 something must be fixed that no variable
            solves
"""


def run(argv: Sequence[str]) -> int:
    """Read logs, or examine hosts."""
    flags = read_command(
        "tune", argv, GROUPS, USAGE, ends_with=EXIT_CODES, max_positional=len(argv)
    )
    verb_flags = flags.values
    files = flags.positional
    check_command("tune", _wrong_flags(verb_flags, files))
    return _read_logs(files, verb_flags) if verb_flags.log else _tune(verb_flags)


def _wrong_flags(verb_flags: FlagValues, files: Sequence[str]) -> Iterator[str]:
    """Every mistake in a combination of flags."""
    yield from wrong_hosts(verb_flags)
    if verb_flags.log:
        reason = "does not go with --log, which only reads files"
        yield from misplaced(verb_flags, LISTS_OF_HOSTS, reason)
        if not files:
            yield "--log: no FILE was given; - reads stdin"
    else:
        yield from (
            f"{file!r}: unexpected argument; a log is given as --log FILE" for file in files
        )


# Variables


def _tune(verb_flags: FlagValues) -> int:
    """Print the variables that findings call for."""
    # The code and the data of a run do not matter here.
    settings = HostSettings(environment=dict(os.environ), run_folder=str(Path.cwd()))
    if lists_of_hosts(verb_flags):
        result = check_hosts(verb_flags, DoctorOptions(settings, with_collectives=False))
        show_step("")
        facts = result.survey.facts
        findings = [*tuning_findings(facts, result.survey), *result.findings]
    else:
        here = host_facts(settings)
        facts = {here["host"]: here}
        findings = [*tuning_findings(facts), *machine_findings(here)]

    problems = [
        finding for finding in findings if finding.level == "problem" and finding.variable is None
    ]
    tuned = tuned_variables(findings, facts)
    if verb_flags.json:
        show_json(
            {
                "variables": tuned,
                "problems": [problem.as_json() for problem in problems],
            }
        )
    else:
        show_lines(_shell_lines(tuned, problems, list(facts)))

    return ExitCode.PREFLIGHT_FAILED if problems else ExitCode.SUCCESS


def _shell_lines(
    tuned: Sequence[TunedVariable], problems: Sequence[Finding], hosts: Sequence[str]
) -> Iterator[str]:
    """Lines that a shell can source: comments, and a command for each variable."""
    yield f"# by drumline tune, for {join_names(hosts) or 'no host that answers'}"
    yield from (variable.line() for variable in tuned)
    if not tuned:
        yield "# nothing to set: no finding of the doctor calls for a variable"
    if any(variable.hosts for variable in tuned):
        yield "# some lines are for one host: source this on each"
    yield from (f"# {line}" for _, line in finding_lines(problems))


# Logs


def _read_logs(files: Sequence[str], verb_flags: FlagValues) -> int:
    """Print what the logs show, causes first."""
    log = NcclLog()
    for name in files:
        try:
            if name == "-":
                log.read(sys.stdin.buffer, "stdin")
            else:
                with open_regular(Path(name), follow_links=True) as file:
                    log.read(file, name)
        except OSError as error:
            what = f"cannot read {name}: {error.strerror or error}"
            raise UsageError(what, next_step="give log files of NCCL, or - for stdin") from error

    findings = log_findings(log)
    if not log.num_lines and not findings:
        raise UsageError(
            f"no line of NCCL and no error in {join_names(files)}",
            next_step="run the job with NCCL_DEBUG=INFO; NCCL_DEBUG_FILE=nccl.%h.%p.log writes a file for each process",
        )

    if verb_flags.json:
        show_json(log_as_json(log))
    else:
        show_lines(log_lines(log))

    return ExitCode.SOMETHING_WRONG if has_trouble(findings) else ExitCode.SUCCESS
