"""Every tensor of a batch goes to the device, and the batch keeps its form."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from drumline.data.delivery import to_device

META = torch.device("meta")  # a device that every machine has


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


class MovesItself:
    device = torch.device("cpu")

    def to(self, device: torch.device, *, non_blocking: bool) -> MovesItself:
        moved = MovesItself()
        moved.device = device
        return moved


def test_nested_batches_keep_their_form() -> None:
    tensor = torch.zeros(2)
    batch = {"pair": Pair(tensor, [tensor, "name", 3]), "plain": (tensor, None)}
    moved = to_device(batch, META)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].right[1:] == ["name", 3]
    assert moved["plain"][1] is None
    for leaf in (moved["pair"].left, moved["pair"].right[0], moved["plain"][0]):
        assert leaf.device == META


def test_an_object_that_can_move_itself_is_asked_to() -> None:
    assert to_device([MovesItself()], META)[0].device == META


def test_a_batch_that_is_there_already_is_not_copied() -> None:
    tensor = torch.zeros(2)
    assert to_device(tensor, torch.device("cpu")) is tensor
