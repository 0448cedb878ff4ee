"""Activation checkpointing of one block: its activations are dropped after the forward pass and computed again in the
backward pass.

The second forward pass must leave no trace: same dropout, and BatchNorm must not count the batch twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(block: nn.Module, inputs: Tensor, *, draws_random: bool) -> Tensor:
    """`block(inputs)`, holding only `inputs` for the backward pass.

    For a block that draws no random numbers the generators' state is not saved.
    """
    recompute = partial(checkpoint, block, inputs, use_reentrant=False, preserve_rng_state=draws_random)
    # The compiler accepts no hooks here, and needs none: it never updates a buffer twice.
    if torch.compiler.is_compiling() or next(block.buffers(), None) is None:
        outputs: Tensor = recompute()
    else:
        outputs = recompute(context_fn=lambda: (nullcontext(), _buffers_kept(block)))
    return outputs


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Let the block write into copies of its buffers, and put the real ones back.

    Turning BatchNorm's statistics off would be simpler, but then the two passes would not save the same number
    of tensors, which torch refuses.
    """
    kept = [
        (module, name, buffer) for module in block.modules() for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
