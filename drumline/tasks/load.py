"""Tasks by name: what `drumline train TASK` may say."""

from __future__ import annotations

from collections.abc import Mapping

from drumline.errors import UsageError, did_you_mean
from drumline.tasks.base import Task
from drumline.tasks.classification import ImageClassification
from drumline.tasks.language import LanguageModel
from drumline.tasks.synthetic import Synthetic
from drumline.user_code import is_class_spec, load_class

# Their settings are in config/presets.py under the same names.
BUILT_IN: Mapping[str, type[Task]] = {
    "digits": ImageClassification,
    "cifar10": ImageClassification,
    "text": LanguageModel,
    "synthetic": Synthetic,
}


def load_task(spec: str) -> type[Task]:
    """The task class that a built-in name, `path/to/file.py:ClassName` or `package.module:ClassName` stands for."""
    if is_class_spec(spec):
        return _own_task(spec)
    if spec not in BUILT_IN:
        raise UsageError(
            f"there is no task {spec!r}; {did_you_mean(spec, BUILT_IN)}",
            next_step="a task of your own is named path/to/file.py:ClassName",
        )
    return BUILT_IN[spec]


def _own_task(spec: str) -> type[Task]:
    found = load_class(spec, Task)
    if not issubclass(found, Task):
        raise UsageError(f"{spec} is not a Task", next_step=f"write `class {found.__name__}(drumline.Task)`")
    return found
