"""DL103: srun that starts more than one torchrun on a node."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.lint.finding import Finding, Severity
from drumline.lint.reading.launches import PYTHON, Launch, launches
from drumline.lint.reading.meeting import flag_value
from drumline.lint.reading.shell import Script
from drumline.lint.reading.slurm_options import Options
from drumline.lint.rule import Rule

RULE = Rule(
    id="DL103",
    name="srun-tasks",
    severity=Severity.ERROR,
    summary="srun starts several torchruns on each node",
    why=(
        "torchrun starts all ranks of a node itself, so a node needs one of it. With --ntasks-per-node=8 and "
        "--nproc-per-node=8 there are 64 processes for 8 GPUs: they do not meet, or run out of memory. srun takes the "
        "number of tasks from the #SBATCH lines when it is not told another."
    ),
    fix="start one task on each node: srun --ntasks-per-node=1 torchrun",
    bad=(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8\n"
        "srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=$SLURM_JOB_ID \\\n"
        "    --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT train.py\n"
    ),
    good=(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8\n"
        "srun torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=$SLURM_JOB_ID \\\n"
        "    --rdzv-backend=c10d --rdzv-endpoint=$HEAD:$PORT train.py\n"
    ),
    language="shell",
)


def check_shell(script: Script) -> Iterator[Finding]:
    """Of every srun that starts a launcher."""
    seen: set[int] = set()
    for launch in launches(script):
        if launch.srun is None or launch.srun_word is None or launch.kind == PYTHON:
            continue
        if launch.srun_word.start in seen or not launch.srun.is_sure or _is_one_rank(script, launch):
            continue
        said = _too_many(script.sbatch, launch.srun)
        if said:
            seen.add(launch.srun_word.start)
            yield RULE.at(
                script,
                launch.srun_word,
                f"srun starts {launch.kind} {said}, and each starts all ranks of its node: too many processes, "
                "which do not meet or run out of GPU memory",
                fix="write srun --ntasks-per-node=1, or set it in the #SBATCH lines",
            )


def _too_many(header: Options, srun: Options) -> str:
    """How many, in words; nothing when it is one for each node, or not known."""
    nodes = srun.number("nodes") or header.number("nodes")
    if "ntasks" in srun:
        return _against_nodes(srun.number("ntasks"), nodes)
    per_node = srun if "ntasks-per-node" in srun else header
    if "ntasks-per-node" in per_node:
        count = per_node.number("ntasks-per-node")
        is_one_each = header.number("ntasks") is not None and header.number("ntasks") == nodes
        return f"{count} times on each node" if count and count > 1 and not is_one_each else ""
    return _against_nodes(header.number("ntasks"), nodes)


def _against_nodes(tasks: int | None, nodes: int | None) -> str:
    if tasks is None or nodes is None or tasks <= nodes:
        return ""
    return f"{tasks} times on {nodes} node{'s' if nodes > 1 else ''}"


def _is_one_rank(script: Script, launch: Launch) -> bool:
    """One torchrun for each rank is odd, but it works when all of them are counted as nodes."""
    if not launch.is_torchrun or flag_value(script, launch, "nnodes") is not None:
        return False
    return "nproc-per-node" not in launch.flags or flag_value(script, launch, "nproc-per-node") == "1"
