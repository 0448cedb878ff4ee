"""DL101: torchrun on several nodes that does not say which job it belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.reading.launches import Launch, launches
from drumline_lint.reading.meeting import backend, endpoint, has_several_nodes, host_in, port_in
from drumline_lint.reading.shell import Script
from drumline_lint.rule import Rule

RULE = Rule(
    id="DL101",
    name="rendezvous-without-id",
    severity=Severity.WARNING,
    summary="torchrun on several nodes without a rendezvous id",
    why=(
        "Without --rdzv-id every job is called `none`. Nodes that come to the same endpoint under one name are taken "
        "for one job: a second start, or what is left of the first, takes the place of a node, and both hang or "
        "train on each other's gradients."
    ),
    fix="give every job its own id, such as --rdzv-id=$SLURM_JOB_ID",
    bad="torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=node-a:29500 train.py\n",
    good=(
        'torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id="$SLURM_JOB_ID" \\\n'
        "    --rdzv-backend=c10d --rdzv-endpoint=node-a:29500 train.py\n"
    ),
    language="shell",
)
DYNAMIC = {"c10d", "etcd", "etcd-v2"}


def check_shell(script: Script) -> Iterator[Finding]:
    """Of every torchrun whose flags are all known."""
    for launch in launches(script):
        if _has_no_id(script, launch) and not _has_own_endpoint(script, launch):
            name = backend(script, launch)
            job = "$SLURM_JOB_ID" if script.on_slurm else "$JOB_ID"
            yield RULE.at(
                script,
                launch.flags["nnodes"].word,
                f"torchrun joins several nodes by {name} without --rdzv-id: all jobs that come to this endpoint are "
                "called `none`, and a second one mixes with the first",
                fix=f'add --rdzv-id="{job}", or another id that each job has for itself',
            )


def _has_no_id(script: Script, launch: Launch) -> bool:
    if not launch.is_torchrun or not launch.is_sure or "rdzv-id" in launch.flags:
        return False
    has_nodes = "nnodes" in launch.flags and has_several_nodes(script, launch) is not False
    return has_nodes and backend(script, launch) in DYNAMIC


def _has_own_endpoint(script: Script, launch: Launch) -> bool:
    """Jobs do not meet at a port that the script works out, nor on nodes that each has for itself."""
    flag = endpoint(launch)
    if flag is None or flag.value is None:
        return False
    is_own_host = script.sbatch.has_whole_nodes and host_in(script, flag.value) is None
    return is_own_host or port_in(script, flag.value).is_computed
