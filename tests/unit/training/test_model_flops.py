"""The FLOPs of models: the same as torch's own counter finds, without what a backward pass
repeats."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from drumline.training.between_steps.throughput import ModelFlops, count_flops
from drumline.training.memory.gpu_table import peak_tflop_per_s
from drumline.training.tasks.built_in import GPT, MiniResNet


def count(loss: Callable[[], Tensor], model: nn.Module) -> ModelFlops:
    flops = count_flops(loss, model.parameters(), num_samples=2, num_tokens=None)
    assert flops is not None
    return flops


def torchs_count(loss: Callable[[], Tensor]) -> int:
    """With attention in plain matrix products: torch's counter ignores the CPU's kernel, and adds
    what a GPU's kernels compute again."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss().backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def convolutional() -> nn.Module:
    return MiniResNet(in_channels=3, num_classes=4, widths=(4, 6))


def language_model(*, recompute: bool = False) -> nn.Module:
    sizes = {"vocab_size": 11, "context": 9, "layers": 2, "heads": 2, "width": 8}
    return GPT(**sizes, activation_checkpointing=recompute)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (convolutional(), torch.randn(2, 3, 8, 8)),
        (language_model(), torch.randint(0, 11, (2, 9))),
        (
            nn.Sequential(nn.ConvTranspose2d(3, 5, 3, stride=2), nn.Conv2d(5, 4, 3)),
            torch.randn(2, 3, 5, 6),
        ),
        (nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)),
    ],
    ids=["resnet", "gpt", "transposed convolution", "attention"],
)
def test_the_count_is_that_of_torchs_own_counter(model: nn.Module, batch: Tensor) -> None:
    def loss() -> Tensor:
        outputs = (
            model(batch, batch, batch)[0]
            if isinstance(model, nn.MultiheadAttention)
            else model(batch)
        )
        return outputs.float().sum()  # type: ignore[no-any-return]

    assert count(loss, model).total == torchs_count(loss) > 0


def test_what_is_computed_again_for_the_backward_pass_does_not_count() -> None:
    tokens = torch.randint(0, 11, (2, 9))
    plain = language_model()
    recomputing = language_model(recompute=True)
    once = count(lambda: plain(tokens).sum(), plain)
    assert count(lambda: recomputing(tokens).sum(), recomputing) == once
    assert torchs_count(lambda: recomputing(tokens).sum()) > once.total, (
        "torch's counter has it twice"
    )


def test_a_frozen_part_counts_without_gradients() -> None:
    model = nn.Linear(6, 5)
    teacher = nn.Linear(6, 5)
    inputs = torch.randn(4, 6)

    def loss() -> Tensor:
        with torch.no_grad():
            targets = teacher(inputs)
        return functional.mse_loss(model(inputs), targets)

    # The student: outputs and the gradient of the weight; the teacher: outputs.
    assert count(loss, model).total == 3 * (2 * 4 * 6 * 5)


def test_a_gradient_inside_the_loss_counts() -> None:
    model = nn.Linear(6, 5, bias=False)
    inputs = torch.randn(4, 6, requires_grad=True)

    def loss() -> Tensor:
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return slope.square().sum()

    # Outputs, the gradient of the inputs, and that of the weight.
    assert count(loss, model).total == 3 * (2 * 4 * 6 * 5)


def test_most_of_the_flops_decide_the_arithmetic() -> None:
    model = nn.Linear(64, 64)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(torch.ones(2, 64))
        return (outputs.float() @ torch.ones(64, 1)).sum()

    assert count(loss, model).arithmetic == "bfloat16"
    assert count(lambda: model(torch.ones(2, 64)).sum(), model).arithmetic == "float32"


def test_counting_leaves_no_gradient_and_calls_no_hook_that_waits_for_one() -> None:
    model = nn.Linear(6, 5)
    called = []
    model.weight.register_post_accumulate_grad_hook(called.append)
    count(lambda: model(torch.ones(2, 6)).sum(), model)
    assert (model.weight.grad, called) == (None, [])


def test_what_cannot_be_counted_is_none_or_an_error() -> None:
    def counted(loss: Callable[[], Tensor], model: nn.Module) -> ModelFlops | None:
        return count_flops(loss, model.parameters(), num_samples=2, num_tokens=None)

    scale = nn.PReLU()
    layer = nn.Linear(6, 5)
    inputs = torch.ones(2, 6, requires_grad=True)
    assert counted(lambda: scale(inputs).sum(), scale) is None, "no operation that counts"
    with pytest.raises(RuntimeError, match="may reach more parameters"):
        counted(lambda: checkpoint(layer, inputs, use_reentrant=True).sum(), layer)


def test_tokens_decide_where_samples_have_different_lengths() -> None:
    flops = ModelFlops(total=1200, num_samples=2, num_tokens=30, arithmetic="float32")
    assert flops.of(samples=10, tokens=60) == 2400
    assert flops.of(samples=10, tokens=None) == 6000


@pytest.mark.parametrize(
    ("name", "arithmetic", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 NVL", "float16", 835),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 19.5),
        ("NVIDIA L40S", "tf32", 183),
        ("NVIDIA L4", "bfloat16", 121),
        ("Tesla T4", "float16", 65),
        ("Tesla T4", "bfloat16", None),  # it has no such unit
        ("Tesla V100-SXM2-16GB", "tf32", None),
        ("NVIDIA H200", "float64", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),  # a seventh of one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("aarch64", "float32", None),
    ],
)
def test_the_peak_of_a_known_gpu(name: str, arithmetic: str, peak: float | None) -> None:
    assert peak_tflop_per_s(name, arithmetic) == peak
