"""Activation checkpointing changes memory and time, and not one bit of anything else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.config.schema import Config
from drumline.parallel.recompute import recompute_blocks, recomputed_blocks
from drumline.training.job.job import set_up_model
from drumline.training.manager import RunManager
from drumline.training.tasks.built_in import GPT, MiniResNet
from tests.ranks import run_ranks

IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(5))
TOKENS = torch.randint(0, 13, (3, 8), generator=torch.Generator().manual_seed(5))

resnet = partial(MiniResNet, in_channels=1, num_classes=4, widths=(4, 8), blocks=2, dropout=0.3)
gpt = partial(GPT, vocab_size=13, context=8, layers=3, heads=2, width=16, dropout=0.3)
with_and_without_training = pytest.mark.parametrize(
    ("build", "batch"), [(resnet, IMAGES), (gpt, TOKENS)], ids=["resnet", "gpt"]
)
# One block is enough to compile, which takes long.
SHORT = ((partial(resnet, blocks=1, widths=(4,)), IMAGES), (partial(gpt, layers=1), TOKENS))


def two_steps(
    model: nn.Module, batch: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """Everything that two forward and backward passes leave behind."""
    torch.manual_seed(1)
    losses = []
    for _ in range(2):
        loss = (model if forward is None else forward)(batch).logsumexp(-1).sum()
        loss.backward()
        losses.append(loss.detach())
    gradients = {
        f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None
    }
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return {
        **gradients,
        **buffers,
        "losses": torch.stack(losses),
        "generator": torch.get_rng_state(),
    }


@with_and_without_training
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_same_gradients_buffers_and_random_state_bit_for_bit(
    build: Callable[..., nn.Module], batch: Tensor, mode: str
) -> None:
    torch.manual_seed(0)
    plain = build()
    recomputed = build(activation_checkpointing=True)
    recomputed.load_state_dict(plain.state_dict())

    expected = two_steps(plain.train(mode == "train"), batch)
    result = two_steps(recomputed.train(mode == "train"), batch)

    assert expected.keys() == result.keys()
    assert [name for name in expected if not torch.equal(expected[name], result[name])] == []


@pytest.mark.parametrize("value", ["selective", True])
def test_a_users_attribute_of_the_same_name_means_nothing_while_the_setting_is_off(
    value: bool | str,
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    model.activation_checkpointing = value  # type: ignore[assignment]
    task: Any = SimpleNamespace(model=lambda: model)
    with RunManager(seed=0) as ddp:
        set_up_model(Config(), task, ddp, None)
    assert recomputed_blocks(model) == []
    assert model.activation_checkpointing == value


def test_the_blocks_that_the_setting_chooses_are_those_that_a_model_of_ours_computes_again() -> (
    None
):
    model = gpt()
    recompute_blocks(model, "every:2")
    assert recomputed_blocks(model) == [model.blocks[0], model.blocks[2]]
    assert model.activation_checkpointing == "every:2"


@with_and_without_training
def test_the_buffers_stay_the_same_objects(build: Callable[..., nn.Module], batch: Tensor) -> None:
    model = build(activation_checkpointing=True)
    before = {name: id(buffer) for name, buffer in model.named_buffers()}

    two_steps(model, batch)

    assert {name: id(buffer) for name, buffer in model.named_buffers()} == before


@with_and_without_training
def test_fewer_activations_are_held(build: Callable[..., nn.Module], batch: Tensor) -> None:
    def bytes_held(model: nn.Module) -> int:
        held: dict[int, int] = {}

        def hold(tensor: Tensor) -> Tensor:
            held[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
            model(batch)
        return sum(held.values())

    assert bytes_held(build(activation_checkpointing=True)) < bytes_held(build()) / 2


def compile_both() -> None:
    for build, batch in SHORT:
        torch.manual_seed(0)
        plain = build(dropout=0.0)
        recomputed = build(dropout=0.0, activation_checkpointing=True)
        recomputed.load_state_dict(plain.state_dict())
        compiled = torch.compile(recomputed, backend="aot_eager", fullgraph=True)

        expected = two_steps(plain, batch)
        result = two_steps(recomputed, batch, compiled)

        for name, value in expected.items():
            torch.testing.assert_close(
                result[name], value, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.soak
@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    run_ranks(1, compile_both)  # where torch's compiler is loaded already
