"""The memory plan: exact where bytes can be counted by hand, and as many as a real run holds where
they cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from drumline.base.errors import UsageError
from drumline.base.text import GIB, memory_size
from drumline.cli.plan_command import recompute_lines
from drumline.config.schema import Config, DistConfig, OptimConfig, TrainConfig
from drumline.training.manager import RunManager
from drumline.training.memory.gpu_table import GPUS, gpu_memory
from drumline.training.memory.memory_plan import (
    MODES,
    OUTSIDE,
    WORKSPACES,
    MemoryPlan,
    RankMemory,
    choose_mode,
    plan_memory,
    settle_mode,
)
from drumline.training.memory.memory_trace import FakeJob, MemoryMoment, StepMemory
from drumline.training.tasks.base import Loss, Task
from drumline.training.tasks.built_in import GPT

KIB = 1024
ROWS = 32
PARAMETERS = (512 * 256 + 512 + 128 * 512 + 128) * 4
VOCABULARY = 512
CONTEXT = 64


def settings(name: str = "adamw", **train: Any) -> Config:
    optim = OptimConfig(name=name, momentum=0.9 if name == "sgd" else 0.0, nesterov=False)
    return Config(optim=optim, train=TrainConfig(**{"steps": 1, "batch_size": ROWS, **train}))


class Perceptron(Task):
    """Every size is a multiple of what torch's allocator rounds to."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.zeros(256, 256))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Loss:
        return Loss(model(batch[0]).square().sum())


class Text(Task):
    """A small GPT."""

    def model(self) -> nn.Module:
        recomputes = self.config.model.activation_checkpointing
        return GPT(
            vocab_size=VOCABULARY,
            context=CONTEXT,
            layers=3,
            heads=2,
            width=64,
            activation_checkpointing=recomputes,
        )

    def train_data(self) -> TensorDataset:
        tokens = torch.arange(64 * CONTEXT).view(64, CONTEXT) % VOCABULARY
        return TensorDataset(tokens, tokens)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        scores = model(batch[0])
        return Loss(
            functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), reduction="sum")
        )


def plan(
    config: Config, task: type[Task] = Perceptron, worlds: tuple[int, ...] = (1,), per_node: int = 8
) -> Any:
    memory = plan_memory(config, task(config), worlds=worlds, ranks_per_node=per_node)
    return {(rank.mode, rank.world_size): rank for rank in memory.ranks}


@pytest.mark.parametrize(("name", "states"), [("sgd", 1), ("adamw", 2), ("torch.optim.Adagrad", 1)])
def test_parameters_gradients_and_optimizer_state_are_exact(name: str, states: int) -> None:
    plans = plan(settings(name), worlds=(1, 2))
    for key in (("ddp", 1), ("ddp", 2)):
        assert plans[key].parameters == PARAMETERS
        num_scalars = 0 if name == "sgd" else 4  # counts of steps
        assert plans[key].optimizer == states * PARAMETERS + num_scalars * 512
    assert plans["ddp", 2].gradients == PARAMETERS  # DDP's buckets
    assert plans["ddp", 2].communication == 0


def test_shards_are_as_large_as_the_first_rank_s() -> None:
    plans = plan(settings("sgd"), worlds=(3,))
    rows = -(-512 // 3), -(-128 // 3)
    # biases are rounded up
    largest = rows[0] * 256 * 4 + 1024 + rows[1] * 512 * 4 + 512
    for mode in ("zero1", "fsdp"):
        assert plans[mode, 3].parameters == plans[mode, 3].optimizer == largest


def test_what_a_forward_pass_holds_is_what_can_be_counted_by_hand() -> None:
    config = settings("sgd")
    step = FakeJob(config, Perceptron(config)).trace([torch.zeros(ROWS, 256)])
    inputs = ROWS * 256 * 4
    hidden = ROWS * 512 * 4
    outputs = ROWS * 128 * 4
    scalar = 512
    # Not the first layer's output and not the squares; the loss, and the 1 that the backward pass
    # begins with.
    assert kept(step) == inputs + hidden + outputs + 2 * scalar
    assert step.batch_bytes == inputs
    # All but the first layer's weight, whose gradient is the last operation.
    assert max(moment.gradients for moment in step.moments[:-1]) == PARAMETERS - 512 * 256 * 4
    assert step.moments[-1] == MemoryMoment(
        "optimizer", in_blocks=False, live=0, gradients=PARAMETERS
    )


class Dropped(Perceptron):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 512), nn.Dropout(0.5), nn.Linear(512, 128))


