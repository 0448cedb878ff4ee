"""Which parameters of a task get a gradient: some of its batches are run on one process, without
DDP, and what that means for `dist.find_unused_parameters` and `dist.static_graph` on several
ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from drumline.base.text import join_names
from drumline.config.schema import Config
from drumline.tools.doctor.finding import Fault, Finding
from drumline.tools.find.range_test import endless
from drumline.training.failure_report import explain_out_of_memory
from drumline.training.job.evaluation_job import with_local_data
from drumline.training.job.job import build_job
from drumline.training.manager import RunManager
from drumline.training.steps.warm_up import dry_run, trains_with_ddp, without_gradient
from drumline.training.tasks.base import Task

CHECK = "unused parameters"
FIND = "--dist.find_unused_parameters"


@dataclass(frozen=True, kw_only=True)
class ParameterUse:
    """What some batches of a task use of its trained parameters."""

    num_trained: int
    num_batches: int
    unused: Mapping[str, int]
    """In how many batches a parameter got no gradient; those that always got one are left out."""

    @property
    def never(self) -> list[str]:
        """Used in no batch."""
        return [name for name, count in self.unused.items() if count == self.num_batches]

    @property
    def is_static(self) -> bool:
        """Whether all batches use the same parameters."""
        return len(self.never) == len(self.unused)

    def row(self) -> str:
        """For the screen, beside the facts of the machine."""
        unused = f"{len(self.unused) or 'none'} unused in one or more of {self.num_batches} batches"
        return f"{self.num_trained:,} trained, {unused}"


def measure_use(
    config: Config,
    task_class: type[Task],
    ddp: RunManager,
    *,
    most: int,
) -> ParameterUse:
    """Run this many micro-batches through loss and backward pass, in training mode. The weights
    stay as they are. Random numbers continue from batch to batch, as in a run: a model may leave
    out layers at random."""
    config = with_local_data(config, ddp)
    job = build_job(config, task_class(config), ddp, step_kind="eager")

    unused: Counter[str] = Counter()
    try:
        with explain_out_of_memory(config, job), dry_run(job) as task:
            batches = (micro.data for step in endless(job.loader) for micro in step.micro_batches)
            for batch in islice(batches, most):
                unused.update(without_gradient(job, task, batch))
    finally:
        job.close()

    trained = [name for name, parameter in job.model.named_parameters() if parameter.requires_grad]
    return ParameterUse(
        num_trained=len(trained),
        num_batches=most,
        unused={name: unused[name] for name in trained if unused[name]},
    )


def use_findings(use: ParameterUse, config: Config, *, task: str) -> list[Finding]:
    """What must be set, or need not be; nothing where no rank waits for gradients of others. A
    sharded model only needs all ranks to use the same parameters."""
    is_sharded = config.dist.mode not in ("ddp", "auto")
    is_checked = trains_with_ddp(config.dist) or (is_sharded and not use.is_static)
    fault = _fault(use, config) if is_checked else None

    return [] if fault is None else [Finding.of_fault(CHECK, task, fault)]


def _fault(use: ParameterUse, config: Config) -> Fault | None:
    """What to set instead; None where the settings fit what the batches use:

    batches use different parameters: head_a.weight (unused in 3 of 8); several ranks would wait for ...
    none of 8 batches uses extra.weight: several ranks would wait for the gradients
    """
    dist = config.dist
    num = use.num_batches
    never = join_names(use.never)
    finds = dist.find_unused_parameters
    # whose steps are not DDP's
    can_be_static = use.is_static and config.train.exact != "elastic"

    if finds and not use.unused:
        what = f"--dist.find_unused_parameters costs time in every step, and each of {num} batches uses all parameters"
        return Fault("note", what, "leave it off, unless other batches or a hook leave some out")

    if finds and can_be_static:
        what = f"none of {num} batches uses {never}, and all batches use the others"
        fix = "set --dist.static_graph in place of --dist.find_unused_parameters, which costs time"
        return Fault("note", what, fix)

    if finds or not use.unused:
        return None

    if not use.is_static:
        counts = join_names(
            f"{name} (unused in {count} of {num})" for name, count in use.unused.items()
        )
        what = f"batches use different parameters: {counts}; several ranks would wait for gradients"
        instead = " in place of --dist.static_graph" if dist.static_graph else ""

        return Fault("problem", what, f"set {FIND}{instead}")

    if can_be_static and dist.static_graph:
        return None

    setting = "--dist.static_graph, since all batches use the others" if can_be_static else FIND
    what = f"none of {num} batches uses {never}: several ranks would wait for the gradients"
    return Fault("problem", what, f"freeze them (requires_grad=False), or set {setting}")
