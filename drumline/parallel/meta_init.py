"""`--dist.meta_init`: gives memory and initial values to the modules of a model that was built on
the meta device, one module at a time on the CPU. Random numbers depend on the seed and the module's
name only, so the weights are the same on every rank and for every sharding.

A module sets its own tensors in `init_weights()` or `reset_parameters()`. What it leaves out is
found by a value that was there before: NaN, or an integer near the largest one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from drumline.base.errors import UsageError
from drumline.rank.tensor_hash import text_hash

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_can_initialize(model: nn.Module) -> None:
    """Refuse a model with a module that cannot be initialized by itself. Before any is: it may take
    long."""
    for name, module in model.named_modules():
        if _tensors_of(module) and _method_of(module) is None:
            raise UsageError(
                f"--dist.meta_init cannot initialize {name or 'the model'} ({type(module).__name__}): it has "
                "parameters or buffers of its own, and no reset_parameters() or init_weights()",
                next_step="add such a method, which sets the tensors of this module, or leave --dist.meta_init off",
            )


class ModuleInit:
    """Initializes the modules of one model; each once. Of parameters that several modules have, the
    first one decides the values."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._done: set[int] = set()
        """The `id` of each module that was initialized."""

        self._made: dict[nn.Parameter, nn.Parameter] = {}
        """By the parameter without memory: the one with memory."""

    def __call__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Initialize these modules, by name, unless that was done before. Called with the modules
        of a block when it is to be sharded, and with all modules at the end."""
        for name, module in modules:
            if id(module) not in self._done and _tensors_of(module):
                self._initialize(name, module)
            self._done.add(id(module))

    def _initialize(self, name: str, module: nn.Module) -> None:
        """Give the module's tensors memory, and let it set them. The random numbers that it draws
        depend on the seed and its name; those of the rest of the program are not touched."""
        initialize = _method_of(module)
        assert initialize is not None
        tied = self._give_memory(module)
        before = {parameter: parameter.detach().clone() for parameter in tied}

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(text_hash(f"{self._seed} {name}") & (2**63 - 1))
            initialize()

            for parameter, values in before.items():
                parameter.copy_(values)

        _check_all_set(name, module, getattr(initialize, "__name__", "init_weights"))

    def _give_memory(self, module: nn.Module) -> list[nn.Parameter]:
        """Replace the module's own tensors. Returns the parameters that are tied to those of
        another module, which has initialized them."""
        tied = []
        for key, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old in self._made:
                tied.append(self._made[old])
            else:
                self._made[old] = nn.Parameter(_unset_like(old), requires_grad=old.requires_grad)

            setattr(module, key, self._made[old])

        for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, key, _unset_like(buffer))

        return tied


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Those that belong to the module itself, and not to one inside it: these its method has to
    set."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _unset_like(old: Tensor) -> Tensor:
    """Memory on the CPU for this tensor, in which `_is_unset` finds what was never written: filled
    with NaN, or with an integer that hardly any model has."""
    new = torch.empty_like(old, device="cpu", requires_grad=False)
    if _may_be_nan(new):
        return new.fill_(math.nan)

    bits = _as_integers(new)
    bits.fill_(_unset_bits(bits))
    return new


def _may_be_nan(tensor: Tensor) -> bool:
    """Whether its type has a NaN; the others are integers and bools."""
    return tensor.is_floating_point() or tensor.is_complex()


def _as_integers(tensor: Tensor) -> Tensor:
    """The same memory as integers: a bool has no largest value."""
    return tensor.view(_BITS[tensor.element_size()])


def _unset_bits(bits: Tensor) -> int:
    """A value that hardly any model has: 165 of 8 bits, 32677 of 16. A bool is 0 or 1."""
    return torch.iinfo(bits.dtype).max - 90


def _is_unset(tensor: Tensor) -> bool:
    """Whether some of it was not written; of integers of 8 bits, which may have any value, whether
    nothing was: one of them may be 165 by chance."""
    if _may_be_nan(tensor):
        if tensor.element_size() == 1:  # fp8, which has no isnan
            tensor = tensor.float()
        return bool(tensor.isnan().any())

    bits = _as_integers(tensor)
    unset = bits == _unset_bits(bits)
    if tensor.dtype in (torch.int8, torch.uint8):
        return tensor.numel() > 0 and bool(unset.all())

    return bool(unset.any())


def _check_all_set(name: str, module: nn.Module, method: str) -> None:
    """Raise if the method has left out a tensor of the module: its memory would be different on
    each rank."""
    own_tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for key, tensor in own_tensors:
        if _is_unset(tensor):
            full_name = f"{name}.{key}".lstrip(".")
            raise UsageError(
                f"--dist.meta_init: {type(module).__name__}.{method}() does not set {full_name}, or sets it to NaN",
                next_step="set all parameters and buffers of the module in it, or leave --dist.meta_init off",
            )


def _method_of(module: Any) -> Callable[[], Any] | None:
    """The method with which a module sets its own tensors, if it has one."""
    method = getattr(module, "init_weights", None) or getattr(module, "reset_parameters", None)
    return method if callable(method) else None