def test_dropout_keeps_a_byte_for_each_element() -> None:
    config = settings("sgd")
    with_relu = FakeJob(config, Perceptron(config)).trace([torch.zeros(ROWS, 256)])
    assert (
        kept(FakeJob(config, Dropped(config)).trace([torch.zeros(ROWS, 256)]))
        == kept(with_relu) + ROWS * 512
    )


def kept(step: StepMemory) -> int:
    """For the backward pass, when it begins."""
    return next(moment.live for moment in step.moments if moment.phase == "backward")


def real_bytes(config: Config, task: Task, batch: Any) -> int:
    """What autograd keeps of a real forward pass on the CPU, besides parameters."""
    model = task.model()
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stored: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            stored[storage.data_ptr()] = storage.nbytes()
            held.append(storage)  # so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        task.loss(model, batch)
    return sum(stored.values())


def test_activations_of_a_gpt_are_those_of_a_real_pass() -> None:
    config = settings()
    task = Text(config)
    batch = [tensor[:8] for tensor in task.train_data().tensors]
    assert kept(FakeJob(config, task).trace(batch)) == pytest.approx(
        real_bytes(config, task, batch), rel=0.01
    )


def test_precision_and_recomputation_change_the_activations() -> None:
    config = settings()
    matrices = 3 * 12 * 64 * 64 + VOCABULARY * 64

    def peak(config: Config) -> int:
        return max(moment.live for moment in FakeJob(config, Text(config)).trace(batch).moments)

    def ends(config: Config) -> int:
        return kept(FakeJob(config, Text(config)).trace(batch))

    batch = [tensor[:8] for tensor in Text(config).train_data().tensors]
    half = replace(config, train=replace(config.train, precision="bf16"))
    again = replace(config, model=replace(config.model, activation_checkpointing=True))
    full = ends(config)
    # Half the bytes of most activations, and a copy of all matrices.
    assert 2 * matrices < ends(half) < 0.8 * full + 2 * matrices
    assert ends(again) < 0.5 * full
    assert peak(again) < peak(config)


