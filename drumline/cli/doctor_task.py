"""The part of `drumline doctor TASK` that imports torch and the task."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from drumline.cli.as_rank import RankWork, as_rank
from drumline.config import Layers
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.parameter_use import measure_use, use_findings
from drumline.training.job.job import make_manager
from drumline.training.tasks.built_in import load_task, resolve_task


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

    def prepare() -> RankWork:
        task_class = load_task(task)
        config = resolve_task(task, task_class, layers)
        ddp = make_manager(config, task)

        def work() -> None:
            use = measure_use(config, task_class, ddp, most=batches)
            findings = use_findings(use, config, task=task)
            checks.append(TaskCheck(findings, use.row(), {"name": task, **asdict(use)}))

        return RankWork(ddp, work)

    as_rank(prepare)
    return checks[0]
