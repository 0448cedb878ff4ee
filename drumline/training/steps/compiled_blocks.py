"""torch.compile with a way back: a function that cannot be compiled runs uncompiled. And the blocks
of a sharded model, each compiled by itself, since its parameters are gathered between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from drumline.base.errors import log
from drumline.parallel.blocks import find_blocks
from drumline.rank.torch_internals import (
    compile_backward_early,
    compiler_error,
    current_dispatch_mode,
)


def compile_blocks(model: nn.Module, wrap: Sequence[str]) -> None:
    """Let the blocks of a model, or a model without blocks, compile their forward passes when they
    first run with gradients. `wrap`: as for `find_blocks`."""
    compile_once = cache(compiled)  # blocks of one class share it
    for block in list(find_blocks(model, wrap).values()) or [model]:
        # A block whose activations are computed again has one (parallel/recompute.py).
        recomputing = vars(block).get("forward")
        forward: Any = type(block).forward if recomputing is None else recomputing.func
        # A partial: a deep copy copies it right.
        block.forward = partial(_forward, compile_once(forward), forward, block)


def _forward(
    fast: Callable[..., Any],
    plain: Callable[..., Any],
    block: nn.Module,
    *inputs: Any,
    **options: Any,
) -> Any:
    """Evaluations are not compiled, as in other modes; neither is the pass in which operations are
    counted."""
    is_usual = torch.is_grad_enabled() and current_dispatch_mode() is None
    return (fast if is_usual else plain)(block, *inputs, **options)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called; if that fails, it runs uncompiled, with a
    warning."""
    compile_backward_early()
    compiled_function = torch.compile(function)
    is_off = False

    def call(*inputs: Any, **options: Any) -> Any:
        nonlocal is_off
        if not is_off:
            try:
                return compiled_function(*inputs, **options)
            except compiler_error() as error:
                is_off = True
                lines = (line.strip() for line in str(error).splitlines())
                reason = next((line for line in lines if "Error" in line), repr(error))

                log.warning(
                    f"steps are not compiled but run operation by operation, because torch.compile failed: {reason}"
                )

        return function(*inputs, **options)

    return call
