"""Before the first step: count the model's FLOPs, refuse a loss that is a mean, name parameters
that get no gradient, and let DDP build its buckets with one backward pass. The task's loss is
called as seldom as possible, and everything that it changes is restored: the run has the same bits
with and without.

    count_few_samples  2 samples, forward and backward: FLOPs, and whether the loss uses all parameters
    check_few_samples  8 samples once and twice, forward, in evaluation mode: a sum doubles, a mean stays
    check_unused       the next micro-batch, forward and backward, unless that has shown it already
    _build_buckets     the next micro-batch under DDP, forward and backward, if the order of buckets matters
    warm_up_shards     of a sharded model in place of all but the second: forward and backward as in a step
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from drumline.base.errors import UsageError
from drumline.base.text import by_rank, join_names
from drumline.config.schema import Config, DistConfig
from drumline.parallel.block_use import unused_advice
from drumline.parallel.shards import is_shard
from drumline.parallel.wrap import FIND_UNUSED_OR_STATIC, NAMED, LiveBuffers
from drumline.rank.collectives import gather_json
from drumline.rank.determinism import capture_rng, restore_rng
from drumline.rank.torch_internals import pytree
from drumline.training.between_steps.throughput import ModelFlops, count_flops, graph
from drumline.training.job.job import Job
from drumline.training.steps.eager import OUTSIDE_FORWARD, LossParts, loss_function
from drumline.training.tasks.base import Task
from drumline.watch.heartbeat import Phase

# The sum of two numbers does not depend on their order.
FIRST_WORLD_WITH_AN_ORDER = 3
# Enough samples to distinguish a sum from a mean; a whole batch would take longer.
FEW_SAMPLES = 8
# Enough for models and losses that refuse a single sample: FLOPs are counted per sample.
COUNTED_SAMPLES = 2


def warm_up(job: Job, config: Config, *, note: Callable[[str], None]) -> ModelFlops | None:
    """Collective: forward passes on the next batch; a backward pass if the buckets need it, or if
    some parameters may be unused. `note` logs a message. Returns the model's
    FLOPs, if they could be counted."""
    job.heartbeat.mark(Phase.START)
    few = job.loader.preview(FEW_SAMPLES)

    # The same number on all ranks: the loss may call a collective. 0: the batch cannot be cut.
    size = min(gather_json(min(_num_rows(few), FEW_SAMPLES)))
    few = _cut(few, size)
    if job.sharded is not None:
        with torch.no_grad():
            check_few_samples(job, few, size)
        return warm_up_shards(job, config.dist, note=note)

    flops, uses_all = count_few_samples(job, few, size)
    check_few_samples(job, few, size)
    check_unused(job, config, uses_all=uses_all, note=note)

    if isinstance(job.applied, DistributedDataParallel):
        _build_buckets(job, is_static=config.dist.static_graph)

    return flops


def _build_buckets(job: Job, *, is_static: bool) -> None:
    """Collective: backward passes of zeros, as many as DDP needs for its final buckets.

    With a static graph DDP records the graph in its first backward pass, which must not be under
    no_sync, and builds the buckets in the second. PowerSGD's state belongs to buckets."""
    has_order = job.ddp.world_size >= FIRST_WORLD_WITH_AN_ORDER or job.comm is not None
    num_passes = 2 if is_static else int(has_order)

    for _ in range(num_passes):
        job.heartbeat.mark(Phase.START)
        with dry_run(job) as task:
            with job.autocast:
                loss = job.applied(loss_function(task), job.loader.preview())

            (loss.total * 0.0).backward()

        job.optimizer.zero_grad(set_to_none=True)


def check_unused(job: Job, config: Config, *, uses_all: bool, note: Callable[[str], None]) -> None:
    """Collective: stop a run whose ranks would wait for gradients that no rank, or not every rank,
    computes, and name the parameters. `uses_all`: a pass on every rank has shown that there are
    none.

    One process waits for nobody, so there it is a note; the elastic step names them itself, for
    every shard; and without DDP no rank waits."""
    dist = config.dist
    if config.train.exact == "elastic" or not trains_with_ddp(dist):
        return
    # A static graph allows them, and DDP would count a gradient that comes before its first pass.
    if uses_all or dist.find_unused_parameters or dist.static_graph:
        return

    job.heartbeat.mark(Phase.START)
    with dry_run(job) as task:
        unused = without_gradient(job, task, job.loader.preview())

    what = _differing_use(job, unused)
    if what is None and unused:
        what = f"the loss does not use these parameters: {join_names(unused, most=NAMED)}"

    if what is None:
        return

    if job.ddp.world_size > 1:
        raise UsageError(what, next_step=FIND_UNUSED_OR_STATIC)

    note(f"{what}; on several ranks this stops the run: {FIND_UNUSED_OR_STATIC}")


