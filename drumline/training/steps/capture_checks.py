"""Whether a step can be captured: a replay runs no Python, so nothing that Python decides may
change. Each check returns the reason against it, as the end of a sentence, or None.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer

from drumline.base.user_code import is_users_file

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, set, dict, deque)
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_SYNCHRONISING = "called a synchronizing CUDA operation"


def find_hook(model: nn.Module, optimizer: Optimizer) -> str | None:
    """A hook is Python that a replay would not call."""
    for name, module in model.named_modules():
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            return (
                f"{name or type(model).__name__} has a hook, which a replayed step would not call"
            )
    if any(getattr(module_hooks, hooks, None) for hooks in _GLOBAL_HOOKS):
        return "there is a hook on all modules, which a replayed step would not call"
    if any(getattr(optimizer, hooks, None) for hooks in _OPTIMIZER_HOOKS):
        return "the optimizer has a hook, which a replayed step would not call"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"the gradient of {name} has a hook, which a replayed step would not call"
    return None


def find_uncopyable(leaves: Iterable[Any], device: torch.device) -> str | None:
    """A batch is copied into the captured memory: it must consist of tensors on the device, and
    plain values."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided or leaf.device != device:
                return f"a batch holds a tensor that is not a plain one on {device} ({leaf.layout}, {leaf.device})"
        elif not isinstance(leaf, _PLAIN):
            return f"a batch holds a {type(leaf).__name__}, which cannot be copied into captured memory"
    return None


@contextmanager
def observed(model: nn.Module, task: object) -> Iterator[list[str]]:
    """Take one eager step inside; afterwards the list holds the reasons against a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught, host_changes(model, task) as reasons:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch warns that it does not detect every synchronization
            torch.cuda.set_sync_debug_mode("warn")
        warnings.simplefilter("always")
        try:
            yield reasons
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits = []
    for warning in caught:
        if _SYNCHRONISING in str(warning.message):
            waits.append(
                f"it waits for the device at {Path(warning.filename).name}:{warning.lineno}"
            )
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    reasons[:0] = waits


@contextmanager
def host_changes(model: nn.Module, task: object) -> Iterator[list[str]]:
    """Afterwards the list names what Python drew, counted or replaced in the block."""
    reasons: list[str] = []
    generators = _generators()
    attributes = _attributes(model, task)
    tensors = _tensors(model, task)
    yield reasons
    reasons += [
        f"it draws random numbers on the host ({name}), and a replayed step would repeat the same ones"
        for name, _, _ in _differences(generators, _generators())
    ]
    reasons += [
        f"{name} changes from step to step ({before}, then {now})"
        for name, before, now in _differences(attributes, _attributes(model, task))
    ]
    reasons += [
        f"{name} is replaced by another tensor in every step"
        for name, _, _ in _differences(tensors, _tensors(model, task))
    ]


def _generators() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy": [*map(str, np.random.get_state())],
        "torch's CPU generator": torch.default_generator.get_state().tolist(),
    }


def _kept(model: nn.Module, task: object) -> Iterator[tuple[str, Any]]:
    """The attributes of modules and the task, by name."""
    modules = {name or type(model).__name__: module for name, module in model.named_modules()}
    for owner, holder in {type(task).__name__: task, **modules}.items():
        yield from (
            (f"{owner}.{name}", value)
            for name, value in vars(holder).items()
            if name not in _OF_TORCH
        )


def _attributes(model: nn.Module, task: object) -> dict[str, str]:
    """Plain values and containers as text. Not the values: NaN differs from itself, and a container
    that grows is still the same object."""

    def text(value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        inner = value.values() if isinstance(value, dict) else value
        is_short = len(value) <= 8 and all(isinstance(entry, _PLAIN) for entry in inner)
        return repr(value) if is_short else f"a {type(value).__name__} of {len(value)}"

    return {
        name: text(value)
        for name, value in _kept(model, task)
        if isinstance(value, _PLAIN + _CONTAINERS)
    }


def _tensors(model: nn.Module, task: object) -> dict[str, int]:
    """The addresses of buffers, and the ids of other tensors, except those with a graph: no later
    step reads them."""
    buffers = {f"the buffer {name}": buffer.data_ptr() for name, buffer in model.named_buffers()}
    attributes = {
        f"the tensor {name}": id(value)
        for name, value in _kept(model, task)
        if isinstance(value, Tensor) and value.grad_fn is None
    }
    return {**buffers, **attributes}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    names = [name for name in before | now if before.get(name) != now.get(name)]
    return [(name, before.get(name), now.get(name)) for name in names]


def user_line(error: BaseException) -> str:
    """` at FILE:LINE`, where in the user's code an error came from, or nothing."""
    first = error.__context__ or error
    frames = traceback.extract_tb(first.__traceback__)
    users_frames = [frame for frame in frames if is_users_file(frame.filename)]
    return (
        f" at {Path(users_frames[-1].filename).name}:{users_frames[-1].lineno}"
        if users_frames
        else ""
    )
