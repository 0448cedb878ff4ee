"""MiniResNet: its shape, its start, and that it learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.base.errors import UsageError
from drumline.training.tasks.built_in import BasicBlock, MiniResNet


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 32), (1, 28), (2, 1)])
def test_any_image_size_gives_one_row_of_logits_per_image(channels: int, size: int) -> None:
    model = MiniResNet(in_channels=channels, num_classes=7, widths=(4, 8, 8, 8, 8))

    assert model(torch.zeros(3, channels, size, size)).shape == (3, 7)


def test_stages_after_the_first_halve_the_image_and_stop_at_one_pixel() -> None:
    model = MiniResNet(in_channels=1, num_classes=2, widths=(4, 4, 4, 4, 4), blocks=2)
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: sizes.append(output.shape[-1]))

    model(torch.zeros(2, 1, 8, 8))

    assert sizes == [8, 8, 4, 4, 2, 2, 1, 1, 1, 1]


def test_widths_and_blocks_decide_the_layers() -> None:
    model = MiniResNet(in_channels=1, num_classes=2, widths=(4, 6), blocks=3)
    blocks = [block for block in model.blocks if isinstance(block, BasicBlock)]

    assert [block.second.out_channels for block in blocks] == [4, 4, 4, 6, 6, 6]
    assert [isinstance(block.shortcut, nn.Identity) for block in blocks] == [True] * 3 + [False] + [
        True
    ] * 2


def test_a_block_starts_as_its_shortcut() -> None:
    block = next(MiniResNet(in_channels=1, num_classes=2, widths=(4,)).blocks.children())
    features = torch.rand(2, 4, 5, 5)

    assert torch.equal(block(features), features)


def test_dropout_acts_in_training_only() -> None:
    model = MiniResNet(in_channels=1, num_classes=3, widths=(8,), dropout=0.9)
    images = torch.randn(4, 1, 6, 6)

    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_it_learns_to_tell_patterns_apart() -> None:
    torch.manual_seed(0)
    rows = torch.tensor([1.0, -1.0]).repeat(4).view(8, 1)
    patterns = torch.stack(
        [rows.expand(8, 8), rows.T.expand(8, 8), rows * rows.T, torch.zeros(8, 8)]
    )
    labels = torch.arange(48) % 4
    images = (patterns[labels] + 0.5 * torch.randn(48, 8, 8)).unsqueeze(1)
    model = MiniResNet(in_channels=1, num_classes=4, widths=(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    for _ in range(20):
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    assert (model.eval()(images).argmax(1) == labels).float().mean() == 1.0


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (1, 8, 8)])
def test_images_of_the_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = MiniResNet(in_channels=1, num_classes=2)

    with pytest.raises(UsageError, match=r"images of shape \[N, 1, H, W\], got \[.*8, 8\]"):
        model(torch.zeros(shape))
