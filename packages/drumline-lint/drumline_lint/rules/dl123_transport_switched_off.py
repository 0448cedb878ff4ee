"""DL123: a fast transport of NCCL is switched off, and nothing says why."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import has_several_nodes
from drumline_lint.reading.environment import ScopedAssignment, comment_at, launch_variables
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.rendezvous import most_nodes
from drumline_lint.reading.shell import Script

RULE = rule("DL123")
_ON = {"1", "true", "yes"}
_LOST = {
    "NCCL_P2P_DISABLE": "NVLink and PCIe between the GPUs of a node",
    "NCCL_SHM_DISABLE": "shared memory between the ranks of a node",
    "NCCL_IB_DISABLE": "InfiniBand and RoCE between nodes",
}
_REASON = re.compile(
    r"\b(?:no|not|without|lacks?|broken|hangs?|bugs?|driver|ethernet|tcp|pcie|4090|3090|consumer|workaround|because|"
    r"virtual|vm|cloud|only|unsupported|iommu|acs|until|issues?|if|needed|limits?|fail\w*|\w+n't)\b",
    re.IGNORECASE,
)


def check_shell(script: Script) -> Iterator[Finding]:
    if "_DISABLE" not in script.text or not _is_training(script):
        return
    harmless = {"NCCL_IB_DISABLE"} if _is_on_one_node(script) else set()
    for item in launch_variables(script):
        assignment = item.assignment
        is_off = (item.script.constant(assignment.value) or "").lower() in _ON
        if assignment.name in _LOST.keys() - harmless and is_off and not _has_reason(item):
            message = f"{assignment.name}=1 switches off {_LOST[assignment.name]}"
            severity = None if _is_costly(script) else Severity.NOTE
            yield RULE.at(script, assignment, message, severity=severity)


def _is_costly(script: Script) -> bool:
    """Consumer GPUs may need it, and who measures the network; the nodes of a cluster have fast
    ones."""
    return script.on_slurm and has_several_nodes(script)


def _is_training(script: Script) -> bool:
    is_image = script.container is not None and script.container.kind == "image"
    return is_image or bool(launches(script))


def _is_on_one_node(script: Script) -> bool:
    started = launches(script)
    return bool(started) and all(
        launch.is_torchrun and most_nodes(launch) == 1 for launch in started
    )


def _has_reason(item: ScopedAssignment) -> bool:
    return item.assignment.command.is_conditional or bool(_REASON.search(comment_at(item)))
