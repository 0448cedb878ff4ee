"""The floating-point operations (FLOPs) of a model, counted once from its own operations.

Counted are matrix products, convolutions and attention, forward and backward: what the model needs,
not what the device does. What the backward pass computes again is not counted, be it by activation
checkpointing or inside an attention kernel; attention with a mask counts in full. torchtitan and
the PaLM paper count in the same way.

Gradients come from `torch.autograd.grad`, which calls no hook of DDP. Attention counts twice as
much in the backward pass, whichever kernel computes it; torch's own FlopCounterMode adds what GPU
kernels compute again, and does not know the CPU's kernel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from drumline.rank.torch_internals import DispatchMode


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """The FLOPs of one forward and backward pass over some samples."""

    total: int
    num_samples: int
    num_tokens: int | None
    arithmetic: str
    """In which most of them are done: `bfloat16`, `float16`, `tf32`, `float32`, ..."""

    def of(self, *, samples: float, tokens: float | None) -> float:
        """The FLOPs of that much data: by its tokens if they are known, since samples may have
        different lengths."""
        if tokens is not None and self.num_tokens:
            return self.total / self.num_tokens * tokens
        return self.total / self.num_samples * samples


def count_flops(
    compute_loss: Callable[[], Tensor],
    parameters: Iterable[nn.Parameter] | None,
    *,
    num_samples: int,
    num_tokens: int | None,
) -> ModelFlops | None:
    """Count one pass; None: it has operations whose FLOPs are unknown, or none. No `.grad` is
    touched and no gradient hook of DDP is called, unless `parameters` is None: then the backward
    pass is a usual one. The caller restores what `compute_loss` changes. Raises if the pass fails,
    or if a part of the backward pass is out of reach (reentrant checkpointing)."""
    searches = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # no search for kernels for so small a batch
    try:
        with _FlopCounter() as counter:
            total = compute_loss()
            counter.is_backward = True
            gradients: Sequence[Tensor | None] = ()
            if parameters is None:
                total.backward()  # type: ignore[no-untyped-call]
            else:
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                gradients = torch.autograd.grad(total, trained, allow_unused=True)
    finally:
        torch.backends.cudnn.benchmark = searches
    leaves_out = any(gradient is None for gradient in gradients)
    if leaves_out and any(issubclass(type(node), BackwardCFunction) for node in graph(total)):
        raise RuntimeError("a backward pass in Python may reach more parameters")
    if counter.has_unknown or not (flops := counter.flops):
        return None
    (dtype, operation), _ = flops.most_common(1)[0]
    if dtype == torch.float32 and torch.cuda.is_available():
        allowed = torch.backends.cudnn if operation == "convolution" else torch.backends.cuda.matmul
        arithmetic = "tf32" if allowed.allow_tf32 else "float32"
    else:
        arithmetic = str(dtype).removeprefix("torch.")
    return ModelFlops(
        total=flops.total(), num_samples=num_samples, num_tokens=num_tokens, arithmetic=arithmetic
    )


def graph(total: Tensor) -> Iterator[Node]:
    """Every node of the backward pass from `total`."""
    visited = set()
    waiting = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


class _FlopCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of the operations that run under it, by type and kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[tuple[torch.dtype, str]] = Counter()
        self.has_unknown = False
        self.is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        result = func(*args, **(kwargs or {}))
        self.has_unknown |= name in _UNKNOWN
        # In a backward pass gradients are only on where a part of the forward pass is repeated.
        if name in _FORMULAS and not (self.is_backward and torch.is_grad_enabled()):
            kind, formula = _FORMULAS[name]
            self.flops[args[0].dtype, kind] += formula(args, result)
        return result


def _product(left: int) -> tuple[str, Callable[[Any, Any], int]]:
    """A matrix product whose left factor is this argument."""
    return "product", lambda args, result: 2 * result.numel() * args[left].shape[-1]


def _convolution(inputs: Tensor, weight: Tensor, outputs: Tensor, is_transposed: bool) -> int:
    return 2 * (inputs if is_transposed else outputs).numel() * math.prod(weight.shape[1:])


def _attention(query: Tensor, key: Tensor, value: Tensor) -> int:
    return 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


_FORMULAS: dict[str, tuple[str, Callable[[Any, Any], int]]] = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "_addmm_activation"), _product(1)),
    "convolution": (
        "convolution",
        lambda args, result: _convolution(args[0], args[1], result, args[6]),
    ),
    # Of the inputs' and the weight's gradient, those that are wanted.
    "convolution_backward": (
        "convolution",
        lambda args, _: sum(args[10][:2]) * _convolution(args[1], args[2], args[0], args[7]),
    ),
}
for _kernel in ("flash", "efficient", "cudnn", "fused"):
    for _form in ("", "_for_cpu", "_overrideable"):
        _name = f"_scaled_dot_product_{_kernel}_attention{_form}"
        _FORMULAS[_name] = "attention", lambda args, _: _attention(*args[:3])
        _FORMULAS[f"{_name}_backward"] = "attention", lambda args, _: 2 * _attention(*args[1:4])
_UNKNOWN = {"_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer"}
