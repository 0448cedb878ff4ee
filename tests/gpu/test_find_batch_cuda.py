"""The largest micro-batch that fits, on a GPU: measured in its memory, and a step of that size is
taken afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drumline.config.schema import Config, DataConfig, TrainConfig
from drumline.tools.find.batch_search import search_batch
from drumline.training.manager import RunManager
from drumline.training.tasks.base import Loss, Task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
GIB = 1 << 30


class Hungry(Task):
    """A sample needs 1 GiB of activations."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_data(self) -> list[Tensor]:
        return [torch.ones(1)] * self.config.data.samples

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        wide = model(batch).expand(-1, GIB // 8)
        # two results of 4 bytes each are kept for the backward pass
        return Loss(wide.sin().cos().mean(1).sum())


def test_what_fits_is_found_and_the_gpu_is_left_as_it_was() -> None:
    free = torch.cuda.mem_get_info()[0]
    config = Config(data=DataConfig(samples=4096), train=TrainConfig(steps=1, batch_size=4096))
    ddp = RunManager()
    ddp.setup()
    try:
        result = search_batch(config, Hungry, ddp, margin=0.5)
    finally:
        ddp.cleanup()
    assert result.measures_memory
    assert any(not trial.fits for trial in result.trials)
    assert 0.2 * free < result.chosen.memory < 0.5 * free
    # no limit is left
    held = torch.empty(int(0.7 * free), dtype=torch.uint8, device="cuda")
    del held
    torch.cuda.empty_cache()
