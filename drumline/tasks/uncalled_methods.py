"""Finds methods of a Task that only another library would call, so that a user learns that they are never called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from drumline.tasks.base import Task

_OPTIM = "the settings choose it: --optim.name, --optim.lr, --optim.schedule and the others of --help"
_LOSS = "write loss(model, batch), which training and evaluation both call"
_LOOP = "to have the loop yourself, use DDPManager (docs/own-loop.md)"
_INSTEAD = {
    r"configure_optimizers|create_optimizer\w*|create_scheduler|optimizer_step|lr_scheduler_step": _OPTIM,
    r"(training|train|validation|val|test|eval)_step(_end)?|compute_loss|forward": _LOSS,
    r"predict_step": "load the model into a script with drumline.load_checkpoint",
    r"(get_)?train_dataloader": "write train_data(), which returns the dataset; --train.batch_size makes batches",
    r"(get_)?(val|validation|test|eval)_dataloader": "write eval_data(), which returns the dataset",
    r"prepare_data|configure_model": "write train_data(), eval_data() and model(); every rank calls them",
    r"compute_metrics|(training|validation|test)_epoch_end": "give sums as Loss(metrics=...), or write report(means)",
    r"on_[a-z]\w*": f"there are no such hooks: report(means) has the numbers of each log line and evaluation; {_LOOP}",
    r"backward|configure_gradient_clipping|configure_callbacks|fit": _LOOP,
}


def uncalled_methods(task: type[Task]) -> Iterator[str]:
    """A message for each method that looks like another library's and that the task does not call itself."""
    methods = {
        name: value
        for one in reversed(task.__mro__)
        if issubclass(one, Task) and not one.__module__.startswith("drumline.")
        for name, value in vars(one).items()
        if callable(value) or isinstance(value, staticmethod | classmethod | property)
    }
    for name in methods:
        instead = next((use for names, use in _INSTEAD.items() if re.fullmatch(names, name)), None)
        if instead is not None and not _is_used(name, methods):
            yield f"{task.__name__}.{name}() is never called: {instead}"


def _is_used(name: str, methods: dict[str, Any]) -> bool:
    return any(
        isinstance(method, FunctionType) and name in _names_in(method.__code__)
        for other, method in methods.items()
        if other != name
    )


def _names_in(code: CodeType) -> set[str]:
    """Every name that a function looks up, those inside it included."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)
