"""What a run on a GPU gets by itself: channels last, fused optimizers, and the arithmetic that was
asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from drumline.config.schema import OptimConfig, TrainConfig
from drumline.parallel.wrap import gains_from_channels_last
from drumline.training.job.evaluation_job import is_channels_last, set_arithmetic
from drumline.training.job.optimizer import make_optimizer
from drumline.training.tasks.built_in import GPT, MiniResNet

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
RESNET = MiniResNet(in_channels=3, num_classes=10, widths=(4,))


def test_models_that_convolve_images_gain_from_channels_last() -> None:
    assert gains_from_channels_last(RESNET)
    assert gains_from_channels_last(nn.Sequential(nn.ConvTranspose2d(3, 4, 3)))
    assert not gains_from_channels_last(nn.Sequential(nn.Conv1d(3, 4, 3), nn.Linear(4, 4)))
    assert not gains_from_channels_last(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3)))
    assert not gains_from_channels_last(GPT(vocab_size=8, layers=1, heads=1, width=4, context=4))


@pytest.mark.parametrize(
    ("memory_format", "device", "expected"),
    [
        ("auto", CUDA, True),
        ("auto", CPU, False),
        ("contiguous", CUDA, False),
        ("channels_last", CPU, True),
    ],
)
def test_the_layout_follows_the_model_and_the_device_unless_it_is_given(
    memory_format: str, device: torch.device, expected: bool
) -> None:
    train = TrainConfig(memory_format=memory_format)
    assert is_channels_last(train, RESNET, device) is expected
    if memory_format == "auto":
        assert not is_channels_last(train, nn.Linear(2, 2), device)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_optimizers_are_fused_where_torch_has_them_so(name: str) -> None:
    optimizer = make_optimizer(RESNET, OptimConfig(name=name), lr=0.1)
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    complex_one = nn.Linear(2, 2, dtype=torch.complex64)
    plain = make_optimizer(complex_one, OptimConfig(name=name), lr=0.1)
    assert not any(group["fused"] for group in plain.param_groups)


@pytest.fixture
def arithmetic() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32 = False
    cudnn.allow_tf32 = True
    cudnn.benchmark = False
    yield
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@pytest.mark.usefixtures("arithmetic")
def test_tf32_and_the_benchmark_of_cudnn_are_as_they_were_asked_for() -> None:
    def chosen() -> tuple[bool, bool, bool]:
        cudnn = torch.backends.cudnn
        return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark

    usual = chosen()
    set_arithmetic(TrainConfig(tf32="on", cudnn_benchmark=True), CPU)
    assert chosen() == usual
    set_arithmetic(TrainConfig(), CUDA)
    assert chosen() == usual
    set_arithmetic(TrainConfig(tf32="on", cudnn_benchmark=True), CUDA)
    assert chosen() == (True, True, True)
    set_arithmetic(TrainConfig(tf32="off"), CUDA)
    assert chosen() == (False, False, False)
