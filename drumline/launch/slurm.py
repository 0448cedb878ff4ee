"""Slurm: reads srun's variables for a rank or a node, and writes a batch file that starts a job and
requeues it.

srun starts every rank itself, or one task on each node (`drumline launch --srun`), which starts
that node's ranks. The rendezvous is at the step's first host, at a port that follows from the job's
number: two jobs on one host do not collide. To Slurm a job that exits, as after a preemption (code
75), has failed and is not started again, so the batch file requeues itself.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from drumline.base.errors import ExitCode, UsageError, as_list
from drumline.base.rank_environment import first_host, node_names, rendezvous_port
from drumline.base.untrusted import read_regular, replace_text
from drumline.config import FlagValues
from drumline.launch.node_plan import NodePlan
from drumline.launch.templates import fill

WRITTEN = "# Written by `drumline launch --slurm`."
SIGNAL_BEFORE_S = 120
MAX_REQUEUES = 1000
# Slurm splits a line at blanks and has its own rules for quotes: values that it could misread are
# rejected.
VALUE = re.compile(r"[A-Za-z0-9_.,:@%+=/()\[\]*&|!~-]+")
FLAG = re.compile(rf"--[a-z][a-z0-9-]*(=({VALUE.pattern}))?")
CONTAINER = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_.,:@%+=/#-]*")
CORE_FLAGS = ("--cpus-per-task", "--cpus-per-gpu")
# Flags of `drumline launch` that sbatch has under the same names.
OF_SBATCH = ("partition", "time", "account", "qos", "mem")


# Variables of srun


def node_of_step(environment: Mapping[str, str], *, num_procs: int | None) -> NodePlan:
    """The node of this process, in a step with one task on each node."""
    names = ("SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    if missing := [name for name in names if name not in environment]:
        raise UsageError(
            f"--srun: srun did not start this process: {', '.join(missing)} not set",
            next_step="srun --ntasks-per-node=1 drumline launch --srun ..., or drumline launch --slurm",
        )

    num_nodes = int(environment["SLURM_STEP_NUM_NODES"])
    tasks = int(environment["SLURM_STEP_NUM_TASKS"])
    if tasks != num_nodes:
        raise UsageError(
            f"--srun: the step has {tasks} tasks on {num_nodes} nodes; it needs one on each, which starts the ranks",
            next_step="srun --ntasks=$SLURM_NNODES --ntasks-per-node=1, and set the ranks of a node with --procs",
        )

    if num_nodes == 1:
        return NodePlan(num_procs=num_procs)

    node_list = environment["SLURM_STEP_NODELIST"]
    return NodePlan(
        num_nodes=num_nodes,
        node_rank=int(environment["SLURM_NODEID"]),
        num_procs=num_procs,
        endpoint=f"{first_host(node_list)}:{rendezvous_port(environment)}",
        peers=tuple(node_names(node_list)),
    )


# The batch file


def log_name(name: str) -> str:
    """The log of a job of this name; `%j` is the job's number."""
    return f"{name}-%j.log"


def wrong_values(options: Mapping[str, str]) -> Iterator[str]:
    """A message for each value that a batch file cannot contain."""
    for name, value in options.items():
        if not VALUE.fullmatch(value):
            yield f"--{name}: {value!r} cannot be in a batch file; no blanks, quotes and the like"


def wrong_flag_words(name: str, text: str) -> Iterator[str]:
    """The same for a text of flags, which the flag of this name passes on."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        yield f"--{name}: {text!r} cannot be parsed: {error}"
        return
    for word in words:
        if not FLAG.fullmatch(word):
            yield f"--{name}: {word!r} is not a flag for a batch file; give --name or --name=value"


def flag_words(text: str | None) -> list[str]:
    """The words of --sbatch or --srun-flags, which were checked."""
    return shlex.split(text or "")


def sets_cores(sbatch: str | None) -> bool:
    """Whether these flags of sbatch say how many cores a task has."""
    return any(flag.partition("=")[0] in CORE_FLAGS for flag in flag_words(sbatch))


def container_flags(container: str) -> str:
    """srun's flags for it, as shell words. A folder is an OCI bundle, which is Slurm's own; all
    else is pyxis's: a registry's image, or a squashfs file."""
    if container.startswith(("/", ".")) and not container.endswith(".sqsh"):
        return shlex.quote(f"--container={container}")
    image = shlex.quote(f"--container-image={container}")
    return f'{image} --container-mounts="$PWD:$PWD" --container-workdir="$PWD"'


def batch_text(
    name: str, command: Sequence[str], flags: FlagValues, *, num_cpus: int | None = None
) -> str:
    """The batch file that sbatch takes. `command`: what each node runs; `flags`: of `drumline
    launch`; `num_cpus`: of each node."""
    step_flags = [] if num_cpus is None else [f"--cpus-per-task={num_cpus}"]
    if flags.nnodes:  # the job continues when a node is lost; otherwise Slurm ends it
        step_flags.append("--no-kill")
    # srun does not inherit the job's number of cores. A node that is done must not end the others.
    srun_flags = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", *step_flags]
    srun_words = shlex.join([*srun_flags, *flag_words(flags.srun_flags)])
    if flags.container is not None:
        srun_words += f" {container_flags(flags.container)}"
    return fill(
        "slurm.sbatch.j2",
        written=WRITTEN,
        name=name,
        flags=flags,
        of_sbatch=OF_SBATCH,
        sbatch_flags=flag_words(flags.sbatch),
        step_flags=step_flags,
        signal_before_s=SIGNAL_BEFORE_S,
        log=log_name(name),
        setup=shlex.quote(str(Path(flags.setup).absolute())) if flags.setup else "",
        srun_flags=srun_words,
        command=shlex.join(command),
        preempted=int(ExitCode.PREEMPTED),
        max_requeues=flags.get("max-requeues", MAX_REQUEUES),
    )


def write_batch_file(path: Path, text: str) -> None:
    """Replaces a file that drumline wrote, never another file."""
    try:
        if os.path.lexists(path) and WRITTEN not in read_regular(path).decode(errors="replace"):
            what = f"{path} exists, and was not written by drumline launch"
            raise UsageError(what, next_step="give another path with --out")
        replace_text(path, text)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", next_step="check --out"
        ) from error


def check_sbatch(search_path: str | None) -> str:
    """The path of sbatch."""
    if (sbatch := shutil.which("sbatch", path=search_path)) is None:
        what = f"sbatch is not installed on {socket.gethostname()}"
        raise UsageError(
            what, next_step="run this where jobs are submitted, or show the batch file with --print"
        )
    return sbatch


def submit(sbatch: str, path: Path) -> str:
    """The job's number."""
    command = [sbatch, "--parsable", str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        heading = f"sbatch rejected {path} (exit code {done.returncode}):"
        raise UsageError(
            as_list(heading, done.stderr.strip().splitlines()),
            next_step="change the flags of drumline launch, which come before the name of the task or script",
        )

    # in a federation the cluster's name follows
    return done.stdout.strip().partition(";")[0]
