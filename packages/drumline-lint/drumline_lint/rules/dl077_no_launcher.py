"""DL077: a script starts a training as one process, whose code expects a launcher.

A launcher sets RANK and WORLD_SIZE for each of its processes; `python` and `srun` set neither.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.flow.conditions import conditions
from drumline_lint.flow.distributed import framework
from drumline_lint.flow.guards import joins
from drumline_lint.program.imports import connected
from drumline_lint.program.names import INIT
from drumline_lint.program.program import Program
from drumline_lint.reading.allocation import started_on_nodes, tasks_per_node
from drumline_lint.reading.launchers import PYTHON, Launch
from drumline_lint.reading.source import Source

RULE = rule("DL077", only_distributed=False)

# Code that looks whether there is a launcher, or does its work.
_OTHER_STARTS = re.compile(
    r"SLURM_|OMPI_|\bspawn\(|Process\(|start_processes|environ\.update|subprocess"
    r"|environ\[[\"']RANK[\"']\] *=[^=]|(?:setdefault|pop)\(\s*[\"'](?:LOCAL_RANK|RANK|WORLD_SIZE)\b"
)
# Code that also runs alone.
_MAY_BE_ALONE = re.compile(
    r"(?:get|getenv)\(\s*[\"'](?:LOCAL_RANK|RANK|WORLD_SIZE)\b"
    r"|[\"'](?:LOCAL_RANK|RANK|WORLD_SIZE)[\"'] (?:not )?in\b"
)
_SOURCED = re.compile(r"^\s*(?:source|\.)\s+(?!\S*(?:activate|conda|bashrc|profile))", re.MULTILINE)


def check(program: Program, source: Source) -> Iterator[Finding]:
    """A script that starts a file as one process, which reads the launcher's variables in any case.

    In run.sh, then in train.py:

        python train.py

        dist.init_process_group("nccl", rank=int(os.environ["RANK"]))
    """
    started = program.launches_of(source)
    if not started or not all(map(_is_plain, started)) or framework(program, source):
        return

    texts = [near.text for near in connected(program, source)]
    if any(map(_OTHER_STARTS.search, texts)):
        return

    # tasks of Slurm with an address of the first are meant to be ranks, also with defaults
    are_ranks = all(launch.srun and "MASTER_ADDR" in launch.script.text for launch in started)
    if not are_ranks and any(map(_MAY_BE_ALONE.search, texts)):
        return

    reads = [
        read
        for read in program.index(source).every(ast.Subscript)
        if joins(program, read) and not any(conditions(program, read))
    ]
    if are_ranks:
        reads += _reads_with_default(program, source)
    if not reads or not any(program.calls(source, INIT)):
        return

    for launch in started:
        starter = "python" if launch.srun is None else "srun"
        message = f"{source.path.name} reads {source.code(reads[0])}, which {starter} does not set"
        yield RULE.at(launch.script, launch.name[-1], message)


def _reads_with_default(program: Program, source: Source) -> Iterator[ast.Call]:
    """`os.environ.get("RANK", 0)`"""
    for call in program.calls(source, "os.environ.get", "os.getenv"):
        key = call.args[0] if call.args else None
        if isinstance(key, ast.Constant) and key.value in ("RANK", "LOCAL_RANK"):
            yield call


def _is_plain(launch: Launch) -> bool:
    """Whether it runs Python on this host, and nothing around it may set the rank.

        python train.py
        srun --ntasks=4 python train.py

    And not `RANK=0 python train.py`, nor `docker run image python train.py`.
    """
    script = launch.script
    is_elsewhere = launch.is_elsewhere or script.container is not None or bool(launch.docker)
    if launch.kind != PYTHON or is_elsewhere:
        return False
    if re.search(r"RANK\b", script.text) or _SOURCED.search(script.text):
        return False
    if launch.srun is None:
        return True

    tasks = (tasks_per_node(launch) or 1) * (started_on_nodes(launch) or 1)
    # A container of Pyxis gets these variables from a hook.
    return tasks > 1 and "container-image" not in launch.srun.by_name
