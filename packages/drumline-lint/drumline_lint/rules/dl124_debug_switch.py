"""DL124: a switch for debugging that slows every step."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, Severity, rule
from drumline_lint.reading.allocation import processes_per_node
from drumline_lint.reading.environment import comment_at, launch_variables
from drumline_lint.reading.launchers import launches
from drumline_lint.reading.shell import Script

RULE = rule("DL124")
_COSTS = {
    ("CUDA_LAUNCH_BLOCKING", "1"): "waits for the GPU after every kernel",
    (
        "TORCH_DISTRIBUTED_DEBUG",
        "DETAIL",
    ): "compares every collective across the ranks before it runs",
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"): "asks the driver for every tensor's memory",
    ("NCCL_DEBUG", "TRACE"): "logs more than any other level",
}
_TRACE = _COSTS["NCCL_DEBUG", "TRACE"]
_FOR_DEBUGGING = re.compile(r"(?:^|[^a-z])(?:debug|profil|trace|repro|hang|test)", re.IGNORECASE)

_REASON = re.compile(
    r"\b(?:hang|need|otherwise|workaround|hack|remove|bug|debug|because|without|crash|race|error|can be|OFF|DETAIL)",
    re.IGNORECASE,
)


def check_shell(script: Script) -> Iterator[Finding]:
    is_image = script.container is not None and script.container.kind == "image"
    job = script.sbatch.by_name.get("job-name") or ""
    started = launches(script)
    if _FOR_DEBUGGING.search(f"{script.path.stem} {job}") or not (is_image or started):
        return
    for item in launch_variables(script):
        assignment = item.assignment
        value = item.script.constant(assignment.value) or ""
        cost = _COSTS.get((assignment.name, value.upper()))
        is_meant = assignment.command.is_conditional or bool(_REASON.search(comment_at(item)))
        if cost and not is_meant:
            is_small = bool(started) and all(processes_per_node(run) == 1 for run in started)
            is_to_file = cost == _TRACE and "NCCL_DEBUG_FILE=" in script.text
            is_cheap = is_small or is_to_file or _is_for_npu(script)
            severity = Severity.NOTE if is_cheap else None
            message = f"{assignment.name}={value} {cost}"
            yield RULE.at(script, assignment, message, severity=severity)


def _is_for_npu(script: Script) -> bool:
    """Ascend's own switches; CUDA's have no effect there."""
    return "HCCL_" in script.text or "ASCEND_" in script.text
