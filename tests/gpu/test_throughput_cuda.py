"""Speed on a GPU: FLOPs as torch counts them, a fraction of the GPU's peak, and no warning on the
way."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drumline.config import PRESETS, read_flags, read_layers, resolve
from drumline.runs.events import read_events
from drumline.training.between_steps.throughput import ModelFlops, count_flops
from drumline.training.memory.gpu_table import peak_tflop_per_s
from drumline.training.tasks.built_in import GPT, MiniResNet, load_task
from tests.jobs import train_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GPU = torch.device("cuda", 0)
CONTEXT = 256
FLAGS = (
    f"--model.context {CONTEXT} --model.width 512 --model.heads 8 --train.steps 40 --train.batch_size 64 "
    "--optim.warmup_steps 0 --log.every_steps 5 --log.display none --watch.sidecar off --checkpoint.every_steps 20 "
    "--train.precision bf16"
)


def count(model: nn.Module, batch: Tensor) -> ModelFlops:
    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(batch).float().sum()  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flops = count_flops(loss, model.parameters(), num_samples=len(batch), num_tokens=None)
    assert flops is not None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss().backward()  # type: ignore[no-untyped-call]
    assert flops.total == counter.get_total_flops()
    return flops


@pytest.mark.parametrize(
    "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
)
def test_attention_has_the_same_flops_with_every_kernel(backend: SDPBackend) -> None:
    model = GPT(vocab_size=64, context=128, layers=2, heads=4, width=256).to(GPU)
    with sdpa_kernel(backend):
        assert count(model, torch.randint(0, 64, (2, 128), device=GPU)).arithmetic == "bfloat16"


@pytest.mark.parametrize("allowed", [True, False])
def test_the_arithmetic_of_fp32_is_as_it_is_set(allowed: bool) -> None:
    model = MiniResNet(in_channels=3, num_classes=4, widths=(16, 32)).to(GPU)
    batch = torch.randn(2, 3, 16, 16, device=GPU)
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = allowed
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flops = count_flops(
                lambda: model(batch).sum(), model.parameters(), num_samples=2, num_tokens=None
            )
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert flops is not None
    assert flops.arithmetic == ("tf32" if allowed else "float32")


@pytest.mark.parametrize("step", ["eager", "graph", "compile"])
def test_a_run_has_its_mfu(tmp_path: Path, step: str) -> None:
    layers = read_layers(
        read_flags([*FLAGS.split(), "--train.step", step]), config_file=None, environment={}
    )
    config = resolve(layers, PRESETS["text"].defaults, task="text")
    train_on(1, config, load_task("text"), tmp_path)
    events: list[dict[str, Any]] = list(read_events(tmp_path / "events" / "rank-00000.jsonl"))
    *_, last = (event for event in events if event["kind"] == "train")
    model = GPT(vocab_size=256, context=CONTEXT, layers=4, heads=8, width=512).to(GPU)
    a_token = count(model, torch.randint(0, 256, (2, CONTEXT), device=GPU)).total / (2 * CONTEXT)
    peak = peak_tflop_per_s(torch.cuda.get_device_name(GPU), "bfloat16")
    for event in (last, events[-1]):
        assert event["tokens_per_s"] == pytest.approx(CONTEXT * event["samples_per_s"])
        assert event["tflop_per_s"] == pytest.approx(a_token * event["tokens_per_s"] / 1e12)
        if peak is None:
            assert event["mfu"] is None
        else:
            assert event["mfu"] == pytest.approx(event["tflop_per_s"] / peak)
            assert 0 < event["mfu"] < 1
    paused = [event["blocked_s"] for event in events if event["kind"] == "checkpoint"]
    assert events[-1]["checkpoint_pause_s"] == pytest.approx(sum(paused))
