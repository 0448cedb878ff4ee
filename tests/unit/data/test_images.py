"""Random shift and mirror: only what was asked for, decided by seed, epoch and index; and the bits
of plain numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from drumline.data.images import ImageArrays, Preparation, crop, crop_offsets, normalize
from drumline.data.sharding import Draws

IMAGES = np.random.default_rng(0).integers(1, 255, size=(200, 2, 6, 5)).astype(np.uint8)
DRAWS = Draws(0, 0, np.arange(200))


def moved(images: np.ndarray, draws: Draws, *, padding: int, flip: bool) -> np.ndarray:
    shape = images.shape[1:]
    assert len(shape) == 3
    prepare = Preparation(mean=(), std=(), padding=padding, flip=flip)
    places = crop_offsets(draws, shape, prepare)
    result: np.ndarray = crop(torch.from_numpy(images), places, prepare).numpy()
    return result


def by_hand(image: np.ndarray, padding: int) -> dict[tuple[int, int, bool], np.ndarray]:
    """Every result that one image can have."""
    bordered = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    results = {}
    for down in range(2 * padding + 1):
        for right in range(2 * padding + 1):
            piece = bordered[:, down : down + image.shape[1], right : right + image.shape[2]]
            results[down, right, False] = piece
            results[down, right, True] = piece[:, :, ::-1]
    return results


def outcomes(padding: int, *, flip: bool) -> list[tuple[int, int, bool]]:
    cuts = []
    for before, after in zip(IMAGES, moved(IMAGES, DRAWS, padding=padding, flip=flip), strict=True):
        matches = [
            name for name, piece in by_hand(before, padding).items() if np.array_equal(piece, after)
        ]
        assert len(matches) == 1
        cuts += matches
    return cuts


def test_every_image_is_a_cut_of_itself_and_every_cut_happens() -> None:
    cuts = outcomes(1, flip=True)
    assert len(set(cuts)) == 9 * 2
    assert 60 < sum(mirrored for *_, mirrored in cuts) < 140


def test_without_flip_nothing_is_mirrored() -> None:
    cuts = outcomes(2, flip=False)
    assert len({(down, right) for down, right, _ in cuts}) == 25
    assert not any(mirrored for *_, mirrored in cuts)


@pytest.mark.parametrize(
    ("shape", "padding", "flip"),
    [
        ((3, 8, 8), 1, True),
        ((1, 8, 8), 1, False),
        ((1, 5, 9), 2, True),
        ((3, 9, 4), 3, False),
        ((2, 3, 4), 6, True),  # some cuts hold nothing but the border
        ((4, 1, 1), 1, True),
    ],
)
def test_images_have_the_bits_of_numpy_sample_by_sample(
    shape: tuple[int, int, int], padding: int, flip: bool
) -> None:
    """What a sample looks like is what it has always looked like: a checkpoint is gone on with in
    the same way."""
    mean = (123.7, 4.88, 116.3, 0.1)[: shape[0]]
    std = (58.4, 6.02, 57.1, 3.0)[: shape[0]]
    images = np.random.default_rng(1).integers(0, 256, size=(300, *shape)).astype(np.uint8)
    prepare = Preparation(mean=mean, std=std, padding=padding, flip=flip)
    dataset = ImageArrays(images, np.arange(300), num_classes=300, prepare=prepare)
    indices = np.random.default_rng(2).permutation(300)[:100]
    draws = Draws(7, 3, indices)

    normalized, labels = dataset.batch(indices, draws)

    assert labels.tolist() == indices.tolist()
    middle, spread = (
        np.array(values, dtype=np.float32)[:, np.newaxis, np.newaxis] for values in (mean, std)
    )
    for row, (index, chances) in enumerate(
        zip(indices.tolist(), draws.uniform(3, stream=0xA06), strict=True)
    ):
        down, right = (int(chance * (2 * padding + 1)) for chance in chances[:2])
        expected = by_hand(images[index], padding)[down, right, bool(flip and chances[2] < 0.5)]
        assert np.array_equal(
            normalized[row].numpy(), (expected.astype(np.float32) - middle) / spread
        )
    assert normalized.is_contiguous()


def test_an_image_is_treated_alike_in_any_batch_and_otherwise_in_another_epoch() -> None:
    whole = moved(IMAGES, DRAWS, padding=2, flip=True)
    chosen = np.array([150, 3])
    part = moved(IMAGES[chosen], Draws(0, 0, chosen), padding=2, flip=True)
    assert np.array_equal(part, whole[chosen])
    next_epoch = moved(IMAGES, Draws(0, 1, np.arange(200)), padding=2, flip=True)
    assert sum(np.array_equal(a, b) for a, b in zip(whole, next_epoch, strict=True)) < 20


def test_images_are_cut_alike_however_they_lie_in_memory() -> None:
    """As a decoder gives them, channels come last in memory."""
    images = torch.from_numpy(IMAGES)
    plain = Preparation(mean=(), std=(), padding=1)
    places = crop_offsets(DRAWS, (2, 6, 5), plain)
    for prepare in (plain, replace(plain, flip=True)):
        cropped = crop(images.to(memory_format=torch.channels_last), places, prepare)
        assert torch.equal(cropped, crop(images, places, prepare))
        assert cropped.is_contiguous()


def test_the_images_given_are_left_as_they_are() -> None:
    before = IMAGES.copy()
    normalize(torch.from_numpy(moved(IMAGES, DRAWS, padding=1, flip=True)), (1.0, 2.0), (3.0, 4.0))
    normalize(torch.from_numpy(IMAGES), (1.0, 2.0), (3.0, 4.0))
    assert np.array_equal(IMAGES, before)
