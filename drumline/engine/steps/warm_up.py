"""Before the first step: what would train wrongly or fail later is refused, and DDP settles its layout.

- A loss that is a mean is refused: the engine would divide it by the number of samples again.
- Parameters without a part in the loss are named: on several ranks DDP would wait for their gradients.
- One backward pass: after its first one DDP lays its buckets out anew, in the order in which gradients came. On three
  or more ranks the layout decides in which order the ranks' parts of a gradient are added, and with it the last bit.
  Without this pass the first step after a resume would run in the layout that an uninterrupted run had in its very
  first step only.

Everything is put back as it was: the run has the same bits with and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from drumline.config.schema import Config
from drumline.distributed.collectives import gather_json
from drumline.engine.job import Job
from drumline.engine.steps.eager import FIND_UNUSED, loss_function
from drumline.engine.steps.rehearsal import evaluation_mode, rehearsed
from drumline.errors import UsageError
from drumline.tasks.base import Loss, Task
from drumline.watch.beats.phase import Phase

# The sum of two numbers does not depend on their order.
FIRST_WORLD_WITH_AN_ORDER = 3
# As many as tell a sum from a mean; a whole batch would take a while to load and to compute.
FEW_SAMPLES = 8
NAMED = 5


def warm_up(job: Job, config: Config, *, report: Callable[[str], None]) -> None:
    """Collective: forward passes on the next batch, and a backward pass where the layout needs it. `report` is given a
    sentence for the log."""
    job.ddp.beat.mark(Phase.START)
    dist = config.dist
    with rehearsed(job) as task:
        if task.check_mean:
            refuse_a_mean(job, task)
        # The elastic step names them itself: of every shard.
        if not (dist.find_unused_parameters or dist.static_graph or config.train.exact == "elastic"):
            _name_unused(job, task, report)
        _settle_layout(job, task, static_graph=dist.static_graph)


def _settle_layout(job: Job, task: Task, *, static_graph: bool) -> None:
    """Collective. With a static graph DDP learns the graph in its first backward pass, which must not be one under
    no_sync, and the layout is settled by the second pass only."""
    if not isinstance(job.applied, DistributedDataParallel):
        return
    if job.ddp.world_size < FIRST_WORLD_WITH_AN_ORDER and not static_graph:
        return
    for _ in range(2 if static_graph else 1):
        job.ddp.beat.mark(Phase.START)
        with job.autocast:
            loss = job.applied(loss_function(task), job.loader.preview())
        (loss.total * 0.0).backward()
        job.optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def refuse_a_mean(job: Job, task: Task) -> None:
    """Collective: compare the loss of some samples with the losses of their halves. In evaluation mode, where samples
    have nothing to do with each other; what cannot be cut in halves, or fails in them, is not judged."""
    batch = job.loader.preview(FEW_SAMPLES)
    # Of one size on all ranks: a loss may have a collective in it.
    size = min(gather_json(min(_num_rows(batch), FEW_SAMPLES), device=job.ddp.device)) // 2 * 2
    if size < 2:
        return
    pieces = [(0, size), (0, size // 2), (size // 2, size)]
    try:
        with evaluation_mode(job.model), job.autocast:
            losses = [task.loss(job.model, _rows(batch, low, high)) for low, high in pieces]
        whole, *halves = [
            _numbers(loss, high - low) for loss, (low, high) in zip(losses, pieces, strict=True)
        ]
    except Exception:
        return  # if it is an error, the first step has it too
    if is_a_mean(whole, halves):
        (total, _), ((first, _), (second, _)) = whole, halves
        raise UsageError(
            f"{type(task).__name__}.loss() gives a mean, and Loss takes a sum: {total:.4g} for {size} samples, "
            f"{first:.4g} and {second:.4g} for their halves. It would be divided by the number of samples again",
            next_step='return Loss.mean(value, count), or use reduction="sum"; if it is a sum, set check_mean = False '
            f"in {type(task).__name__}",
        )


def is_a_mean(whole: tuple[float, float], halves: list[tuple[float, float]]) -> bool:
    """Of (total, weight) pairs: whether the total of the whole is surely the mean of the halves, and not their sum."""
    total, weight = whole
    added, weights = sum(half for half, _ in halves), sum(weight for _, weight in halves)
    if not (math.isfinite(total) and math.isfinite(added)) or weights <= 0 or abs(total) < 1e-6:
        return False
    if not math.isclose(weight, weights, rel_tol=1e-3) or math.isclose(total, added, rel_tol=0.1):
        return False
    mean = sum(half * weight for half, weight in halves) / weights
    return math.isclose(total, mean, rel_tol=0.01)


def _name_unused(job: Job, task: Task, report: Callable[[str], None]) -> None:
    """Collective: which parameters that are trained the next batch does not use."""
    unused = _unused(job, task, FEW_SAMPLES)
    # A few samples may leave out what the whole batch uses, or be too few for the loss.
    if unused is None or unused:
        unused = _unused(job, task, None)
    if not unused:
        return
    more = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
    what = f"parameters that have no part in the loss: {', '.join(unused[:NAMED])}{more}"
    if job.ddp.world_size > 1:
        raise UsageError(what, next_step=FIND_UNUSED)
    report(f"{what}; on several ranks this stops the run: {FIND_UNUSED}")


def _unused(job: Job, task: Task, most: int | None) -> list[str] | None:
    """Collective: on whichever rank; None where the loss of `most` samples fails on one."""
    mine: list[str] | None = []
    if (batch := job.loader.preview(most)) is not None:
        try:
            with job.autocast:
                mine = unused_parameters(job.model, loss_function(task)(job.model, batch).total)
        except Exception:
            if most is None:
                raise
            mine = None
    found: list[list[str] | None] = gather_json(mine, device=job.ddp.device)
    return None if None in found else sorted({name for names in found for name in names or ()})


def unused_parameters(model: nn.Module, total: Tensor) -> list[str]:
    """The parameters that a gradient of `total` does not reach; none where that is not certain: a backward pass written
    in Python (reentrant checkpointing) may reach more than its graph shows."""
    reached, seen, waiting = set(), set(), [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if issubclass(type(node), BackwardCFunction):
            return []
        seen.add(node)
        reached.add(id(getattr(node, "variable", None)))
        waiting += [following for following, _ in node.next_functions]
    return [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in reached]


def _numbers(loss: Loss, size: int) -> tuple[float, float]:
    return float(loss.total), float(size if loss.weight is None else loss.weight)


def _num_rows(batch: Any) -> int:
    """How many samples a batch of tensors has, all of which have them first; 0: it is not such a batch."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    return sizes.pop() if len(sizes) == 1 else 0


def _rows(batch: Any, low: int, high: int) -> Any:
    return pytree.tree_map(lambda leaf: leaf[low:high] if isinstance(leaf, Tensor) else leaf, batch)
