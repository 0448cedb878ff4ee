"""Activation checkpointing: the activations of a block are dropped after the forward pass and
computed again in the backward pass.

The second forward pass must leave no trace: same dropout, and BatchNorm must not count the batch
twice. What it saves is measured in one forward pass that keeps all activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drumline.base.errors import UsageError
from drumline.parallel.blocks import find_blocks
from drumline.rank.torch_internals import pytree

MARK = "_drumline_recomputed"
"""An attribute of the blocks whose activations are computed again."""
POLICY = "activation_checkpointing"
"""An attribute of a model that does it itself, as those of this package; read only while the
setting is on."""
LEAST_SAVING = 0.05
"""Of the activations; with less, the time that the second forward pass takes is lost."""


def recompute_in_backward(block: nn.Module, inputs: Tensor, *, draws_random: bool) -> Tensor:
    """`block(inputs)`, holding only `inputs` for the backward pass.

    For a block that draws no random numbers the generators' state is not saved.
    """
    recompute = partial(
        checkpoint, block, inputs, use_reentrant=False, preserve_rng_state=draws_random
    )
    # The compiler accepts no hooks here, and needs none: it never updates a buffer twice.
    if torch.compiler.is_compiling() or next(block.buffers(), None) is None:
        outputs: Tensor = recompute()
    else:
        outputs = recompute(context_fn=lambda: (nullcontext(), _buffers_kept(block)))
    return outputs


def is_recomputed(policy: bool | str, number: int) -> bool:
    """Whether block `number` of a model is, by `model.activation_checkpointing`."""
    if isinstance(policy, str):
        return number % int(policy.rpartition(":")[2]) == 0
    return policy


def recompute_blocks(model: nn.Module, policy: bool | str, wrap: Sequence[str] = ()) -> None:
    """Let the blocks of a model compute their activations again; a model of this package does it
    itself. `wrap`: as for `find_blocks`."""
    if policy is False:
        return
    computes_itself = hasattr(model, POLICY)
    blocks = find_blocks(model, () if computes_itself else wrap)
    if computes_itself:
        setattr(model, POLICY, policy)
    elif not blocks:
        raise UsageError(
            f"--model.activation_checkpointing found no blocks in {type(model).__name__}: no class of modules that "
            "holds several layers repeats",
            next_step="name the classes of its blocks with --dist.wrap",
        )
    for number, block in enumerate(reversed(blocks.values())):
        if is_recomputed(policy, number):
            setattr(block, MARK, True)
            if not computes_itself:
                # A partial, which a deep copy of the model copies right.
                block.forward = partial(_forward, block)


def recomputed_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that `recompute_blocks` has chosen. A model's attribute alone says nothing: a
    user's model may have one of that name for something else."""
    return [module for module in model.modules() if hasattr(module, MARK)]


def stop_recomputing(model: nn.Module) -> None:
    """Let a model keep all activations from now on, if `recompute_blocks` has chosen some of its
    blocks."""
    blocks = recomputed_blocks(model)
    if not blocks:
        return
    if hasattr(model, POLICY):
        setattr(model, POLICY, False)
        return
    for block in blocks:
        vars(block).pop("forward", None)


def _forward(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    forward = partial(type(block).forward, block, **options)
    if not block.training or not torch.is_grad_enabled():
        return forward(*inputs)
    if next(block.buffers(), None) is None:
        return checkpoint(forward, *inputs, use_reentrant=False)
    return checkpoint(
        forward,
        *inputs,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _buffers_kept(block)),
    )


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Let the block write into copies of its buffers, and put the real ones back.

    Turning BatchNorm's statistics off would be simpler, but then the two passes would not save the
    same number of tensors, which torch refuses.
    """
    buffers = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)


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
