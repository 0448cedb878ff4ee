"""DL108: every node is told that it is the first."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.finding import Finding, Severity
from drumline_lint.reading.launches import Launch, launches
from drumline_lint.reading.meeting import backend, has_several_nodes
from drumline_lint.reading.shell import Script
from drumline_lint.reading.shell_parts import Kind, Word
from drumline_lint.rule import Rule

RULE = Rule(
    id="DL108",
    name="same-node-rank",
    severity=Severity.ERROR,
    summary="srun gives every node the same --node-rank",
    why=(
        "The shell of a batch file puts in the values of variables before srun starts anything, and there SLURM_NODEID "
        "and SLURM_PROCID are 0. All nodes then call themselves node 0, and the job hangs or dies when they meet."
    ),
    fix="let each node's own shell put it in: srun bash -c 'torchrun --node-rank=$SLURM_NODEID train.py'",
    bad=(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=1\n"
        "srun torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=$HEAD --master-port=$PORT train.py\n"
    ),
    good=(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks-per-node=1\n"
        "srun bash -c 'torchrun --nnodes=2 --node-rank=$SLURM_NODEID \\\n"
        "    --master-addr='$HEAD' --master-port='$PORT' train.py'\n"
    ),
    language="shell",
)
OF_A_TASK = {"SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"}
ONE_OF_SEVERAL = {"nodelist", "relative"}


def check_shell(script: Script) -> Iterator[Finding]:
    """c10d deals out the numbers itself, so that there it does not matter."""
    for launch in launches(script):
        flag = launch.flags.get("node-rank")
        if flag is None or flag.value is None or not _is_started_on_several(script, launch):
            continue
        is_early = not launch.is_expanded_late and _is_of_a_task(script, flag.value)
        if backend(script, launch) == "static" and (is_early or script.constant(flag.value) == "0"):
            written = script.written(flag.value)
            how = f"is given --node-rank {written}"
            if is_early:
                how = f"is given 0 for {written}, which is put in before srun starts anything"
            yield RULE.at(script, flag.word, f"every node {how}: each takes itself for the first")


def _is_started_on_several(script: Script, launch: Launch) -> bool:
    """By one srun; one that names its node is one of several."""
    if launch.srun is None or launch.is_elsewhere or not launch.is_sure or not launch.srun.is_sure:
        return False
    nodes = launch.srun.number("nodes") or script.sbatch.number("nodes")
    if ONE_OF_SEVERAL & launch.srun.by_name.keys() or nodes == 1 or launch.srun.number("ntasks") == 1:
        return False
    return has_several_nodes(script, launch) is not False


def _is_of_a_task(script: Script, word: Word) -> bool:
    """In a batch file, whose own shell has these variables too."""
    names = {piece.text for piece in word.pieces if piece.kind is Kind.VARIABLE}
    return bool(script.sbatch.by_name) and len(word.pieces) == 1 and bool(names & OF_A_TASK)
