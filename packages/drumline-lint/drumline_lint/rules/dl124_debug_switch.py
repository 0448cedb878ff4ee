"""DL124: a switch for debugging that slows every step."""

from __future__ import annotations

import re
from collections.abc import Iterator

from drumline_lint.findings import Finding, rule
from drumline_lint.reading.environment import launch_variables
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
    ("NCCL_DEBUG", "TRACE"): "logs every call of NCCL",
}
_FOR_DEBUGGING = re.compile(r"(?:^|[^a-z])(?:debug|profil|trace|repro|hang|test)", re.IGNORECASE)


def check_shell(script: Script) -> Iterator[Finding]:
    is_image = script.container is not None and script.container.kind == "image"
    job = script.sbatch.by_name.get("job-name") or ""
    if _FOR_DEBUGGING.search(f"{script.path.stem} {job}") or not (is_image or launches(script)):
        return
    for item in launch_variables(script):
        assignment = item.assignment
        value = item.script.constant(assignment.value) or ""
        cost = _COSTS.get((assignment.name, value.upper()))
        if cost and not assignment.command.is_conditional:
            yield RULE.at(script, assignment, f"{assignment.name}={value} {cost}")
