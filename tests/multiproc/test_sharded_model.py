"""A sharded model by itself: how gradients add up, what a resumed rank holds, and which groups it
leaves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drumline.parallel.sharded_model import ShardedModel, ShardingPlan, shard_model
from drumline.parallel.shards import like_shard, own_part
from drumline.rank import group
from tests.multiproc.test_group import CPU, join
from tests.ranks import run_ranks


def accumulated(sharded: ShardedModel) -> list[float]:
    """The gradient of four micro-batches, 256 + 1 + 1 + 1: in bf16 that is 256."""
    for number, size in enumerate((256.0, 1.0, 1.0, 1.0)):
        loss = sharded.model(torch.full((1, 2), size, dtype=torch.bfloat16)).sum()
        if number == 3:
            loss.backward()
        else:
            with sharded.no_sync():
                loss.backward()
    (weight,) = sharded.model.parameters()
    assert weight.grad is not None
    gradient: list[float] = own_part(weight.grad).flatten().tolist()
    return gradient


def shard(mode: str) -> ShardedModel:
    plan = ShardingPlan(mode=mode, num_shards=2, dtype=torch.bfloat16)
    return shard_model(nn.Linear(2, 2, bias=False), plan, CPU)


def on_a_rank() -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Shard

    join()
    models = {mode: shard(mode) for mode in ("zero1", "fsdp", "hsdp")}
    gradients: dict[str, Any] = {mode: accumulated(model) for mode, model in models.items()}
    elsewhere = torch.empty(3, 2, device="meta")  # another device than the part's
    parameter = DTensor.from_local(elsewhere, models["fsdp"].mesh, [Shard(0)], run_check=False)
    part = torch.ones(3, 2, dtype=torch.float64)
    loaded = like_shard(parameter, part)
    gradients["is shared"] = own_part(loaded).data_ptr() == part.data_ptr()
    gradients["loaded"] = (loaded.shape, loaded.stride(), loaded.dtype, loaded.device)
    groups = models["hsdp"].mesh.get_all_groups()
    gradients["groups"] = sum(group is not dist.group.WORLD for group in groups)
    group.leave_group(broken=True)
    gradients["left"] = all(members in group._left_groups for members in groups)
    return gradients


def test_micro_batches_shards_and_groups_of_a_sharded_model() -> None:
    for results in run_ranks(2, on_a_rank):
        assert results["zero1"] == results["fsdp"] == results["hsdp"] == [259.0, 259.0]
        assert results["is shared"], "what is mapped from a file is not moved before it is copied"
        assert results["loaded"] == ((6, 2), (2, 1), torch.float64, CPU)
        assert results["groups"] >= 1
        assert results["left"], "a broken group is aborted with the groups of its mesh"