def trains_with_ddp(dist: DistConfig) -> bool:
    """Whether several ranks would; the same on all ranks, also where one is a node, and so a
    replica, of its own."""
    return dist.mode in ("ddp", "auto") and (dist.sync == "step" or dist.sync_within == "node")


def without_gradient(job: Job, task: Task, batch: Any) -> list[str]:
    """The trained parameters that get no gradient from this batch, by a forward and a backward pass
    of this rank alone, without DDP. For use in `dry_run`."""
    job.model.zero_grad(set_to_none=True)
    with job.autocast:
        total = loss_function(task)(job.model, batch).total

    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]

    unused = _names_without_gradient(job.model)
    job.model.zero_grad(set_to_none=True)
    return sorted(unused)


def _names_without_gradient(model: nn.Module) -> list[str]:
    """The trained parameters that the last backward pass has not reached."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]


def _reached(total: Tensor) -> set[int]:
    """The ids of the parameters in the graph of a loss: those that its backward pass reaches."""
    return {id(getattr(node, "variable", None)) for node in graph(total)}


@contextmanager
def dry_run(job: Job) -> Iterator[Task]:
    """To call the task's loss outside a step, on the copy of the task that this yields. Afterwards
    random numbers, buffers, modes and attributes of modules are restored; those of the task too,
    where a compiled loss calls it."""
    rng = capture_rng(job.ddp.device)
    buffers = LiveBuffers(job.model)
    before = buffers.keep()

    attributes = [(holder, dict(vars(holder))) for holder in (job.task, *job.model.modules())]
    try:
        # Attributes that its loss sets, to count calls for example, are set on the copy.
        with nullcontext() if job.comm is None else job.comm.paused():
            yield copy.copy(job.task)
    finally:
        for holder, before_values in attributes:
            vars(holder).clear()
            vars(holder).update(before_values)

        buffers.put_back(before)
        restore_rng(rng, job.ddp.device)


def _num_rows(batch: Any) -> int:
    """The samples of a batch, if all of its tensors have as many rows; 0: unknown."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    rows = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    return rows.pop() if len(rows) == 1 else 0


def _cut(batch: Any, size: int) -> Any:
    """The first samples of a batch, as a copy, which a loss may change. None: it cannot be cut."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[:size].clone(), batch) if size else None


def count_few_samples(job: Job, few: Any, size: int) -> tuple[ModelFlops | None, bool]:
    """Collective: the FLOPs of these samples; None: the pass fails, or they are unknown. And whether
    all parameters certainly get a gradient, on every rank."""
    size = min(size, COUNTED_SAMPLES)
    flops = None
    uses_all = False
    has_failed = False

    try:
        if size:
            flops, uses_all = _count(job, _cut(few, size), size)
    except Exception:
        has_failed = True  # a real error is raised by the first step too

    ranks = gather_json([has_failed, uses_all])
    if any(failed for failed, _ in ranks):
        return None, False

    return flops, all(uses for _, uses in ranks)


def _count(job: Job, batch: Any, size: int) -> tuple[ModelFlops | None, bool]:
    """The same for this rank, which may fail."""
    unreached = {id(parameter) for parameter in job.model.parameters() if parameter.requires_grad}
    with dry_run(job) as task:
        for module in job.model.modules():
            # a collective, and some ranks may fail before
            if isinstance(module, nn.SyncBatchNorm):
                module.training = False

        def compute_loss() -> Tensor:
            """The loss of the batch; what its graph reaches is noted."""
            with job.autocast:
                total = loss_function(task)(job.model, batch).total

            # What a backward pass in Python reaches (reentrant checkpointing) is not in its graph.
            unreached.difference_update(_reached(total))
            return total

        flops = count_flops(
            compute_loss,
            job.model.parameters(),
            num_samples=size,
            num_tokens=task.num_tokens(batch),
        )

    return flops, not unreached


def warm_up_shards(job: Job, dist: DistConfig, *, note: Callable[[str], None]) -> ModelFlops | None:
    """Collective: a forward and a backward pass of a sharded model on the next micro-batch, as in
    the first step. Returns its FLOPs. Ranks that use different parameters would reduce gradients of
    different sizes, so they stop between the two passes."""
    job.heartbeat.mark(Phase.START)
    batch = job.loader.preview()
    sharded = job.sharded
    assert sharded is not None

    with dry_run(job) as task:

        def compute_loss() -> Tensor:
            """The loss of the batch; raises if the ranks use different parameters for it."""
            with job.autocast, sharded.use.compared(job.ddp.host), _gathered(job.model) as gathered:
                total: Tensor = job.applied(loss_function(task), batch).total

            if not dist.find_unused_parameters:
                reached = _reached(total)
                unused = [name for name in gathered if id(gathered[name]) not in reached]
                what = _differing_use(job, sorted(unused))

                if what is not None:
                    raise UsageError(what, next_step=unused_advice())

            return total

        size = _num_rows(batch)
        tokens = task.num_tokens(batch)
        try:
            flops = count_flops(compute_loss, None, num_samples=size, num_tokens=tokens)
        except RuntimeError as error:
            if OUTSIDE_FORWARD not in str(error):
                raise

            return None  # the first step reports it

    sharded.use.learn()
    unused = _names_without_gradient(job.model)
    if unused and job.ddp.is_main_process():
        note(
            f"the loss does not use these parameters, which are not trained: {join_names(unused, most=NAMED)}"
        )

    job.model.zero_grad(set_to_none=True)
    return flops if size else None


@contextmanager
def _gathered(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The trained parameters with which the forward pass of a sharded model computes, by name: they
    are whole while their block is called, and the model's own are not in the graph."""
    parameters: dict[str, Tensor] = {}

    def keep(block: nn.Module, _: Any, *, prefix: str) -> None:
        """torch calls it before each block: its parameters are whole now."""
        for name, parameter in block.named_parameters(prefix):
            if parameter.requires_grad and not is_shard(parameter):
                parameters[name] = parameter

    handles = [
        module.register_forward_pre_hook(partial(keep, prefix=name))
        for name, module in model.named_modules()
        if hasattr(module, "set_requires_gradient_sync")
    ]

    try:
        yield parameters
    finally:
        for handle in handles:
            handle.remove()


