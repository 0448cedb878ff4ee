"""What a step computes in vain: the calls of modules in one step before those that are recorded.

Arithmetic on padding, or for an output that nothing uses, looks as any other in a trace. Here the
inputs, the outputs and the gradients of modules are looked at, which a recorded step could not pay
for.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from drumline.rank.profiled.stack_sampler import line_of_user
from drumline.rank.torch_internals import has_compiled, is_in_backward, pytree
from drumline.runs.profile_files import SampledLine, WastedWork, WasteKind

MOST_CALLS = 10_000
WIDE = 256
"""A matrix with so many columns may have one-hot rows."""

MOSTLY_ZEROS = 0.95
SOME_DENORMALS = 0.05
FEW_ROWS = 0.3
"""Where a linear layer's gradient has no more rows than this, the others are computed in vain."""

SOME_NUMBERS = 0.2
"""Rows with fewer numbers in them are those that a maximum chose, one for each number."""

MANY_CALLS = 8
FEW_SAMPLES = 4
"""In so many the time of most operations is that of their call."""

SHORTEST = 8
"""A dimension with fewer places is not looked at for padding."""

HALF_TYPES = (torch.bfloat16, torch.float16)
MANY_EQUAL = 0.5
"""Of the samples of a batch that were in it before: fewer are alike by chance."""

MOST_COMPARED = 1 << 22
"""Of a larger tensor some numbers are compared."""

PRODUCTS = {
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
    "matmul",
    "__matmul__",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
}
"""The functions of torch in which nearly all arithmetic is."""


@dataclass
class _Call:
    """One call of a module, or of a product of matrices."""

    module: nn.Module | str
    """Or the name of the product."""

    line: SampledLine
    outer: _Call | None
    waste: WasteKind | None = None
    part: float = 1.0
    """How much of the call is `waste`."""

    num_samples: int = 0
    """The first dimension of its first input; 0: not known."""

    began_s: float = 0.0
    seconds: float = 0.0
    is_differentiated: bool = False
    """Whether its output has a gradient, if anything uses it."""

    used: float | None = None
    """Which part of the gradient's rows is not zero; None: there was no gradient."""

    @property
    def wasted(self) -> tuple[WasteKind | None, float]:
        """The kind, and which part of the call."""
        if self.waste or not self.is_differentiated:
            return self.waste, self.part

        if self.used is None:
            return "unused_output", 1.0
        if self.used <= FEW_ROWS:
            return "zero_gradients", 1 - self.used
        return None, 0.0

    def is_inside_wasted(self) -> bool:
        """Whether a call that it is a part of is wasted."""
        outer = self.outer
        while outer is not None:
            if outer.wasted[0]:
                return True
            outer = outer.outer

        return False


