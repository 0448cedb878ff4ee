"""`--dist.mode zero1|fsdp|hsdp`: a model whose parameters, gradients and optimizer state are
sharded over ranks by torch's `fully_shard`. Between steps every parameter is a DTensor of which a
rank holds some rows.

- `fsdp`: a block's parameters are gathered for its forward pass, freed, and gathered again for its
  backward pass.
- `hsdp`: the same inside groups of ranks; the groups are replicas of each other.
- `zero1`: parameters are gathered once a step and stay whole until its backward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.parallel.block_use import BlockUse, can_find_unused
from drumline.parallel.blocks import describe_blocks, find_blocks, is_sharded_block
from drumline.parallel.shards import own_parts
from drumline.parallel.wrap import Applied
from drumline.rank.torch_internals import norm_of_each, scale_each, set_group_timeout


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How a model is sharded."""

    mode: Literal["zero1", "fsdp", "hsdp"]
    num_shards: int
    """Ranks that hold one copy of the model together."""

    wrap: tuple[str, ...] = ()
    """As for `find_blocks`."""

    dtype: torch.dtype | None = None
    """In which parameters are gathered and gradients reduced; None: their own."""

    offloads: bool = False
    """Shards and optimizer state are in the host's memory."""

    finds_unused: bool = False
    """Whether a batch may leave out parameters."""

    timeout_s: float = 600.0
    """Of the collectives of its groups."""


class ShardedModel(Applied):
    """A sharded model; called as `Applied` is."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Any,
        plan: ShardingPlan,
        device: torch.device,
    ) -> None:
        super().__init__(model)
        self.plan = plan
        self.mesh = mesh
        self.device = device

        sharded = {
            name: module for name, module in model.named_modules() if is_sharded_block(module)
        }
        self.use = BlockUse(sharded, mode=plan.mode, finds_unused=plan.finds_unused)

        # A forward pass without a backward pass would leave parameters gathered, and the optimizer
        # changes the shards.
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self.reshard())

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function, and raise if it has left out a block."""
        self.use.begin_pass()
        result = super().forward(function, *arguments)
        self.use.end_forward()
        return result

    def describe_blocks(self) -> str:
        """What is gathered at a time, for people."""
        _, *blocks = filter(is_sharded_block, self.model.modules())
        if not blocks:
            return "the whole model at once, which has no blocks (--dist.wrap)"
        return describe_blocks(blocks)

    @property
    def replica_group(self) -> Any:
        """The ranks that hold the same shards; None: there are no others."""
        return self.mesh.get_group("replicate") if self.plan.mode == "hsdp" else None

    def replica_ranks(self) -> list[list[int]]:
        """All ranks, by the shard that they hold: [[0, 4], [1, 5], [2, 6], [3, 7]] of two replicas
        on 4 ranks each."""
        columns: list[list[int]] = self.mesh.mesh.reshape(-1, self.plan.num_shards).T.tolist()
        return columns

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it a backward pass is not the last one of its step. zero1 adds up gradients on each
        rank; the others, which have no memory for whole gradients, in shards. Gradients that are
        reduced in a type of their own are reduced in every pass, and added up in the type of the
        shards: bf16 would lose small ones."""
        self._set_last_pass(False)
        try:
            yield
        finally:
            self._set_last_pass(True)

    def _set_last_pass(self, is_last: bool) -> None:
        """Whether the next backward pass is the last one of its step."""
        root: Any = self.model
        reduces_each = self.plan.dtype is not None
        if self.plan.mode == "zero1":
            root.set_reshard_after_backward(is_last)
            root.set_requires_gradient_sync(is_last or reduces_each)

        if self.plan.mode == "hsdp":
            root.set_requires_all_reduce(is_last or reduces_each)

    def reshard(self) -> None:
        """Free what is gathered of the parameters."""
        for module in filter(is_sharded_block, self.model.modules()):
            module.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def clip_grad_norm_(self, parameters: Iterable[Tensor], most: float) -> Tensor:
        """Collective: scale the gradients so that their norm over all shards is at most this;
        returns the norm."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        parts = own_parts(gradients)

        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if parts:
            square += torch.stack(norm_of_each(parts)).double().square().sum()

        dist.all_reduce(square, group=self.mesh.get_group("shard"))
        norm = square.sqrt()

        if parts:
            scale = (most / (norm + 1e-6)).clamp(max=1.0)
            scale_each(parts, scale.to(parts[0]))

        return norm


def shard_model(
    model: nn.Module,
    plan: ShardingPlan,
    device: torch.device,
    *,
    prepare: Callable[[Iterable[tuple[str, nn.Module]]], None] | None = None,
) -> ShardedModel:
    """Collective: shard a model that is on the CPU, block by block. `prepare` is called with the
    modules of each block by name, before it is sharded, for a model whose parameters have no memory
    yet."""
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    for parameter in model.parameters():
        if not parameter.is_contiguous():  # `fully_shard` takes no others
            parameter.data = parameter.data.contiguous()

    mesh = _make_mesh(plan, device)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(plan.dtype, plan.dtype, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy() if plan.offloads else OffloadPolicy(),
    }

    blocks = find_blocks(model, plan.wrap)
    is_zero1 = plan.mode == "zero1"
    for name, block in blocks.items():
        if prepare is not None:
            prepare(
                (f"{name}.{inner}".rstrip("."), module) for inner, module in block.named_modules()
            )
        fully_shard(block, reshard_after_forward=not is_zero1, **options)

    if prepare is not None:
        prepare(model.named_modules())

    # The backward pass begins with what no block holds.
    fully_shard(model, reshard_after_forward=not blocks and not is_zero1, **options)
    if plan.finds_unused and not can_find_unused():
        raise UsageError(
            f"torch {torch.__version__} cannot find unused parameters of a sharded model",
            next_step="use torch 2.13 or newer, or --dist.mode ddp",
        )

    if plan.finds_unused:
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]

    return ShardedModel(model, mesh, plan, device)


def _make_mesh(plan: ShardingPlan, device: torch.device) -> Any:
    """Collective: the groups of ranks that share, or replicate, shards."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = {"shard": plan.num_shards}
    if plan.mode == "hsdp":
        shape = {"replicate": dist.get_world_size() // plan.num_shards, **shape}

    mesh = init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    for group in mesh.get_all_groups():
        set_group_timeout(plan.timeout_s, group)

    return mesh