def _differing_use(job: Job, unused: list[str]) -> str | None:
    """Collective: whether ranks use different parameters, in words. `unused`: those that this rank
    does not use."""
    hosts, unused_by_rank = zip(*gather_json([job.ddp.host, unused]), strict=True)
    if all(names == unused_by_rank[0] for names in unused_by_rank):
        return None

    texts = [join_names(names, most=NAMED) or "none" for names in unused_by_rank]
    return f"the parameters that the loss does not use differ across ranks: {by_rank(texts, hosts)}"


def check_few_samples(job: Job, once: Any, size: int) -> None:
    """Collective: refuse a mean, by the loss of some samples and of the same samples twice, in
    evaluation mode: a sum doubles, a mean stays. Batches that cannot be concatenated, or fail, are
    not checked."""
    if size < 2 or not job.task.check_mean:
        return

    first = _try_loss(job, once)

    # Agree, so that all ranks take the same path: it may have failed on one.
    if any(gather_json(first is None)) or first is None:
        return

    twice = pytree.tree_map_only(Tensor, lambda leaf: torch.cat([leaf, leaf]), once)
    second = _try_loss(job, twice)
    if second is None or not is_a_mean(_numbers(first, size), _numbers(second, 2 * size)):
        return

    name = type(job.task).__name__
    raise UsageError(
        f"{name}.loss() returns a mean, but Loss takes a sum: {first.total.item():.4g} for {size} samples, and "
        f"{second.total.item():.4g} for the same samples twice. It would be divided by the number of samples again",
        next_step='return Loss.mean(value, count), or use reduction="sum"; if it is a sum, set check_mean = False '
        f"in {name}",
    )


def _try_loss(job: Job, batch: Any) -> LossParts | None:
    """The loss, with a new copy of the task and the same random numbers each time. None: it failed;
    a real error is raised by the first step too."""
    try:
        compared = nullcontext() if job.sharded is None else job.sharded.use.compared(job.ddp.host)
        with dry_run(job) as task, job.autocast, compared:
            job.model.eval()  # `dry_run` restores the modes
            task.training = False
            return loss_function(task)(job.model, batch)
    except Exception as error:
        # If it failed on this rank alone, the others wait for it in a sharded model's forward pass.
        if job.sharded is not None and OUTSIDE_FORWARD not in str(error):
            raise

        return None


def _numbers(loss: LossParts, size: int) -> tuple[float, float]:
    """Total and weight, as numbers of the host."""
    return float(loss.total.detach()), float(size if loss.weight is None else loss.weight)


def is_a_mean(once: tuple[float, float], twice: tuple[float, float]) -> bool:
    """Whether the first of (total, weight) stays the same with twice the weight."""
    total, weight = once
    total_of_both, weight_of_both = twice
    if not math.isfinite(total) or weight <= 0 or abs(total) < 1e-6:
        return False

    has_twice_the_weight = math.isclose(weight_of_both, 2 * weight, rel_tol=1e-3)
    return has_twice_the_weight and math.isclose(total_of_both, total, rel_tol=1e-3)
