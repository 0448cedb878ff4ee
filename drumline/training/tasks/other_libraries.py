"""Methods that look like another library's, which Drumline does not call: what to write in a task
instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import CodeType, FunctionType

from drumline.training.tasks.base import Task

_OPTIM = "write optimizer(model), which returns one, or choose it by --optim.name"
_SCHEDULE = "write schedule(step, total_steps), which returns a factor of the rate, or choose --optim.schedule"
_ON_DEVICE = "write on_device(batch), which gets every batch on its device"
_LOSS = "write loss(model, batch), which training and evaluation both call"
_LOOP = "to write the loop yourself, use DDPManager (docs/own-loop.md)"
_INSTEAD = {
    r"configure_optimizers|create_optimizer\w*|optimizer_step": _OPTIM,
    r"create_scheduler|lr_scheduler_step": _SCHEDULE,
    r"(training|train|validation|val|test|eval)_step(_end)?|compute_loss|forward": _LOSS,
    r"predict_step": "write predict(model, batch), which returns what the model predicts",
    r"(get_)?train_dataloader": "write train_data(), which returns the dataset; --train.batch_size makes batches",
    r"(get_)?(val|validation|test|eval)_dataloader": "write eval_data(), which returns a dataset, or several by name",
    r"prepare_data|configure_model": "write train_data(), eval_data() and model(); every rank calls them",
    r"compute_metrics|(training|validation|test)_epoch_end": "write metrics(), give sums as Loss(metrics=...), or "
    "write report(means)",
    r"on_(after|before)_batch_transfer|transfer_batch_to_device": _ON_DEVICE,
    r"on_(?!device$)[a-z]\w*|configure_callbacks": "write a drumline.Hook and list it in hooks() (docs/hooks.md)",
    r"backward|configure_gradient_clipping|fit": _LOOP,
}


def uncalled_methods(task: type[Task]) -> Iterator[str]:
    """A message for each method that looks like another library's and that the task does not call
    itself."""
    methods = {
        name: value
        for task_class in reversed(task.__mro__)
        if issubclass(task_class, Task) and not task_class.__module__.startswith("drumline.")
        for name, value in vars(task_class).items()
        if callable(value) or isinstance(value, staticmethod | classmethod | property)
    }
    for name in methods:
        instead = next((use for names, use in _INSTEAD.items() if re.fullmatch(names, name)), None)
        functions = [
            method
            for method_name, method in methods.items()
            if method_name != name and isinstance(method, FunctionType)
        ]
        if instead is not None and not any(
            name in _names_in(function.__code__) for function in functions
        ):
            yield f"{task.__name__}.{name}() is never called: {instead}"


def _names_in(code: CodeType) -> set[str]:
    """Every name that a function uses, including functions inside it."""
    inner = [_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
