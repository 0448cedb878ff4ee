"""DL115: a job asks for more GPUs than its launcher uses."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import gpus_per_node, processes_per_node, tasks_per_node
from drumline_lint.reading.launchers import PYTHON, Launch, launches
from drumline_lint.reading.shell import Script

RULE = rule("DL115")


def check_shell(script: Script) -> Iterator[Finding]:
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
        yield RULE.at(script, launch.name[-1], message)


def _starts_ranks(script: Script, launch: Launch) -> bool:
    is_rank_of_srun = launch.srun is not None and "MASTER_ADDR" in script.text
    return launch.kind != PYTHON or is_rank_of_srun


def _is_whole_job(script: Script, launch: Launch) -> bool:
    has_one_launcher = launch.kind == PYTHON or tasks_per_node(launch) == 1
    chooses_gpus = "CUDA_VISIBLE_DEVICES" in script.text
    return has_one_launcher and not launch.command.is_conditional and not chooses_gpus
