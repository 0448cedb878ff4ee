"""A batch file for Slurm: one task on each node runs that node's part of a job (`drumline launch --srun`).

Slurm signals the tasks before the time limit, or when another job takes the nodes; the run saves and leaves with 75
(`engine/preemption.py`). A job that leaves by itself, Slurm takes for a failed one and does not start again, so the
batch file has itself put back into the queue. The same command then goes on from the checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drumline.errors import ExitCode, UsageError, as_list
from drumline.untrusted import read_regular, replace_text

WRITTEN = "# Written by `drumline launch --slurm`."
SIGNAL_BEFORE_S = 120
MAX_REQUEUES = 1000
# Slurm splits a line at blanks and reads quotes in its own way: what could be taken for anything else is refused.
VALUE = re.compile(r"[A-Za-z0-9_.,:@%+=/()\[\]*&|!~-]+")
FLAG = re.compile(rf"--[a-z][a-z0-9-]*(=({VALUE.pattern}))?")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
TEXT = """\
#!/bin/sh
{written}
{directives}

# What the nodes of this job know each other by: in no file, and on no command line.
if [ -z "${{DRUMLINE_SECRET:-}}" ]; then
    DRUMLINE_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
fi
export DRUMLINE_SECRET

# One task on each node, which starts the ranks there.
srun {srun_flags} {command}
code=$?

# {preempted}: told to leave, saved, and not done yet. Whatever else it is, the job ends with it.
[ "$code" -eq {preempted} ] || exit "$code"
count=${{SLURM_RESTART_COUNT:-0}}
if [ "$count" -ge {max_requeues} ]; then
    echo "drumline: told to leave after $count requeues; --max-requeues is {max_requeues}, and the job ends" >&2
    exit "$code"
fi
echo "drumline: job $SLURM_JOB_ID goes back into the queue (requeue $((count + 1)) of {max_requeues})" >&2
scontrol requeue "$SLURM_JOB_ID" || echo "drumline: it could not be requeued; the same command goes on" >&2
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """What the file says."""

    name: str
    command: Sequence[str]
    """What each node runs."""
    num_nodes: int = 1
    num_gpus: int | None = None
    num_cpus: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """sbatch's own flags by name, such as partition and time."""
    others: Sequence[str] = ()
    """Further flags, as they are."""
    signal_before_s: int = SIGNAL_BEFORE_S
    max_requeues: int = MAX_REQUEUES
    may_shrink: bool = False
    """Whether the job goes on when a node is lost, which Slurm else ends it for."""

    @property
    def log(self) -> str:
        """`%j` is the job's number."""
        return f"{self.name}-%j.log"


def wrong_values(options: Mapping[str, str], others: Sequence[str], signal_before_s: int) -> Iterator[str]:
    """What cannot stand in a batch file, or would not work, as sentences."""
    for name, value in options.items():
        if not VALUE.fullmatch(value):
            yield f"--{name}: {value!r} cannot stand in a batch file; no blanks, quotes and the like"
    for flag in others:
        if not FLAG.fullmatch(flag):
            yield f"--sbatch: {flag!r} is no flag of sbatch's that can stand in a batch file, as --name or --name=value"
    limit_s = seconds_of(options.get("time", ""))
    if limit_s is not None and limit_s <= signal_before_s:
        yield f"--signal-before: {signal_before_s} s before the end of --time {options['time']} it has not begun"


def seconds_of(time_limit: str) -> int | None:
    """sbatch's minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; None for anything else."""
    found = TIME.fullmatch(time_limit)
    if found is None:
        return None
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is None:
        hours, minutes, seconds = [[0, *parts, 0], [0, *parts], parts][len(parts) - 1]
        return hours * 3600 + minutes * 60 + seconds
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return int(found["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds


def batch_text(job: BatchJob) -> str:
    """The file."""
    flags = [f"--job-name={job.name}", f"--nodes={job.num_nodes}", "--ntasks-per-node=1"]
    flags += [f"--{name}={value}" for name, value in job.options.items()]
    flags += [] if job.num_gpus is None else [f"--gpus-per-node={job.num_gpus}"]
    cpus = [] if job.num_cpus is None else [f"--cpus-per-task={job.num_cpus}"]
    no_kill = ["--no-kill"] if job.may_shrink else []
    flags += [*cpus, *no_kill, "--requeue", f"--signal=USR1@{job.signal_before_s}"]
    flags += [f"--output={job.log}", "--open-mode=append", *job.others]
    return TEXT.format(
        written=WRITTEN,
        directives="\n".join(f"#SBATCH {flag}" for flag in flags),
        # srun does not take the number of cores from the job; and one node that is done does not end the others.
        srun_flags=shlex.join(["--ntasks-per-node=1", "--kill-on-bad-exit=0", *no_kill, *cpus]),
        command=shlex.join(job.command),
        preempted=int(ExitCode.PREEMPTED),
        max_requeues=job.max_requeues,
    )


def write_batch_file(path: Path, text: str) -> None:
    """Over one that was written here before, never over another file."""
    try:
        if os.path.lexists(path) and WRITTEN not in read_regular(path).decode(errors="replace"):
            raise UsageError(
                f"{path} is there, and was not written by drumline launch",
                next_step="give another path with --out",
            )
        replace_text(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", next_step="check --out") from error


def check_sbatch(search_path: str | None) -> str:
    """Where sbatch is."""
    if (sbatch := shutil.which("sbatch", path=search_path)) is None:
        raise UsageError(
            f"sbatch is not installed on {socket.gethostname()}",
            next_step="run this where jobs are submitted, or look at the batch file with --print",
        )
    return sbatch


def submit(sbatch: str, path: Path) -> str:
    """The job's number."""
    done = subprocess.run(
        [sbatch, "--parsable", str(path)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise UsageError(
            as_list(
                f"sbatch refused {path} (exit code {done.returncode}):", done.stderr.strip().splitlines()
            ),
            next_step="change the flags of drumline launch, which come before the name of the task or script",
        )
    return done.stdout.strip().partition(";")[0]  # of a federation it says the cluster too