class StepInspection(TorchFunctionMode):
    """Call `start` before the step and `stop` after it. `modules`: those that are trained."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._names = dict(_names_of(modules))
        self._open: list[_Call] = []
        """The innermost last. In a backward pass on a thread of its own, as on a GPU, that of the
        step waits."""

        self._calls: list[_Call] = []
        self._inputs: dict[int, set[tuple[object, ...]]] = defaultdict(set)
        """By the `id` of the module: what tells the inputs of its calls apart."""

        self._num_calls: Counter[nn.Module] = Counter()
        """How often each of those that are trained is called."""

        self._padding = 0.0
        """Of all batches, the largest part."""

        self._tables: list[WastedWork] = []
        """Embeddings with unused rows."""

        self._hooks: list[Any] = []
        self._inspected_s = 0.0
        """How long this inspection took, which no call counts."""

        self._now_s = 0.0

    def start(self) -> None:
        """A compiled step is left alone: it would be compiled again for the hooks."""
        if has_compiled():
            return

        self.__enter__()  # type: ignore[no-untyped-call]

        # Checkpointing ends what it computes again with an exception.
        self._hooks = [
            module_hooks.register_module_forward_pre_hook(self._open_call),
            module_hooks.register_module_forward_hook(self._close_call, always_call=True),
            register_optimizer_step_pre_hook(self._look_at_gradients),
        ]

        for root in self._modules:
            hook = root.register_forward_pre_hook(self._look_at_batch, with_kwargs=True)
            self._hooks.append(hook)

    def stop(self) -> tuple[WastedWork, ...]:
        """What was seen; all is as before `start`."""
        if not self._hooks:
            return ()

        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

        works = list(self._tables)
        if self._padding:
            works.append(WastedWork(kind="padding", part=self._padding))

        with self._aside():
            self._mark_single_samples()
            works.extend(self._wasted_calls())

        return tuple(works)

    @property
    def num_passes(self) -> int | None:
        """How many forward passes of a model the step has had, one for each micro-batch; None: not known,
        as of a compiled step."""
        return max(self._num_calls.values(), default=None)

    # Hooks. What cannot be looked at, as in a CUDA graph that is captured or under torch.func, is
    # left out: an inspection never ends a training.

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """A product of matrices is a call, too, also inside torch's modules."""
        name = getattr(function, "__name__", "")
        if name not in PRODUCTS:
            return function(*args, **(kwargs or {}))

        self._open_call(name, args)
        output = function(*args, **(kwargs or {}))
        self._close_call(name, args, output)
        return output

    def _look_at_batch(self, root: nn.Module, inputs: Any, named_inputs: Any) -> None:
        """A model is called with a batch."""
        with self._aside():
            if not torch.is_grad_enabled() or is_in_backward():
                return

            self._num_calls[root] += 1
            part = padding_of(tensors_in([inputs, named_inputs]))
            self._padding = max(self._padding, part)

    def _look_at_gradients(self, *_: Any) -> None:
        """Before the optimizer uses them: many loops discard them in the same step."""
        with self._aside():
            self._tables = list(self._embeddings()) or self._tables

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Nothing of it may fail the training."""
        began_s = time.perf_counter()
        self._now_s = began_s - self._inspected_s

        with suppress(Exception):
            yield

        self._inspected_s += time.perf_counter() - began_s

    def _open_call(self, module: nn.Module | str, inputs: Any) -> None:
        """The module, or the product, is called."""
        with self._aside():
            if not self._may_look():
                return

            outer = self._open[-1] if self._open else None
            call = _Call(module, line_of_user(sys._getframe(1)), outer)
            tensors = tensors_in(inputs)
            call.num_samples = len(tensors[0]) if tensors and tensors[0].dim() else 0

            if is_in_backward():
                call.waste = "recomputation"
            elif tensors:
                self._look_at_inputs(call, inputs, tensors)

            self._open.append(call)
            self._calls.append(call)
            call.began_s = self._now_s

    def _may_look(self) -> bool:
        """Not in a CUDA graph that is captured, where nothing is trained, or after very many calls."""
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        return torch.is_grad_enabled() and not is_capturing and len(self._calls) < MOST_CALLS

    def _look_at_inputs(self, call: _Call, inputs: Any, tensors: Sequence[Tensor]) -> None:
        """Whether a call gets the same numbers as an earlier one, or the same samples several times."""
        if isinstance(call.module, str | nn.RNNBase):
            call.waste = _slow_numbers(tensors)
        if isinstance(call.module, str):
            return

        rows = [_row_numbers(tensor) for tensor in tensors]
        leaves = pytree.tree_leaves(inputs)
        options = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        key = (*options, *(row.numpy().tobytes() for row in rows))

        previous = self._inputs[id(call.module)]
        if key in previous:
            call.waste = "repeated_work"

        previous.add(key)

        samples = torch.stack([row for row in rows if len(row) == len(rows[0])], 1)
        num_different = len(set(map(tuple, samples.tolist())))
        equal = 1 - num_different / len(samples)
        is_wide = tensors[0].numel() >= SHORTEST * len(samples)

        if not call.waste and is_wide and num_different > 1 and equal >= MANY_EQUAL:
            call.waste = "repeated_work"
            call.part = equal

    def _close_call(self, module: nn.Module | str, inputs: Any, output: Any) -> None:
        """It returns."""
        with self._aside():
            if not any(call.module is module for call in self._open):
                return

            call = self._open.pop()
            while call.module is not module:  # one that raised an error
                call = self._open.pop()

            call.seconds = self._now_s - call.began_s
            if call.waste == "recomputation" or isinstance(module, str):
                return

            for tensor in tensors_in(output):
                if tensor.requires_grad and tensor.grad_fn is not None:
                    call.is_differentiated = True
                    tensor.register_hook(partial(_on_gradient, call))  # type: ignore[no-untyped-call]

    # What was seen

    def _mark_single_samples(self) -> None:
        """A line that calls a module for one sample, or a model for a few, again and again."""
        by_line: dict[SampledLine, list[_Call]] = defaultdict(list)

        for call in self._calls:
            few = FEW_SAMPLES if call.module in self._modules else 1
            if self._is_forward(call) and 0 < call.num_samples <= few:
                by_line[call.line].append(call)

        for calls in by_line.values():
            if len(calls) >= MANY_CALLS:
                for call in calls:
                    call.waste = call.waste or "single_samples"

    def _wasted_calls(self) -> Iterator[WastedWork]:
        """By kind, module and line, as parts of the forward passes."""
        outermost_s = sum(call.seconds for call in self._calls if self._is_forward(call))
        has_backward = any(call.used is not None for call in self._calls)
        seconds: dict[tuple[WasteKind, str, SampledLine], float] = defaultdict(float)

        for call in self._calls:
            kind, part = call.wasted
            is_known = call.waste or has_backward
            if kind and is_known and not call.is_inside_wasted():
                seconds[kind, self._name_of(call), call.line] += part * call.seconds

        for (kind, name, line), wasted_s in seconds.items():
            yield WastedWork(kind=kind, part=wasted_s / outermost_s, module=name, line=line)

    def _name_of(self, call: _Call) -> str:
        """The name of its module, or of that which computes the product."""
        if isinstance(call.module, str):
            return call.module if call.outer is None else self._name_of(call.outer)
        return self._names.get(id(call.module), type(call.module).__name__)

    @staticmethod
    def _is_forward(call: _Call) -> bool:
        """Whether it is a forward pass of its own."""
        return call.outer is None and call.waste != "recomputation"

    def _embeddings(self) -> Iterator[WastedWork]:
        """Those of which a batch uses few rows, as parts of the bytes of all gradients."""
        gradients = self._dense_gradients()
        num_bytes = sum(gradient.nbytes for gradient in gradients.values())

        for table in (part for root in self._modules for part in root.modules()):
            if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
                continue

            gradient = gradients.get(id(table.weight))
            if gradient is None:
                continue

            unused = 1 - _rows_with_numbers(gradient)
            part = unused * gradient.nbytes / num_bytes
            yield WastedWork(kind="sparse_gradients", part=part, module=self._names[id(table)])

    def _dense_gradients(self) -> dict[int, Tensor]:
        """By the `id` of the parameter."""
        return {
            id(parameter): parameter.grad
            for root in self._modules
            for parameter in root.parameters()
            if type(parameter.grad) is Tensor and parameter.grad.layout == torch.strided
        }


def _names_of(modules: Iterable[nn.Module]) -> Iterator[tuple[int, str]]:
    """The name of each module in its model, by `id`."""
    for root in modules:
        model = getattr(root, "module", root)
        for name, part in model.named_modules():
            yield id(part), name or type(part).__name__


def tensors_in(values: Any) -> list[Tensor]:
    """Those in a value that may be a container."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _row_numbers(tensor: Tensor) -> Tensor:
    """A number for each row, by which equal rows are known."""
    if tensor.layout != torch.strided or tensor.dim() == 0 or not tensor.numel():
        return torch.tensor([float(id(tensor))])

    rows = tensor.detach().reshape(len(tensor), -1)
    rows = rows[:, :: 1 + tensor.numel() // MOST_COMPARED].double()

    generator = torch.Generator(tensor.device).manual_seed(0)
    weights = torch.rand(
        rows.shape[1], generator=generator, dtype=torch.float64, device=tensor.device
    )
    return (rows * weights).sum(1).float().cpu()


def _slow_numbers(tensors: Sequence[Tensor]) -> WasteKind | None:
    """Why a product of these takes longer than it needs to."""
    if any(tensor.dtype == torch.float64 for tensor in tensors):
        return "float64"
    if any(map(_is_mostly_zeros, tensors)):
        return "zeros"

    if tensors[0].device.type != "cpu":
        return None

    if any(map(_has_denormals, tensors)):
        return "denormals"

    is_half = tensors[0].dtype in HALF_TYPES or torch.is_autocast_enabled("cpu")
    return "half_precision" if is_half and not has_fast_half() else None


def _is_mostly_zeros(tensor: Tensor) -> bool:
    """As one-hot rows are, or a graph's matrix; not only zeros, as new weights may be."""
    if tensor.dim() < 2 or tensor.shape[-1] < WIDE:
        return False
    return 0 < int(tensor.count_nonzero()) <= (1 - MOSTLY_ZEROS) * tensor.numel()


def _has_denormals(tensor: Tensor) -> bool:
    """Numbers that are so close to 0 that a CPU computes them many times slower."""
    if not tensor.is_floating_point():
        return False

    sizes = tensor.detach().abs()
    is_denormal = (sizes > 0) & (sizes < torch.finfo(tensor.dtype).tiny)
    return int(is_denormal.count_nonzero()) > SOME_DENORMALS * tensor.numel()


def _on_gradient(call: _Call, gradient: Tensor) -> None:
    """The gradient of an output of the call."""
    with suppress(Exception):
        if gradient.device.type == "cpu" and _has_denormals(gradient):
            call.waste = call.waste or "denormals"

        rows = gradient if isinstance(call.module, nn.Linear) else gradient.reshape(1, -1)
        used = _rows_with_numbers(rows)
        is_chosen_by_maximum = rows.count_nonzero() < SOME_NUMBERS * used * rows.numel()
        call.used = max(call.used or 0.0, 1.0 if is_chosen_by_maximum else used)


def _rows_with_numbers(rows: Tensor) -> float:
    """Which part of the rows is not only zeros."""
    is_used = rows.reshape(-1, rows.shape[-1]).any(1)
    return int(is_used.count_nonzero()) / len(is_used)


def padding_of(tensors: Iterable[Tensor]) -> float:
    """Which part of a batch is padding: the same number, or the same row, from some place of a
    sample to its end. Tensors of one length (words and their mask) have the same padding; of several
    lengths, the largest part counts."""
    ends: dict[int, Tensor] = {}
    for tensor in tensors:
        for length, padded in _ends_by_length(tensor):
            if length in ends and len(ends[length]) == len(padded):
                padded = torch.minimum(padded, ends[length])
            ends[length] = padded

    parts = [float(padded.double().mean()) / length for length, padded in ends.items()]
    return max(parts, default=0.0)


def _ends_by_length(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each dimension that may have padding: its length, and `_constant_ends` along it."""
    for dim in range(1, tensor.dim()):
        length = tensor.shape[dim]
        if length < SHORTEST:
            continue

        padded = _constant_ends(tensor.detach().movedim(dim, -1))
        if padded is not None:
            yield length, padded


def _constant_ends(samples: Tensor) -> Tensor | None:
    """How many of the last places of each sample, in the last dimension, have all the same numbers;
    None: that holds for whole samples, which is no padding."""
    places = samples.reshape(len(samples), -1, samples.shape[-1])
    is_as_last = (places == places[:, :, -1:]).all(1)
    if bool(is_as_last.all()):
        return None

    num_same = is_as_last.flip(-1).long().cumprod(-1).sum(-1)
    is_end = (num_same > 1) & (num_same < places.shape[-1])
    return num_same.where(is_end, 0).cpu()


@cache
def has_fast_half() -> bool:
    """Whether the CPU has instructions for bf16: without them torch computes it in float32, with
    conversions."""
    with suppress(OSError):
        return "bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return True
