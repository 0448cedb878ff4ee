"""DL115: a job asks for more GPUs than its launcher uses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import gpus_per_node, processes_per_node, tasks_per_node
from drumline_lint.reading.launchers import ACCELERATE, PYTHON, Launch, launches
from drumline_lint.reading.rendezvous import least_nodes
from drumline_lint.reading.shell import Script

RULE = rule("DL115")
_SHARDED = re.compile(
    r"(?:model|tensor|pipeline)[-_ ]?(?:model[-_ ])?parallel|offload|device_map|lwmp|split|\b[tp]p[-_ =]\d",
    re.IGNORECASE,
)


_OF_ONE_NODE = re.compile(r"N?_?GPUS?_PER_(?:NODE|MACHINE|HOST)|NPROC_PER_NODE|PROCS?_PER_NODE")


def check_shell(script: Script) -> Iterator[Finding]:
    of_machine = [*_total_of_one_machine(script)]
    yield from of_machine or _idle(script)


def _total_of_one_machine(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        total = launch.flags.get("num-processes") if launch.kind == ACCELERATE else None
        pieces = total.value.pieces if total and total.value else ()
        written = pieces[0].text if len(pieces) == 1 else ""
        machines = least_nodes(launch) or 1
        is_less = written.isdigit() and int(written) < machines
        if total and machines > 1 and (is_less or _OF_ONE_NODE.fullmatch(written)):
            message = (
                f"--num_processes is the total of {machines} machines, and {written} that of one"
            )
            yield RULE.at(script, total.word, message, fix="multiply it by the number of machines")


def _idle(script: Script) -> Iterator[Finding]:
    started = [launch for launch in launches(script) if _starts_ranks(script, launch)]
    if any(launch.command.is_background for launch in launches(script)):
        return  # It may use the other GPUs.
    # Several launches may share the GPUs of a node.
    if len(started) != 1 or not _is_whole_job(script, started[0]):
        return
    launch = started[0]
    processes = processes_per_node(launch)
    gpus = gpus_per_node(launch)
    if processes is not None and gpus is not None and processes < gpus:
        by = "srun" if launch.kind == PYTHON else launch.kind
        message = (
            f"{by} starts {processes} of {gpus} possible ranks on a node: "
            f"{gpus - processes} of its GPUs are idle"
        )
        # One rank may use several GPUs itself.
        count = launch.flags.get("nproc-per-node")
        is_asked_for = count is not None and count.value is not None and count.value.plain == "1"
        may_use_all = is_asked_for or _SHARDED.search(f"{script.path.name} {script.text}")
        severity = Severity.NOTE if may_use_all else None
        yield RULE.at(script, launch.name[-1], message, severity=severity)


def _starts_ranks(script: Script, launch: Launch) -> bool:
    is_rank_of_srun = launch.srun is not None and "MASTER_ADDR" in script.text
    return launch.kind != PYTHON or is_rank_of_srun


def _is_whole_job(script: Script, launch: Launch) -> bool:
    has_one_launcher = launch.kind == PYTHON or tasks_per_node(launch) == 1
    chooses_gpus = "CUDA_VISIBLE_DEVICES" in script.text
    return has_one_launcher and not launch.command.is_conditional and not chooses_gpus
