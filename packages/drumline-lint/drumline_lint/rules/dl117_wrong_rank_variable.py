"""DL117: a rank or a world size is taken from a variable that counts something else."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import sees_one_gpu, tasks_per_node
from drumline_lint.reading.launchers import PYTHON, launches
from drumline_lint.reading.rendezvous import launch_variables
from drumline_lint.reading.shell import Script

RULE = rule("DL117")

_LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK")
_GLOBAL_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_COUNTS_OF_A_NODE = ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MEANINGS = {
    **dict.fromkeys(_LOCAL_RANKS, "the rank among the processes of one node"),
    **dict.fromkeys(_GLOBAL_RANKS, "the rank among all processes"),
    **dict.fromkeys(_COUNTS_OF_A_NODE, "a number of one node"),
}
# By variable, and by flag of a launcher.
_WRONG_FOR = {
    "RANK": _LOCAL_RANKS,
    "LOCAL_RANK": _GLOBAL_RANKS,
    "WORLD_SIZE": _COUNTS_OF_A_NODE,
    "node-rank": _LOCAL_RANKS,
    "machine-rank": _LOCAL_RANKS,
    "nnodes": _COUNTS_OF_A_NODE,
}


def check_shell(script: Script) -> Iterator[Finding]:
    """Variables and flags of several nodes that are set to a number of one node, or the reverse.

    For example:

        #SBATCH --nodes=2
        export RANK=$SLURM_LOCALID
        srun python train.py
    """
    yield from _beside_one_gpu(script)

    started = launches(script)
    if not _has_several_nodes(script) or (not started and "SLURM" not in script.text):
        return

    # torchrun and others set the variables of their ranks themselves.
    if not started or any(launch.kind == PYTHON for launch in started):
        for assignment in launch_variables(script):
            source = assignment.value.variable
            if source in _WRONG_FOR.get(assignment.name, ()):
                message = f"{assignment.name} is set to ${source}, which is {_MEANINGS[source]}"
                yield RULE.at(script, assignment, message)

    for launch in started:
        for name, flag in launch.flags.items():
            source = flag.value.variable if flag.value else ""
            if source in _WRONG_FOR.get(name, ()):
                message = f"--{name} is set to ${source}, which is {_MEANINGS[source]}"
                yield RULE.at(script, flag.word, message)


def _has_several_nodes(script: Script) -> bool:
    """Whether a job may have them: on one node, the local and the global values are the same."""
    options = script.sbatch.by_name
    if not options:
        return True

    is_default = options.keys().isdisjoint({"nodes", "ntasks"})
    return not is_default and options.get("nodes") != "1"


def _beside_one_gpu(script: Script) -> Iterator[Finding]:
    """A local rank where each task sees one GPU.

    For example:

        #SBATCH --gpus-per-task=1
        export LOCAL_RANK=$SLURM_LOCALID
    """
    started = [launch for launch in launches(script) if launch.kind == PYTHON]
    if not any(sees_one_gpu(launch) and (tasks_per_node(launch) or 1) > 1 for launch in started):
        return

    for assignment in launch_variables(script):
        if assignment.name == "LOCAL_RANK" and assignment.value.variable == "SLURM_LOCALID":
            message = (
                "--gpus-per-task=1 shows each task one GPU, which is cuda:0 there: "
                "LOCAL_RANK is the number of none but on the first task"
            )
            fix = "write LOCAL_RANK=0, or ask for --gpus-per-node"
            yield RULE.at(script, assignment, message, fix=fix, severity=Severity.WARNING)
