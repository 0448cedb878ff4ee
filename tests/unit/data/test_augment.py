"""Random shift and mirror: only what was asked for, decided by seed, epoch and index."""

from __future__ import annotations

import numpy as np

from drumline.data.augment import shift_and_flip
from drumline.data.draws import Draws

IMAGES = np.random.default_rng(0).integers(1, 255, size=(200, 2, 6, 5)).astype(np.uint8)
DRAWS = Draws(0, 0, np.arange(200))


def by_hand(image: np.ndarray, padding: int) -> dict[tuple[int, int, bool], bytes]:
    """Every result that one image can have."""
    bordered = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    results = {}
    for down in range(2 * padding + 1):
        for right in range(2 * padding + 1):
            cut = bordered[:, down : down + image.shape[1], right : right + image.shape[2]]
            results[down, right, False] = cut.tobytes()
            results[down, right, True] = cut[:, :, ::-1].tobytes()
    return results


def outcomes(padding: int, *, flip: bool) -> list[tuple[int, int, bool]]:
    moved = shift_and_flip(IMAGES, DRAWS, padding=padding, flip=flip)
    found = []
    for before, after in zip(IMAGES, moved, strict=True):
        matches = [name for name, result in by_hand(before, padding).items() if result == after.tobytes()]
        assert len(matches) == 1
        found += matches
    return found


def test_every_image_is_a_cut_of_itself_and_every_cut_happens() -> None:
    found = outcomes(1, flip=True)
    assert len(set(found)) == 9 * 2
    assert 60 < sum(mirrored for *_, mirrored in found) < 140


def test_without_flip_nothing_is_mirrored() -> None:
    found = outcomes(2, flip=False)
    assert len({(down, right) for down, right, _ in found}) == 25
    assert not any(mirrored for *_, mirrored in found)


def test_an_image_is_treated_alike_in_any_batch_and_otherwise_in_another_epoch() -> None:
    whole = shift_and_flip(IMAGES, DRAWS, padding=2, flip=True)
    chosen = np.array([150, 3])
    part = shift_and_flip(IMAGES[chosen], Draws(0, 0, chosen), padding=2, flip=True)
    assert np.array_equal(part, whole[chosen])
    other = shift_and_flip(IMAGES, Draws(0, 1, np.arange(200)), padding=2, flip=True)
    assert sum(np.array_equal(a, b) for a, b in zip(whole, other, strict=True)) < 20


def test_the_images_given_are_left_as_they_are() -> None:
    before = IMAGES.copy()
    shift_and_flip(IMAGES, DRAWS, padding=1, flip=True)
    assert np.array_equal(IMAGES, before)
