"""What activation checkpointing saves, from one forward pass that keeps all activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.rank.torch_internals import pytree

LEAST_SAVING = 0.05
"""Of the activations; with less, the time that the second forward pass takes is lost."""


@dataclass
class SavedActivations:
    """The bytes that a forward pass saves for the backward pass, by storage."""

    sizes: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, int] = field(default_factory=dict)
    """The block, by its number, in which each storage was saved first."""
    inputs: set[int] = field(default_factory=set)
    """The storages that the blocks begin with, which are saved in any case."""
    block: int | None = None
    """In which the pass is."""

    def record(self, ignored: set[int], tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in ignored and key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            if self.block is not None:
                self.blocks[key] = self.block
        return tensor

    def enter(self, number: int, _: nn.Module, inputs: Any) -> None:
        self.block = number
        for value in pytree.tree_leaves(inputs):
            if isinstance(value, Tensor):
                self.inputs.add(value.untyped_storage().data_ptr())

    def leave(self, *_: Any) -> None:
        self.block = None

    def saving(self) -> float:
        """The part of the activations that is not saved if those of the blocks are computed again:
        all of them but the largest block's, which are back when its backward pass begins."""
        total = sum(self.sizes.values())
        by_block: dict[int, int] = {}
        for key, number in self.blocks.items():
            if key not in self.inputs:
                by_block[number] = by_block.get(number, 0) + self.sizes[key]
        dropped = sum(by_block.values()) - max(by_block.values(), default=0)
        return dropped / total if total else 0.0


def recompute_saving(
    model: nn.Module, blocks: list[nn.Module], compute_loss: Callable[[], Tensor]
) -> float:
    """The part of the activations that recomputing these blocks saves. `compute_loss` runs the
    model, which keeps all activations at this time."""
    activations = SavedActivations()
    ignored = {
        value.untyped_storage().data_ptr() for value in (*model.parameters(), *model.buffers())
    }
    record = partial(activations.record, ignored)
    with (
        _observed(blocks, activations),
        torch.autograd.graph.saved_tensors_hooks(record, _unchanged),
    ):
        loss = compute_loss()
    del loss  # until here the graph holds what was saved, so that no storage is used twice
    return activations.saving()


@contextmanager
def _observed(blocks: list[nn.Module], activations: SavedActivations) -> Iterator[None]:
    handles = []
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(partial(activations.enter, number)))
        handles.append(block.register_forward_hook(activations.leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
