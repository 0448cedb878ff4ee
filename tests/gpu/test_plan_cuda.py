"""`drumline plan` beside what steps of the same jobs hold on a GPU:
`torch.cuda.max_memory_allocated`.

Each job runs in processes of its own, alone or as NCCL ranks that share the GPU.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from drumline.config.schema import (
    Config,
    DistConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    WatchConfig,
)
from drumline.training.job.job import build_job, make_manager
from drumline.training.memory.memory_plan import plan_memory, settle_mode
from drumline.training.steps.eager import TrainStep
from drumline.training.tasks.base import Loss, Task
from drumline.training.tasks.built_in import GPT
from tests.ranks import rank_environment, run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.nccl_ranks,
]
VOCABULARY = 50304
# Layers, width, heads, context, micro-batch.
SMALL = (12, 768, 12, 1024, 8)
MEDIUM = (24, 1024, 16, 1024, 4)
LARGE = (36, 1280, 20, 1024, 4)
MARGIN = 0.10


class Gpt(Task):
    """GPT-2 in three sizes, on random tokens."""

    def model(self) -> nn.Module:
        model = self.config.model
        return GPT(
            vocab_size=VOCABULARY,
            context=model.context,
            layers=model.layers,
            heads=model.heads,
            width=model.width,
            activation_checkpointing=model.activation_checkpointing,
        )

    def train_data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(
            VOCABULARY, (256, self.config.model.context + 1), generator=generator
        )
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        scores = model(batch[0])
        return Loss(
            functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), reduction="sum")
        )


def config_of(
    size: tuple[int, ...], *, precision: str = "bf16", mode: str = "ddp", recomputes: bool = False
) -> Config:
    layers, width, heads, context, micro = size
    model = ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        context=context,
        activation_checkpointing=recomputes,
    )
    train = TrainConfig(steps=4, batch_size_per_rank=micro, precision=precision, step="eager")
    return Config(
        model=model,
        train=train,
        optim=OptimConfig(name="adamw", lr=1e-5, clip_norm=1.0),
        dist=DistConfig(mode=mode),  # type: ignore[arg-type]
        watch=WatchConfig(sidecar="off"),
    )


def measured(config: Config, world_size: int) -> int:
    """On a rank: the peak of a step, after two that warm up."""
    if world_size == 1:
        for name in rank_environment(0, 1, 0):
            os.environ.pop(name, None)
    os.environ |= {"NCCL_HOSTID": f"host-{os.environ.get('RANK')}", "NCCL_SOCKET_IFNAME": "lo"}
    ddp = make_manager(config)
    ddp.setup()
    job = build_job(config, Gpt(config), ddp, step_kind="eager")
    try:
        take = TrainStep(job, clip_norm=config.optim.clip_norm)
        for number, step in enumerate(job.loader.steps()):
            if number == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            if number == 4:
                break
            take(step)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    finally:
        job.close()
        ddp.cleanup()


def compare(config: Config, world_size: int, mode: str = "ddp") -> None:
    plan = plan_memory(config, Gpt(config), worlds=(world_size,), ranks_per_node=world_size)
    planned = next(rank for rank in plan.ranks if rank.mode == mode)
    real = max(run_ranks(world_size, measured, config, world_size, timeout_s=300.0))
    size = f"{plan.num_parameters / 1e6:.0f}M {config.train.precision} {mode} on {world_size}"
    print(
        f"\n{size}: planned {planned.total / 1e9:.3f} GB, measured {real / 1e9:.3f} GB, {planned.total / real:.3f}"
    )
    print(f"  {planned}")
    assert planned.total == pytest.approx(real, rel=MARGIN), f"{size}: {planned}, measured {real}"


@pytest.mark.parametrize("size", [SMALL, MEDIUM, LARGE], ids=["small", "medium", "large"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ddp_holds_what_was_planned(size: tuple[int, ...], world_size: int) -> None:
    compare(config_of(size), world_size)


def test_other_settings_hold_what_was_planned() -> None:
    compare(config_of(SMALL, precision="fp32"), 1)
    compare(config_of(MEDIUM, recomputes=True), 1)
    summed = config_of(SMALL)
    compare(replace(summed, train=replace(summed.train, accumulate=4)), 2)


@pytest.mark.parametrize("mode", ["zero1", "fsdp"])
@pytest.mark.parametrize("size", [SMALL, MEDIUM, LARGE], ids=["small", "medium", "large"])
def test_sharded_modes_hold_what_was_planned(size: tuple[int, ...], mode: str) -> None:
    compare(config_of(size, mode=mode), 2, mode)


def settled(config: Config) -> str:
    os.environ |= {"NCCL_HOSTID": f"host-{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
    ddp = make_manager(config)
    ddp.setup()
    try:
        return settle_mode(config, Gpt, ddp).dist.mode
    finally:
        ddp.cleanup()


def test_auto_is_the_same_on_every_rank_and_leaves_the_gpu_free() -> None:
    config = config_of(SMALL, mode="auto")
    assert run_ranks(2, settled, config) == ["ddp", "ddp"]
