"""The bundled digits: what the file holds, how it is split, what a batch looks like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from drumline.data import images as module
from drumline.data.dataset import makes_batches
from drumline.data.images import digits
from drumline.data.sharding import Draws

FOLDER = Path(module.__file__).with_name("files")


def test_the_split_is_fixed_and_covers_everything_once() -> None:
    train = digits(split="train", augment=False)
    evaluation = digits(split="eval", augment=False)
    assert (len(train), len(evaluation)) == (1437, 360)
    assert makes_batches(train)
    with np.load(FOLDER / "digits.npz", allow_pickle=False) as arrays:
        labels = arrays["labels"]
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert evaluation.batch(np.arange(360), None)[1].tolist() == labels[::5].tolist()
    assert train.batch(np.arange(4), None)[1].tolist() == labels[1:5].tolist() == [1, 2, 3, 4]


def test_a_batch_is_normalised() -> None:
    train = digits(split="train", augment=False)
    images, labels = train.batch(np.arange(1437), Draws(0, 0, np.arange(1437)))
    assert images.shape == (1437, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01
    assert (train.in_channels, train.num_classes) == (1, 10)


def test_augmentation_shifts_by_up_to_one_pixel_in_training_only() -> None:
    indices = np.arange(100)
    plain, _ = digits(split="train", augment=False).batch(indices, None)
    train = digits(split="train", augment=True)
    assert torch.equal(train.batch(indices, None)[0], plain)
    shifted, _ = train.batch(indices, Draws(0, 0, indices))
    inner = slice(2, 6)
    moves = {(down, right) for down in (1, 2, 3) for right in (1, 2, 3)}
    for before, after in zip(plain, shifted, strict=True):
        cuts = [before[0, down : down + 4, right : right + 4] for down, right in moves]
        assert any(torch.equal(after[0, inner, inner], cut) for cut in cuts)
    assert not torch.equal(shifted, plain)


def test_the_file_is_small_and_its_licence_beside_it() -> None:
    assert (FOLDER / "digits.npz").stat().st_size < 80_000
    licence = (FOLDER / "DIGITS-LICENSE.md").read_text()
    for words in ("Alpaydin", "Kaynak", "1998", "CC BY 4.0", "What was changed"):
        assert words in licence