class Layers(nn.Module):
    """More Linears in lists than blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = inputs + self.mlp(self.norm(inputs))
        return output


class Stacked(Perceptron):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(256, 256), *(Layers() for _ in range(6)))


def recompute_plan(wrap: tuple[str, ...] | None = None) -> MemoryPlan:
    config = settings(batch_size=256)
    model = replace(config.model, activation_checkpointing=True)
    config = replace(config, model=model, dist=DistConfig(wrap=wrap))
    return plan_memory(config, Stacked(config), worlds=(1, 2), ranks_per_node=8)


def test_what_recomputation_saves_is_shown() -> None:
    plans = recompute_plan()
    saved = plans.recompute
    assert saved is not None
    assert saved.blocks == "6 x Layers"
    assert saved.total == plans.ranks[0].total
    assert (
        saved.total_without == plan(settings(batch_size=256), Stacked)["ddp", 1].total > saved.total
    )
    assert saved.saving > 0.5
    (line,) = recompute_lines(plans)
    sizes = f"{memory_size(saved.total)} on 1 rank, {memory_size(saved.total_without)} without"
    assert line == f"recompute: 6 x Layers: {sizes}"


def test_without_recomputation_only_one_model_is_built_and_no_data_is_read() -> None:
    models: list[bool | str] = []
    datasets: list[bool | str] = []

    class Recorded(Stacked):
        def model(self) -> nn.Module:
            models.append(self.config.model.activation_checkpointing)
            return super().model()

        def train_data(self) -> TensorDataset:
            datasets.append(self.config.model.activation_checkpointing)
            return super().train_data()

    config = settings(batch_size=256)
    model = replace(config.model, activation_checkpointing=True)
    config = replace(config, model=model, dist=DistConfig(shard_dtype="bf16"))
    assert (
        plan_memory(config, Recorded(config), worlds=(2,), ranks_per_node=8).recompute is not None
    )
    assert models.count(True) == 2, "in fp32 for ddp, gathered in bf16 for the others"
    assert models.count(False) == 1
    assert datasets == [True]


def test_recomputation_that_saves_nothing_is_warned_about() -> None:
    line, warning = recompute_lines(recompute_plan(("Linear",)))
    assert line.startswith("recompute: 13 x Linear: ")
    assert warning == (
        "warning: --model.activation_checkpointing saves 0% of the activations; name the classes of larger blocks with "
        "--dist.wrap, or leave it off"
    )


def test_accumulation_and_buckets_hold_gradients_twice() -> None:
    plain = plan(settings(), worlds=(1, 2))
    summed = plan(settings(accumulate=2), worlds=(1, 2))
    assert summed["ddp", 1].gradients == PARAMETERS
    assert summed["ddp", 1].communication == 0
    assert (summed["ddp", 2].gradients, summed["ddp", 2].communication) == (PARAMETERS, PARAMETERS)
    assert summed["ddp", 2].micro_batch_size == 8
    compressed = plan(replace(settings(), dist=DistConfig(comm="powersgd")), worlds=(2,))
    assert compressed["ddp", 2].communication - plain["ddp", 2].communication == PARAMETERS


def test_rounds_and_the_elastic_mode_are_refused() -> None:
    for config in (
        replace(settings(), dist=DistConfig(sync="local:4")),
        replace(settings(), train=TrainConfig(exact="elastic")),
    ):
        with pytest.raises(UsageError, match="are not planned"):
            plan(config, worlds=(2,))


def test_each_mode_shards_more_than_the_one_before() -> None:
    plans = plan(settings(micro_batch_size=1), Text, worlds=(4,), per_node=2)
    assert [mode for mode, _ in plans] == list(MODES)
    totals = [plans[mode, 4].total for mode in MODES]
    assert totals == sorted(totals, reverse=True)
    # A block and the embedding are whole at times, but not the other blocks.
    assert plans["fsdp", 4].communication < plans["zero1", 4].communication


def test_a_batch_that_cannot_be_split_is_reported_for_that_number_of_ranks() -> None:
    config = settings(batch_size=2)
    memory = plan_memory(config, Perceptron(config), worlds=(2, 4), ranks_per_node=8)
    assert {rank.world_size for rank in memory.ranks} == {2}
    assert memory.impossible == {
        4: "a global batch of 2 cannot be split over 4 ranks: each needs a sample"
    }


class Reads(Perceptron):
    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Loss:
        scores = model(batch[0])
        return Loss(scores[scores > 0].sum())


def test_a_loss_that_needs_values_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"Reads cannot be planned: aten.nonzero.default needs the values of a tensor",
    ):
        plan(settings(), Reads)


class OwnOptimizer(Perceptron):
    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.NAdam(model.parameters(), lr=0.1)


def test_an_optimizer_with_temporary_lists_counts_them() -> None:
    config = settings()
    memory = plan(config, OwnOptimizer)["ddp", 1]
    assert memory.optimizer >= 2 * PARAMETERS
    assert memory.activations - WORKSPACES >= PARAMETERS


def rank(mode: str, gib: float, world_size: int = 2) -> RankMemory:
    sizes = {
        "parameters": int(gib * GIB),
        "gradients": 0,
        "optimizer": 0,
        "activations": 0,
        "communication": 0,
    }
    return RankMemory(mode=mode, world_size=world_size, micro_batch_size=1, **sizes)


def test_the_cheapest_mode_that_fits_is_chosen() -> None:
    memory = MemoryPlan(
        num_parameters=1, ranks=[rank("fsdp", 5), rank("zero1", 9), rank("ddp", 20)]
    )

    def choice(gib: float) -> str | None:
        chosen = memory.cheapest(2, int(gib * GIB))
        return None if chosen is None else chosen.mode

    assert [choice(gib) for gib in (40, 22, 12, 9, 5)] == ["ddp", "zero1", "zero1", "fsdp", None]
    assert rank("ddp", 19).fits(20 * GIB + OUTSIDE * 20 // 19 + 1)
    assert not rank("ddp", 19).fits(20 * GIB + OUTSIDE)
    assert memory.cheapest(4, 1000 * GIB) is None


def test_gpus_are_named_or_given_by_their_memory() -> None:
    assert gpu_memory(["H100", "24"]) == {
        "h100": int(GPUS["h100"].memory_gib * GIB),
        "24 GiB": 24 * GIB,
    }
    with pytest.raises(UsageError, match=r"--gpu h10: there is no such GPU; did you mean 'h100'\?"):
        gpu_memory(["h10"])


@pytest.mark.soak
def test_sharded_settings_change_what_is_gathered_and_held() -> None:
    config = settings(micro_batch_size=1, precision="bf16")
    plain = plan(config, Text, worlds=(2,))["fsdp", 2]
    half = plan(replace(config, dist=DistConfig(shard_dtype="bf16")), Text, worlds=(2,))["fsdp", 2]
    assert (half.parameters, half.optimizer) == (plain.parameters, plain.optimizer)
    assert half.communication == pytest.approx(plain.communication / 2, rel=0.01)
    away = plan(replace(config, dist=DistConfig(offload_optimizer=True)), Text, worlds=(2,))[
        "fsdp", 2
    ]
    assert away.parameters == 0
    assert away.optimizer < plain.optimizer // 10  # counts of steps
    least = plan(replace(config, dist=DistConfig(wrap=("CausalAttention",))), Text, worlds=(2,))[
        "fsdp", 2
    ]
    matrices = 4 * 64 * 64 * 4
    # The rest of the model is always gathered; at this peak no attention is.
    assert plain.communication - least.communication == 3 * matrices


def test_auto_takes_the_cheapest_mode_that_fits_or_the_one_that_needs_least() -> None:
    config = settings(micro_batch_size=1, batch_size=64)
    plans = plan(config, Text, worlds=(4,))

    def choice(total: int) -> tuple[str, str]:
        return choose_mode(config, Text(config), 4, 4, int((total + OUTSIDE) / 0.95) + 1)

    assert choice(plans["ddp", 4].total)[0] == "ddp"
    assert choice(plans["ddp", 4].total - 1)[0] == "zero1"
    mode, reason = choice(plans["fsdp", 4].total)
    assert mode == "fsdp"
    assert reason.startswith("the cheapest that fits on 4 ranks; it needs ")
    mode, reason = choice(1)
    assert mode == "fsdp"
    assert reason.startswith("which needs least, but may not fit on 4 ranks; ")
    few = settings(batch_size=2)
    with pytest.raises(UsageError, match="a global batch of 2 cannot be split over 4 ranks"):
        choose_mode(few, Text(few), 4, 4, GIB)


def test_auto_is_ddp_on_one_process() -> None:
    notes: list[str] = []
    config = replace(settings(), dist=DistConfig(mode="auto", device="cpu"))
    ddp = RunManager(device="cpu")
    ddp.setup()
    try:
        assert settle_mode(config, Perceptron, ddp, notes.append).dist.mode == "ddp"
    finally:
        ddp.cleanup()
    assert notes == ["dist.mode auto is ddp: one process shards nothing"]
