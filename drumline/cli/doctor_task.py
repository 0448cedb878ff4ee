"""The part of `drumline doctor TASK` that imports torch and the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from drumline.cli.evaluate_rank import as_rank
from drumline.config import Layers
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.parameter_use import measure_use, use_findings
from drumline.training.job.job import make_manager
from drumline.training.manager import DDPManager
from drumline.training.tasks.built_in import load_task, resolve_task


def check_task(
    task: str, layers: Layers, *, batches: int
) -> tuple[list[Finding], str, dict[str, Any]]:
    """On this process alone: what was found, the row for the screen, and the same as JSON. Where
    the task fails, its error is reported and the process exits."""
    done: list[tuple[list[Finding], str, dict[str, Any]]] = []

    def prepare() -> tuple[DDPManager, Callable[[], None]]:
        task_class = load_task(task)
        config = resolve_task(task, task_class, layers)
        ddp = make_manager(config, task)

        def work() -> None:
            use = measure_use(config, task_class, ddp, most=batches)
            done.append(
                (use_findings(use, config, task=task), use.row(), {"name": task, **asdict(use)})
            )

        return ddp, work

    as_rank(prepare)
    return done[0]
