"""DL103: srun that starts more than one torchrun on a node."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.reading.launches import PYTHON, Launch, launches
from drumline_lint.reading.meeting import flag_value
from drumline_lint.reading.shell import Script
from drumline_lint.reading.slurm_options import Options
from drumline_lint.rule import Rule

# Of all ways to say it on srun's own line, this one is heeded by every version, whatever the header has.
ONE_EACH = "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1"
RULE = Rule(
    id="DL103",
    name="srun-tasks",
    severity=Severity.ERROR,
    summary="srun starts several torchruns on each node",
    why=(
        "torchrun starts all ranks of a node itself, so a node needs one of it. With --ntasks-per-node=8 and "
        "--nproc-per-node=8 there are 64 processes for 8 GPUs: they do not meet, or run out of memory. srun takes the "
        "number of tasks from the #SBATCH lines, and keeps to it: beside it, srun --ntasks-per-node=1 alone is ignored."
    ),
    fix=f"start one task on each node: #SBATCH --ntasks-per-node=1, or {ONE_EACH} torchrun",
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
        said = _too_many(_inherited(script), launch.srun)
        if said:
            seen.add(launch.srun_word.start)
            yield RULE.at(
                script,
                launch.srun_word,
                f"srun starts {launch.kind} {said}, and each starts all ranks of its node: too many processes, "
                "which do not meet or run out of GPU memory",
                fix=_fix(script.sbatch, launch.srun),
            )


def _inherited(script: Script) -> Options:
    """What srun gets to know of the header, by variables that the script may change."""
    is_changed = any(word in script.text for word in ("unset SLURM_N", "SLURM_NTASKS=", "SLURM_NPROCS="))
    return Options() if is_changed else script.sbatch


def _too_many(header: Options, srun: Options) -> str:
    """How many, in words; nothing when it is one for each node, or not known."""
    nodes = srun.number("nodes") or header.number("nodes")
    if "ntasks" in srun:
        return _against_nodes(srun.number("ntasks"), nodes)
    if _is_heeded(header, srun):
        return _on_each_node(srun.number("ntasks-per-node"))
    if "ntasks" in header and nodes is not None:
        said = _against_nodes(header.number("ntasks"), nodes)
    else:
        said = _on_each_node(header.number("ntasks-per-node"))
    return said + _ignored(srun) if said and "ntasks-per-node" in srun else said


def _is_heeded(header: Options, srun: Options) -> bool:
    """Whether srun's own number for each node counts."""
    has_tasks = bool({"ntasks", "ntasks-per-node"} & header.by_name.keys())
    return "ntasks-per-node" in srun and ("nodes" in srun or not has_tasks)


def _ignored(srun: Options) -> str:
    count = srun.number("ntasks-per-node")
    own = f"--ntasks-per-node={count}" if count else "--ntasks-per-node"
    return f", for Slurm ignores its {own} beside the number in the #SBATCH lines"


def _fix(header: Options, srun: Options) -> str:
    nodes = srun.number("nodes") or header.number("nodes")
    if "ntasks" in srun:
        return f"write srun --ntasks={nodes} --ntasks-per-node=1"
    if _is_heeded(header, srun):
        return "write --ntasks-per-node=1"
    own = f"--ntasks={nodes}" if "ntasks" in header and nodes else "--ntasks-per-node=1"
    return f"write #SBATCH {own}, or {ONE_EACH}"


def _on_each_node(count: int | None) -> str:
    return f"{count} times on each node" if count and count > 1 else ""


def _against_nodes(tasks: int | None, nodes: int | None) -> str:
    if tasks is None or nodes is None or tasks <= nodes:
        return ""
    return f"{tasks} times on {nodes} node{'s' if nodes > 1 else ''}"


def _is_one_rank(script: Script, launch: Launch) -> bool:
    """One torchrun for each rank is odd, but it works when all of them are counted as nodes."""
    if not launch.is_torchrun or flag_value(script, launch, "nnodes") is not None:
        return False
    return "nproc-per-node" not in launch.flags or flag_value(script, launch, "nproc-per-node") == "1"
