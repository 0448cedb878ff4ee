"""Tasks by name: what `drumline train TASK` accepts."""

from __future__ import annotations

from collections.abc import Mapping

from drumline.errors import UsageError, did_you_mean
from drumline.tasks.base import Task
from drumline.tasks.built_in import ImageClassification, LanguageModel, Synthetic
from drumline.user_code import is_class_spec, load_class

# Their settings are in config/presets.py under the same names.
BUILT_IN: Mapping[str, type[Task]] = {
    "digits": ImageClassification,
    "cifar10": ImageClassification,
    "text": LanguageModel,
    "synthetic": Synthetic,
}


def load_task(spec: str) -> type[Task]:
    """The task class of a built-in name, `path/to/file.py:ClassName` or `package.module:ClassName`."""
    if spec in BUILT_IN:
        return BUILT_IN[spec]
    if not is_class_spec(spec):
        raise UsageError(
            f"there is no task {spec!r}; {did_you_mean(spec, BUILT_IN)}",
            next_step="name a task of your own as path/to/file.py:ClassName",
        )
    found = load_class(spec, Task)
    if not issubclass(found, Task):
        raise UsageError(f"{spec} is not a Task", next_step=f"write `class {found.__name__}(drumline.Task)`")
    return found
