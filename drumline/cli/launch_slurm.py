"""`drumline launch --slurm`: writes a batch file and submits it; `--srun`: one node of such a job, started by srun."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.cli.launch_kubernetes import default_name
from drumline.cli.launch_program import (
    is_script,
    program_of,
    restarts_of,
    supervision_of,
    watched,
    with_waits,
)
from drumline.config import Flags
from drumline.config.schema import Count, CountOrZero
from drumline.errors import ExitCode
from drumline.launch.hosts import least_nodes
from drumline.launch.slurm import (
    MAX_REQUEUES,
    SIGNAL_BEFORE_S,
    BatchJob,
    batch_text,
    check_sbatch,
    node_of_step,
    submit,
    write_batch_file,
    wrong_values,
)
from drumline.net.secrets import secret_from
from drumline.terminal import print_message, show

OF_SLURM: Mapping[str, tuple[Any, str, str]] = {
    "slurm": (bool, "", "Write a batch file and submit it with sbatch; with --print only show it."),
    "partition": (str, "NAME", "Where to wait [the cluster's default partition]."),
    "time": (str, "T", "The time limit, as sbatch takes it: minutes, H:M:S, D-H:M:S [the partition's]."),
    "account": (str, "NAME", "Whom the job is charged to."),
    "qos": (str, "NAME", "Its quality of service."),
    "cpus": (Count, "N", "Cores of each node."),
    "mem": (str, "SIZE", "Memory of each node, as in 64G."),
    "job-name": (str, "NAME", "What the job and its log are called [after the task or script]."),
    "signal-before": (
        Count,
        "S",
        f"How long before the time limit the run is told to save [{SIGNAL_BEFORE_S} s].",
    ),
    "max-requeues": (
        CountOrZero,
        "N",
        f"How often a job that was told to leave is requeued [{MAX_REQUEUES}].",
    ),
    "sbatch": (str, "FLAGS", "Any other flags of sbatch's: --sbatch='--exclusive --constraint=a100'."),
    "srun": (
        bool,
        "",
        "In a batch file of your own: `srun --ntasks-per-node=1 drumline launch --srun ...` starts a node's ranks.",
    ),
}
# Those that mean the same to sbatch.
OPTIONS = ("partition", "time", "account", "qos", "mem")
# Those that each node's launcher gets as they are.
PASSED_ON = (
    *("procs", "max-restarts", "grace", "nnodes", "join-timeout", "last-call", "lost-after"),
    *("watch", "on-hang", "hang-after"),
)
SUBMITTED = """\
submitted {path} as job {job}
log      {log}
follow   squeue --job {job}; tail -F {log}
pause    scancel --signal=USR1 {job}    (it saves, and goes back into the queue)
cancel   scancel {job}
"""


def wrong_for_slurm(given: Mapping[str, Any]) -> Iterator[str]:
    """Every mistake among the flags, as a sentence."""
    options = {name: given[name] for name in (*OPTIONS, "job-name") if name in given}
    others, problem = _others(given)
    if problem:
        yield problem
    yield from wrong_values(options, others, given.get("signal-before", SIGNAL_BEFORE_S))


def submit_to_slurm(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    """Write the file and hand it to sbatch, or show it."""
    given = flags.own
    # What is wrong is said now, not after hours in a queue.
    program_of(target, arguments)
    least_nodes(given.get("nnodes"), given.get("nodes", 1), known_from="--nodes")
    name = given.get("job-name") or default_name(target)
    path = Path(given.get("out") or f"{name}.sbatch")
    job = BatchJob(
        name=name,
        command=_command(given, target, arguments),
        num_nodes=given.get("nodes", 1),
        num_gpus=given.get("gpus"),
        num_cpus=given.get("cpus"),
        options={name: given[name] for name in OPTIONS if name in given},
        others=_others(given)[0],
        signal_before_s=given.get("signal-before", SIGNAL_BEFORE_S),
        max_requeues=given.get("max-requeues", MAX_REQUEUES),
        may_shrink="nnodes" in given,
    )
    text = batch_text(job)
    if given.get("print"):
        show(text, end="", is_data=True)
        return ExitCode.SUCCESS
    sbatch = check_sbatch(os.environ.get("PATH"))
    write_batch_file(path, text)
    number = submit(sbatch, path)
    log = job.log.replace("%j", number)
    print_message(*(line.format(path=path, job=number, log=log) for line in SUBMITTED.splitlines()))
    return ExitCode.SUCCESS


def run_as_node(flags: Flags, target: str, arguments: Sequence[str]) -> int:
    """This process is the task of one node of an srun step."""
    if not is_script(target) and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
        # The same words as at first: back from the queue they do not mean a new start.
        arguments = [word for word in arguments if word != "--fresh"]
    program = watched(program_of(target, arguments), flags)
    node = node_of_step(os.environ, num_procs=flags.own.get("procs"))
    least = least_nodes(flags.own.get("nnodes"), node.num_nodes, known_from="the step")
    node = replace(with_waits(node, flags), min_nodes=least, max_restarts=restarts_of(flags, target, least))
    if node.num_nodes > 1:
        print_message(f"node {node.node_rank} of {node.num_nodes} goes to {node.endpoint}", stream=sys.stdout)

    from drumline.launch.node.local import run_node

    return run_node(node, program, supervision=supervision_of(flags, secret_from(os.environ)))


def _command(given: Mapping[str, Any], target: str, arguments: Sequence[str]) -> list[str]:
    passed_on = [f"--{name}={given[name]}" for name in PASSED_ON if name in given]
    return [sys.executable, "-m", "drumline", "launch", "--srun", *passed_on, "--", target, *arguments]


def _others(given: Mapping[str, Any]) -> tuple[list[str], str | None]:
    try:
        return shlex.split(given.get("sbatch", "")), None
    except ValueError as error:
        return [], f"--sbatch: {given['sbatch']!r} cannot be read: {error}"
