"""On a GPU: a step's loss and its meter wait for nothing, and recomputed activations change
nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from drumline.config.schema import Config
from drumline.metrics.meters import Meter
from drumline.training.tasks import ImageClassification, LanguageModel
from drumline.training.tasks.built_in import GPT, MiniResNet

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda", 0)

resnet = partial(MiniResNet, in_channels=1, num_classes=10, widths=(8, 16), dropout=0.3)
gpt = partial(GPT, vocab_size=50, context=16, layers=2, heads=2, width=32, dropout=0.3)


def batch(build: Callable[..., nn.Module]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if build is resnet:
        images = torch.randn(12, 1, 8, 8, generator=generator)
        return images.to(GPU), torch.randint(0, 10, (12,), generator=generator).to(GPU)
    tokens = torch.randint(0, 50, (4, 17), generator=generator).to(GPU)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch says that it does not find every kind of waiting yet
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


both = pytest.mark.parametrize("build", [resnet, gpt], ids=["resnet", "gpt"])


@both
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_loss_backward_and_meter_never_wait_for_the_device(
    build: Callable[..., nn.Module], recompute: bool, precision: torch.dtype
) -> None:
    task = (ImageClassification if build is resnet else LanguageModel)(Config())
    model = build(activation_checkpointing=recompute).to(GPU)
    data = batch(build)
    meter = Meter(GPU)
    task.loss(model, data).total.backward()  # the first call may set up libraries

    with waiting_is_an_error():
        for _ in range(2):
            with torch.autocast("cuda", dtype=precision, enabled=precision is not torch.float32):
                loss = task.loss(model, data)
            loss.total.backward()
            meter.add(loss.total, len(data[0]), loss.metrics)
        sums = meter.take()

    assert sums.dtype == torch.float64
    assert sums[1] == 2 * len(data[0])


@both
def test_recomputed_activations_give_the_same_bits(build: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    plain = build().to(GPU)
    recomputed = build(activation_checkpointing=True).to(GPU)
    recomputed.load_state_dict(plain.state_dict())
    results = []
    # cuDNN may add in any order; only with that out of the way are bits a fair demand.
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False):
        for model in (plain, recomputed):
            torch.manual_seed(1)
            for _ in range(2):
                model(batch(build)[0]).logsumexp(-1).sum().backward()
            results.append(
                [
                    *(p.grad for p in model.parameters()),
                    *model.buffers(),
                    torch.cuda.get_rng_state(),
                ]
            )

    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))


def test_what_waits_is_found() -> None:
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"), waiting_is_an_error():
        torch.ones(1, device=GPU).item()
