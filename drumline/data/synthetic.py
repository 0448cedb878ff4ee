"""Synthetic data that can be learned, for tests and benchmarks. A sample is computed from (seed,
index); nothing is stored."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drumline.data.dataset import Split, TwoPartDataset
from drumline.data.images import ImageDataset, LabelledImages, Preparation
from drumline.data.sharding import Draws
from drumline.data.tokens import inputs_and_targets

_SPLITS: dict[Split, int] = {"train": 0, "eval": 1}

# The `stream` of the draws for each.
_LABELS = 1
_NOISE = 2
_PATTERNS = 3
_STARTS = 4
_HALF = np.uint8(1)  # pattern and noise each get half the range of a byte


def _num_samples(split: Split, samples: int) -> int:
    """Evaluation has an eighth as many samples as training, and different ones."""
    return samples if split == "train" else max(1, samples // 8)


class SyntheticImages(ImageDataset):
    """Each class has a coarse pattern; an image is its class's pattern plus noise, in equal
    parts."""

    def __init__(
        self,
        *,
        split: Split,
        augment: bool,
        image_size: int,
        samples: int,
        classes: int,
        seed: int,
    ) -> None:
        padding = max(1, image_size // 8) if augment else 0
        prepare = Preparation(mean=(127.0,) * 3, std=(52.0,) * 3, padding=padding, flip=augment)
        super().__init__((3, image_size, image_size), num_classes=classes, prepare=prepare)
        self._length = _num_samples(split, samples)
        self._part = _SPLITS[split]
        self._seed = seed

        # [class, channel, height, width]: a grid of 4x4 random bytes, enlarged.
        draws = Draws(seed, 0, np.arange(classes, dtype=np.int64))
        coarse = _random_bytes(draws, 3 * 4 * 4, stream=_PATTERNS).reshape(classes, 3, 4, 4)
        enlarged = np.arange(image_size) * 4 // image_size
        self._patterns = coarse[:, :, enlarged[:, np.newaxis], enlarged] >> _HALF

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> LabelledImages:
        # A sample is the same in every epoch; only augmentation uses the draws of the epoch.
        draws = Draws(self._seed, self._part, indices)
        chances = draws.uniform(1, stream=_LABELS)[:, 0]
        labels = (chances * self.num_classes).astype(np.int64)

        images = self._patterns[labels]
        noise = _random_bytes(draws, images[0].size, stream=_NOISE).reshape(images.shape)
        images += noise >> _HALF
        return LabelledImages(torch.from_numpy(images), torch.from_numpy(labels))


def _random_bytes(draws: Draws, count: int, *, stream: int) -> NDArray[np.uint8]:
    """So many for each sample."""
    num_words = -(-count // 8)
    words = draws.bits(num_words, stream=stream).astype("<u8", copy=False)
    return words.view(np.uint8)[:, :count]


class SyntheticTokens(TwoPartDataset):
    """Each token follows from the one before (5 x + 3 modulo the vocabulary), but one in ten is
    replaced at random."""

    vocab_size = 64

    def __init__(self, *, split: Split, samples: int, context: int, seed: int) -> None:
        self._length = _num_samples(split, samples)
        self._part = _SPLITS[split]
        self._seed = seed
        self._context = context

        # The n-th token after x is factors[n] * x + terms[n], so that a batch needs no loop over
        # positions.
        factors = [1]
        terms = [0]
        for _ in range(context):
            factors.append(5 * factors[-1] % self.vocab_size)
            terms.append((5 * terms[-1] + 3) % self.vocab_size)

        self._factors = np.array(factors)
        self._terms = np.array(terms)

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
        draws = Draws(self._seed, self._part, indices)
        first = (draws.uniform(1, stream=_STARTS) * self.vocab_size).astype(np.int64)
        rows = (first * self._factors + self._terms) % self.vocab_size

        # One in ten: among those, the chance is the random token, too.
        chances = draws.uniform(self._context + 1, stream=_NOISE) * 10
        random_tokens = (chances * self.vocab_size).astype(np.int64)
        return torch.from_numpy(np.where(chances < 1, random_tokens, rows))

    def finish(self, rows: Tensor, choices: None) -> tuple[Tensor, Tensor]:
        return inputs_and_targets(rows)
