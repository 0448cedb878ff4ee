"""Synthetic data: the same from the same seed, different from part to part, and learnable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from drumline.data.dataset import makes_batches
from drumline.data.sharding import Draws
from drumline.data.synthetic import SyntheticImages, SyntheticTokens

ALL = np.arange(256)


def images(
    *, split: Any = "train", augment: bool = False, seed: int = 0, samples: int = 256
) -> SyntheticImages:
    return SyntheticImages(
        split=split, augment=augment, image_size=9, samples=samples, classes=7, seed=seed
    )


def tokens(*, split: Any = "train", seed: int = 0, samples: int = 256) -> SyntheticTokens:
    return SyntheticTokens(split=split, samples=samples, context=16, seed=seed)


@pytest.mark.parametrize("make", [images, tokens])
def test_a_sample_is_its_own_whatever_batch_it_is_in(make: Any) -> None:
    dataset = make()
    assert makes_batches(dataset)
    whole = dataset.batch(ALL, None)
    part = dataset.batch(np.array([200, 3]), Draws(0, 5, np.array([200, 3])))
    for whole_rows, part_rows in zip(whole, part, strict=True):
        assert torch.equal(whole_rows[[200, 3]], part_rows)


@pytest.mark.parametrize("make", [images, tokens])
def test_parts_and_seeds_differ(make: Any) -> None:
    batch = make().batch(np.arange(32), None)[0]
    assert not torch.equal(make(seed=1).batch(np.arange(32), None)[0], batch)
    assert not torch.equal(make(split="eval").batch(np.arange(32), None)[0], batch)


@pytest.mark.parametrize("make", [images, tokens])
def test_evaluation_has_an_eighth_of_the_samples(make: Any) -> None:
    assert len(make(samples=256)) == 256
    assert len(make(split="eval", samples=256)) == 32
    assert len(make(split="eval", samples=3)) == 1


def test_images_are_normalised_and_every_class_occurs() -> None:
    batch, labels = images().batch(ALL, None)
    assert batch.shape == (256, 3, 9, 9)
    assert batch.dtype == torch.float32
    assert abs(float(batch.mean())) < 0.2
    assert 0.8 < float(batch.std()) < 1.2
    assert set(labels.tolist()) == set(range(7))
    assert (images().in_channels, images().num_classes) == (3, 7)


def test_images_can_be_learned() -> None:
    """The mean training image of each class classifies the evaluation images."""
    batch, labels = images().batch(ALL, None)
    means = torch.stack([batch[labels == number].mean(dim=0) for number in range(7)]).flatten(1)
    held_out, expected = images(split="eval").batch(np.arange(32), None)
    nearest = torch.cdist(held_out.flatten(1), means).argmin(dim=1)
    assert torch.equal(nearest, expected)


def test_augmentation_is_for_training_only() -> None:
    plain = images().batch(ALL, None)[0]
    assert torch.equal(images(augment=True).batch(ALL, None)[0], plain)
    augmented = [images(augment=True).batch(ALL, Draws(0, epoch, ALL))[0] for epoch in range(2)]
    assert not torch.equal(augmented[0], plain)
    assert not torch.equal(augmented[0], augmented[1])


def test_tokens_follow_from_each_other_most_of_the_time() -> None:
    inputs, targets = tokens().batch(ALL, None)
    assert inputs.shape == targets.shape == (256, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert 0 <= int(inputs.min()) <= int(inputs.max()) < tokens().vocab_size
    follows = ((5 * inputs + 3) % 64 == targets).double().mean()
    assert 0.75 < float(follows) < 0.87  # 0.9 * 0.9, and a few by chance
