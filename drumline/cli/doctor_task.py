"""The part of `drumline doctor TASK` that imports torch and the task."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from drumline.cli.as_rank import with_task
from drumline.config import Layers
from drumline.config.schema import Config
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.parameter_use import measure_use, use_findings
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Task


@dataclass(frozen=True, slots=True)
class TaskCheck:
    findings: list[Finding]
    row: str
    """For the screen."""
    document: dict[str, Any]
    """The same, for JSON."""


def check_task(task: str, layers: Layers, *, batches: int) -> TaskCheck:
    """On this process alone. Where the task fails, its error is reported and the process exits."""
    checks: list[TaskCheck] = []

    def work(config: Config, task_class: type[Task], ddp: RunManager) -> None:
        use = measure_use(config, task_class, ddp, most=batches)
        findings = use_findings(use, config, task=task)
        checks.append(TaskCheck(findings, use.row(), {"name": task, **asdict(use)}))

    with_task(task, layers, work)
    return checks[0]
