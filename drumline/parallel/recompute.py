"""Activation checkpointing: the activations of a block are dropped after the forward pass and
computed again in the backward pass.

The second forward pass must leave no trace: same dropout, and BatchNorm must not count the batch
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drumline.base.errors import UsageError
from drumline.parallel.blocks import find_blocks

MARK = "_drumline_recomputed"
"""An attribute of the blocks whose activations are computed again."""

POLICY = "activation_checkpointing"
"""An attribute of a model that does it itself, as those of this package; read only while the
setting is on."""


def recomputed(block: nn.Module, hidden: Tensor, *, draws_random: bool) -> Tensor:
    """The block's output, of which it holds only its input for the backward pass.

    For a block that draws no random numbers the generators' state is not saved.
    """
    call = partial(checkpoint, block, hidden, preserve_rng_state=draws_random)
    # The compiler accepts no hooks here, and needs none: it never updates a buffer twice.
    output: Tensor = _without_trace(call, None if torch.compiler.is_compiling() else block)
    return output


def is_recomputed(policy: bool | str, number: int) -> bool:
    """Whether block `number` of a model is, by `model.activation_checkpointing`: True for all,
    `every:2` for each second one, from the first on."""
    if isinstance(policy, str):
        return number % int(policy.rpartition(":")[2]) == 0
    return policy


def recompute_blocks(model: nn.Module, policy: bool | str, wrap: Sequence[str] = ()) -> None:
    """Let the blocks of a model compute their activations again; a model of this package does it
    itself. `wrap`: as for `find_blocks`."""
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


def _forward(block: nn.Module, *inputs: Any, **options: Any) -> Any:
    """The forward pass of a block that `recompute_blocks` has chosen."""
    forward = partial(type(block).forward, block, **options)
    if not block.training or not torch.is_grad_enabled():
        return forward(*inputs)
    return _without_trace(partial(checkpoint, forward, *inputs), block)


def _without_trace(call: Callable[..., Any], block: nn.Module | None) -> Any:
    """Call torch's `checkpoint` so that the second pass changes no buffer of this block."""
    if block is None or next(block.buffers(), None) is None:
        return call(use_reentrant=False)
    return call(use_reentrant=False, context_fn=lambda: (nullcontext(), _buffers_kept(block)))


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
