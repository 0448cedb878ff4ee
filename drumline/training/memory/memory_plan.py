"""The memory of a rank by `dist.mode` and world size, from one traced step, and the cheapest mode
that fits on a GPU.

The trace (memory_trace.py) is that of a rank that holds everything. What DDP and `fully_shard` add
to it, and what they split, follows from how they work: docs/plan.md has the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from drumline.base.errors import UsageError
from drumline.base.text import GIB, MIB, memory_size, plural
from drumline.config.rules import sync_interval
from drumline.config.schema import Config, DistConfig
from drumline.data.dataset import is_stream
from drumline.data.delivery import NUM_AHEAD, LoadingOptions
from drumline.data.loader import IndexedLoader
from drumline.data.sharding import Cursor, Sharding, plan_step
from drumline.data.stream_loader import StreamLoader
from drumline.rank.collectives import broadcast_json, gather_json
from drumline.rank.determinism import keeping_rng
from drumline.training.job.job import choose_batch
from drumline.training.manager import RunManager
from drumline.training.memory.memory_trace import (
    FakeJob,
    MemoryMoment,
    StepMemory,
    TracedParameter,
    rounded,
)
from drumline.training.tasks.base import Task

MemoryAt = Callable[[MemoryMoment], dict[str, int]]
MODES = ("ddp", "zero1", "hsdp", "fsdp")
"""The cheapest first: each sends more, or over slower links, than the one before."""

# cuBLAS has one for the forward pass and one for the thread of the backward pass, of this size from
# Hopper on.
WORKSPACES = 2 * 32 * MIB
MARGIN = 0.05
"""The part of a GPU's memory that stays free, for fragmentation."""

OUTSIDE = GIB
"""What a process takes on a GPU besides torch's tensors: CUDA itself, its kernels, NCCL's
buffers."""

