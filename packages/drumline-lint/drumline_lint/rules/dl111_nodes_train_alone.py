"""DL111: every node of a job trains alone."""

from __future__ import annotations

from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.allocation import started_on_nodes, uses_task_variable
from drumline_lint.reading.launchers import Launch, launches
from drumline_lint.reading.rendezvous import least_nodes, most_nodes
from drumline_lint.reading.shell import Script

RULE = rule("DL111")
# The pods of other kinds may be independent runs.
_ONE_JOB = {"PyTorchJob", "StatefulSet"}


def check_shell(script: Script) -> Iterator[Finding]:
    for launch in launches(script):
        if not launch.is_torchrun:
            continue
        standalone = launch.flags.get("standalone")
        if standalone is not None and (least_nodes(launch) or 1) > 1:
            message = (
                f"--standalone is a job of one node, but torchrun waits for {least_nodes(launch)}"
            )
            yield RULE.at(script, standalone.word, message)
        elif (nodes := started_on_nodes(launch) or 1) > 1 and _is_alone(launch):
            how = "--standalone" if standalone else "without --nnodes"
            message = f"torchrun {how} runs on {nodes} nodes: each of them trains alone"
            place = standalone.word if standalone else launch.name[-1]
            yield RULE.at(script, place, message)


def _is_alone(launch: Launch) -> bool:
    """Tasks with different arguments are independent runs on purpose."""
    container = launch.script.container
    is_one_job = container is None or container.kind in _ONE_JOB
    is_on_one = "standalone" in launch.flags or most_nodes(launch) == 1
    return is_one_job and is_on_one and not uses_task_variable(launch)
