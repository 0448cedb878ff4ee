"""DL107: torchrun counts on other nodes or GPUs than Slurm gives."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.reading.launches import Launch, launches
from drumline_lint.reading.meeting import flag_value
from drumline_lint.reading.shell import Script
from drumline_lint.rule import Rule

RULE = Rule(
    id="DL107",
    name="nodes-mismatch",
    severity=Severity.ERROR,
    summary="torchrun and Slurm disagree on nodes or GPUs",
    why=(
        "torchrun waits until as many nodes have come as --nnodes says. When Slurm gives fewer, or when torchrun is "
        "started on the first node only because srun is missing, it waits until it gives up. More ranks than GPUs end "
        "with `invalid device ordinal`."
    ),
    fix="take the numbers from Slurm (--nnodes=$SLURM_NNODES), and start torchrun with srun",
    bad=(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4\n"
        "srun torchrun --nnodes=4 --nproc-per-node=4 --rdzv-id=$SLURM_JOB_ID \\\n"
        "    --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT train.py\n"
    ),
    good=(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4\n"
        "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 --rdzv-id=$SLURM_JOB_ID \\\n"
        "    --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT train.py\n"
    ),
    language="shell",
)
ONE_OF_SEVERAL = {"nodelist", "ntasks", "relative"}


def check_shell(script: Script) -> Iterator[Finding]:
    """Only batch files say what Slurm gives."""
    if not script.sbatch.by_name:
        return
    for launch in launches(script):
        if launch.is_torchrun and not launch.is_elsewhere:
            yield from _nodes(script, launch)
            yield from _gpus(script, launch)


def _nodes(script: Script, launch: Launch) -> Iterator[Finding]:
    wanted, given = _least(script, launch), _given_nodes(script, launch)
    flag = launch.flags.get("nnodes")
    if flag is None or wanted is None or given is None:
        return
    if launch.srun is None:
        if wanted > 1 and given > 1 and not _may_be_started_elsewhere(script):
            yield RULE.at(
                script,
                launch.name[-1],
                f"a batch file runs on its first node only: this torchrun is alone and waits for {wanted} nodes",
                fix="start it on every node: srun --ntasks=$SLURM_NNODES --ntasks-per-node=1 torchrun",
            )
    elif wanted > given:
        yield RULE.at(
            script,
            flag.word,
            f"torchrun waits for {wanted} nodes, but srun starts it on {given}",
            fix="write --nnodes=$SLURM_NNODES",
        )


def _gpus(script: Script, launch: Launch) -> Iterator[Finding]:
    procs = flag_value(script, launch, "nproc-per-node") or ""
    given = (launch.srun.gpus_per_node if launch.srun else None) or script.sbatch.gpus_per_node
    if given and procs.isascii() and procs.isdigit() and int(procs) > given:
        yield RULE.at(
            script,
            launch.flags["nproc-per-node"].word,
            f"torchrun starts {procs} ranks on a node, but Slurm gives it {given} GPU{'s' if given > 1 else ''}",
            fix=f"write --nproc-per-node={given}, or ask for --gpus-per-node={procs}",
        )


def _least(script: Script, launch: Launch) -> int | None:
    """The fewest nodes that it goes on with."""
    value = (flag_value(script, launch, "nnodes") or "").partition(":")[0]
    return int(value) if value.isascii() and value.isdigit() else None


def _given_nodes(script: Script, launch: Launch) -> int | None:
    """Not known where srun may be one of several that make one job together."""
    nodes = script.sbatch.number("nodes")
    if launch.srun is None:
        return nodes
    is_part = bool(ONE_OF_SEVERAL & launch.srun.by_name.keys()) or not launch.srun.is_sure
    is_narrower = "nodes" in launch.srun and launch.srun.number("nodes") != nodes
    return None if is_part or is_narrower else nodes


def _may_be_started_elsewhere(script: Script) -> bool:
    """Something starts this file, or a part of it, on the other nodes."""
    return any(name in script.text for name in ("srun", "ssh", "mpirun", "pdsh", "mpiexec", "clush"))