# Gathered blocks and reduced ones that fully_shard holds at a time, by phase. Forward: the gathered
# block and its message, or two messages. Backward: the gathered block, the message of the next one,
# that of the gradients before it.
GATHERED = {"forward": 2, "backward": 3}
# The same where parameters stay whole: only messages.
MESSAGES = {"forward": 2, "backward": 1}
LEAST_SAVING = 0.05
"""Of the activations; with less, the time that the second forward pass takes is lost."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The bytes that a rank holds at the peak of a step: of all ranks, the one with the most."""

    mode: str
    world_size: int
    micro_batch_size: int
    """The samples of the largest one."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """With the micro-batches on the device, temporary tensors and workspaces."""

    communication: int
    """Buckets, gathered parameters and messages."""

    @property
    def total(self) -> int:
        """All of it, without what CUDA itself takes."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.communication

    def fits(self, memory: int) -> bool:
        """Whether a GPU with so many bytes has room for it."""
        return self.total <= memory * (1 - MARGIN) - OUTSIDE


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """What activation checkpointing saves, on the smallest number of ranks."""

    blocks: str
    """`12 x Block`."""

    world_size: int
    total: int
    """The bytes of a rank at the peak of a step, with it."""

    total_without: int
    saving: float
    """The part of the activations that is saved."""

    @property
    def saves_little(self) -> bool:
        """Whether the time that it takes is lost."""
        return self.saving < LEAST_SAVING


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What `drumline plan` found out."""

    num_parameters: int
    ranks: Sequence[RankMemory]
    impossible: Mapping[int, str] = field(default_factory=dict)
    """World sizes that the batch cannot be split over, with the reason."""

    recompute: RecomputePlan | None = None
    """None: without activation checkpointing."""

    def cheapest(self, world_size: int, memory: int) -> RankMemory | None:
        """The first of `MODES` that fits in so many bytes on this number of ranks."""
        fitting = {
            rank_memory.mode: rank_memory
            for rank_memory in self.ranks
            if rank_memory.world_size == world_size and rank_memory.fits(memory)
        }

        return next((fitting[mode] for mode in MODES if mode in fitting), None)


def plan_memory(
    config: Config,
    task: Task,
    *,
    worlds: Iterable[int],
    ranks_per_node: int,
) -> MemoryPlan:
    """The memory of a rank in every mode that makes a difference on these numbers of ranks."""
    if config.train.exact == "elastic" or sync_interval(config.dist.sync):
        raise UsageError(
            "--train.exact elastic and --dist.sync are not planned",
            next_step="measure it on a GPU: drumline find-batch TASK",
        )

    dist = config.dist
    data = task.train_data()
    ranks: list[RankMemory] = []
    impossible: dict[int, str] = {}
    batches: dict[int, Any] = {}
    recompute: RecomputePlan | None = None
    sharded_type = torch.bfloat16 if dist.shard_dtype == "bf16" else None

    @cache
    def job(gathered: torch.dtype | None) -> FakeJob:
        return FakeJob(config, task, gathered=gathered)

    @cache
    def traced(size: int, gathered: torch.dtype | None) -> StepMemory:
        return job(gathered).trace(batches[size])

    for world_size in worlds:
        try:
            micro = _first_micro_batch(config, task, data, world_size)
        except UsageError as error:
            impossible[world_size] = error.what
            continue

        batches[micro.size] = micro.data
        for mode, num_shards in modes_for(world_size, dist.shard_ranks or ranks_per_node):
            setup = _Setup(mode, world_size, num_shards, dist, micro)
            step = traced(micro.size, None if mode == "ddp" else sharded_type)
            ranks.append(_memory_at_peak(step, setup))

        if recompute is None and config.model.activation_checkpointing is not False:
            setup = _Setup("ddp", world_size, 1, dist, micro)
            blocks = job(None).recomputed()
            recompute = _compare_without(config, task, setup, ranks[0], blocks=blocks)

    return MemoryPlan(
        num_parameters=job(None).num_parameters,
        ranks=ranks,
        impossible=impossible,
        recompute=recompute,
    )


class _MicroBatch(NamedTuple):
    """The largest micro-batch of a step: all others need less memory."""

    data: Any
    size: int
    accumulates: bool
    """Whether a step has several."""


class _Setup(NamedTuple):
    """How a rank takes its steps."""

    mode: str
    world_size: int
    num_shards: int
    """Ranks that hold one model together."""

    dist: DistConfig
    micro: _MicroBatch


def _memory_at_peak(step: StepMemory, setup: _Setup) -> RankMemory:
    """The moment at which the rank holds most."""
    memory_at = _in_replicas(step, setup) if setup.mode == "ddp" else _in_shards(step, setup)
    peak = max(map(memory_at, step.moments), key=lambda parts: sum(parts.values()))
    peak["activations"] += NUM_AHEAD * step.batch_bytes + WORKSPACES

    return RankMemory(
        mode=setup.mode,
        world_size=setup.world_size,
        micro_batch_size=setup.micro.size,
        **peak,
    )


def _compare_without(
    config: Config, task: Task, setup: _Setup, memory: RankMemory, *, blocks: str
) -> RecomputePlan:
    """The same rank without activation checkpointing. The task is made again, since its model may
    depend on the setting."""
    plain = replace(config, model=replace(config.model, activation_checkpointing=False))
    step = FakeJob(plain, type(task)(plain)).trace(setup.micro.data)
    without = _memory_at_peak(step, setup)
    activations = memory.activations - WORKSPACES
    activations_without = without.activations - WORKSPACES

    return RecomputePlan(
        blocks=blocks,
        world_size=memory.world_size,
        total=memory.total,
        total_without=without.total,
        saving=1 - activations / activations_without if activations_without else 0.0,
    )


def modes_for(world_size: int, ranks_per_node: int) -> Iterator[tuple[str, int]]:
    """The modes that differ from each other on this number of ranks, and over how many ranks each
    shards the model."""
    yield "ddp", 1
    if world_size > 1:
        yield "zero1", world_size
        if 1 < ranks_per_node < world_size and world_size % ranks_per_node == 0:
            yield "hsdp", ranks_per_node
        yield "fsdp", world_size


def _first_micro_batch(config: Config, task: Task, data: Any, world_size: int) -> _MicroBatch:
    """The largest of a step on this number of ranks, on the CPU."""
    batch = choose_batch(config.train, world_size=world_size)
    sharding = Sharding(
        batch_size=batch.size,
        rank=0,
        world_size=world_size,
        accumulate=batch.accumulate,
        micro_batch_size=batch.micro_batch_size,
    )

    make: Any = StreamLoader if is_stream(data) else IndexedLoader
    options = LoadingOptions(collate=task.collate)
    loader = make(
        data,
        sharding=sharding,
        device=torch.device("cpu"),
        seed=config.train.seed,
        options=options,
    )

    try:
        length = min(batch.size, loader.num_samples or batch.size)
        spans = plan_step(Cursor(), length=length, sharding=sharding).spans
        return _MicroBatch(loader.preview(), spans[0].size, accumulates=len(spans) > 1)
    finally:
        loader.close()


def _in_replicas(step: StepMemory, setup: _Setup) -> MemoryAt:
    """One process, or DDP. DDP's buckets are there all the time. Gradients are views of them, but
    not while they add up before the ranks synchronize."""
    trained = sum(parameter.num_bytes for parameter in step.parameters if parameter.is_trained)
    dist = setup.dist
    accumulates = setup.micro.accumulates
    has_buckets = setup.world_size > 1
    communication = trained if has_buckets and accumulates else 0

    if has_buckets and dist.comm == "powersgd":
        communication += trained  # what the last step left out
    elif has_buckets and dist.comm != "none":
        # two buckets in half the bytes, on their way
        communication += int(dist.bucket_cap_mb * MIB)

    weights, _, states = _shard_bytes(step.parameters, num_shards=1, on_host=False)
    parameters = weights + step.buffer_bytes
    optimizer = states + step.scalar_bytes

    def at(moment: MemoryMoment) -> dict[str, int]:
        return {
            "parameters": parameters,
            "gradients": trained if accumulates or has_buckets else moment.gradients,
            "optimizer": optimizer,
            "activations": moment.live,
            "communication": communication,
        }

    return at


def _in_shards(step: StepMemory, setup: _Setup) -> MemoryAt:
    """`fully_shard`. What is in no block is gathered from the beginning of the forward pass to the
    end of the backward pass; a block only while it is computed, in zero1 as long as the rest.
    Gradients are whole until all of their block are there; zero1 adds them up before that, unless
    they are reduced in a type of their own."""
    sizes: Counter[int | None] = Counter()
    trained = 0.0
    for parameter in step.parameters:
        sizes[parameter.in_block] += parameter.num_bytes
        trained += parameter.num_bytes * step.gathered if parameter.is_trained else 0

    rest = sizes.pop(None, 0) * step.gathered
    block = max(sizes.values(), default=0) * step.gathered

    dist = setup.dist
    accumulates = setup.micro.accumulates
    is_zero1 = setup.mode == "zero1"

    # each micro-batch by itself, and adds up shards
    reduces_each = dist.shard_dtype != "fp32"
    gathered = rest + sizes.total() * step.gathered if is_zero1 else rest
    copies = MESSAGES if is_zero1 else GATHERED

    weights, gradients, optimizer = _shard_bytes(
        step.parameters, setup.num_shards, on_host=dist.offload_optimizer
    )

    def at(moment: MemoryMoment) -> dict[str, int]:
        whole = 0.0
        reduced = 1.0
        communication = 0.0

        if moment.phase != "optimizer":
            whole = min(moment.gradients, rest + block)
            if accumulates and is_zero1 and not reduces_each:
                whole = trained
            if not accumulates:
                reduced = moment.gradients / max(1.0, trained)

            communication = gathered + (copies[moment.phase] * block if moment.in_blocks else 0)

        return {
            "parameters": weights + step.buffer_bytes,
            "gradients": int(gradients * reduced + whole),
            "optimizer": optimizer + step.scalar_bytes,
            "activations": moment.live,
            "communication": int(communication),
        }

    return at


def _shard_bytes(
    parameters: Iterable[TracedParameter],
    num_shards: int,
    *,
    on_host: bool,
) -> tuple[int, int, int]:
    """The bytes of the first rank's shards on its GPU, which are the largest: of the parameters, the
    gradients, and the optimizer. `on_host`: they are in host memory."""
    weights = 0
    gradients = 0
    optimizer = 0

    for parameter in () if on_host else parameters:
        shard_bytes = rounded(parameter.part(parameter.num_bytes, num_shards))
        weights += shard_bytes
        gradients += shard_bytes if parameter.is_trained else 0
        states = (parameter.part(size, num_shards) for size in parameter.state_bytes)
        optimizer += sum(map(rounded, states))

    return weights, gradients, optimizer


def settle_mode(
    config: Config,
    task_class: type[Task],
    ddp: RunManager,
    note: Callable[[str], None] = lambda message: None,
) -> Config:
    """Collective: the same settings with a mode in place of `auto`. Rank 0 makes the plan; `note`
    gets its reason."""
    if config.dist.mode != "auto":
        return config

    mode: Any = "ddp"
    if ddp.world_size == 1:
        reason = "one process shards nothing"
    elif ddp.device.type != "cuda":
        reason = "memory is planned for GPUs only"
    else:
        memory = _smallest_memory(ddp)
        chosen = _choose(config, task_class, ddp, memory) if ddp.is_main_process() else None

        mode, reason = broadcast_json(chosen)
        if mode is None:  # on every rank, so that none waits for the others
            raise UsageError(
                f"--dist.mode auto: {reason}", next_step="give ddp, zero1, fsdp or hsdp"
            )

    if ddp.is_main_process():
        note(f"dist.mode auto is {mode}: {reason}")

    return replace(config, dist=replace(config.dist, mode=mode))


def _smallest_memory(ddp: RunManager) -> int:
    """Collective: what the rank with the least has on its GPU, which ranks of one host may
    share."""
    memory = torch.cuda.get_device_properties(ddp.device).total_memory
    everyone = gather_json([ddp.host, ddp.device.index, memory])
    sharing = Counter((host, index) for host, index, _ in everyone)
    return min(int(total) // sharing[host, index] for host, index, total in everyone)


def _choose(
    config: Config,
    task_class: type[Task],
    ddp: RunManager,
    memory: int,
) -> tuple[str | None, str]:
    """The mode and its reason; None and the reason why there is no plan."""
    try:
        with keeping_rng(ddp.device):
            return choose_mode(
                config, task_class(config), ddp.world_size, ddp.local_world_size, memory
            )
    except UsageError as error:
        return None, error.what
    # The task's own code, on tensors without data; the other ranks wait for the answer.
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def choose_mode(
    config: Config,
    task: Task,
    world_size: int,
    ranks_per_node: int,
    memory: int,
) -> tuple[str, str]:
    """The cheapest mode that fits in so many bytes, otherwise the one that needs least; and the
    reason."""
    plan = plan_memory(config, task, worlds=[world_size], ranks_per_node=ranks_per_node)
    if world_size in plan.impossible:
        raise UsageError(plan.impossible[world_size])

    fit = "the cheapest that fits"
    chosen = plan.cheapest(world_size, memory)
    if chosen is None:
        fit = "which needs least, but may not fit"
        chosen = min(plan.ranks, key=lambda rank_memory: rank_memory.total)

    ranks = plural(world_size, "rank")
    need = f"{memory_size(chosen.total)} of {memory_size(memory)}"
    return chosen.mode, f"{fit} on {ranks}; it needs {need} at its peak (drumline plan)"
