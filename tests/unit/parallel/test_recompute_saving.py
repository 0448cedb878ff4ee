"""What activation checkpointing saves, measured in one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drumline.parallel.blocks import find_blocks
from drumline.parallel.recompute import LEAST_SAVING, recompute_saving

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = inputs + self.mlp(self.norm(inputs))
        return output


def saving(num_blocks: int, wrap: tuple[str, ...] = ()) -> float:
    model = nn.Sequential(
        nn.Linear(4, WIDTH), *(Block() for _ in range(num_blocks)), nn.Linear(WIDTH, 2)
    )
    inputs = torch.randn(32, 4)
    return recompute_saving(
        model, list(find_blocks(model, wrap).values()), lambda: model(inputs).sum()
    )


def test_blocks_save_all_activations_but_those_of_one_block() -> None:
    # Each block keeps its norm's output and statistics, 4 * WIDTH before and after GELU; its input
    # stays.
    assert saving(8) == pytest.approx(7 / 8, abs=0.1)
    assert saving(2) == pytest.approx(1 / 2, abs=0.1)


def test_single_layers_and_a_single_block_save_nothing() -> None:
    assert saving(8, ("Linear",)) < LEAST_SAVING
    assert saving(1) < LEAST_SAVING
