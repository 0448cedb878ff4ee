"""A task's own settings (`--task.NAME`): the annotated attributes with a default in the user's
class.

Flags and files hold them as they were given until the task is loaded, which imports torch; then
`resolve` checks them.
"""

from __future__ import annotations

import inspect
import sys
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from drumline.config.fields import TASK_SECTION, UNIONS, Field
from drumline.config.schema import Bounds

PLAIN_TYPES = (int, float, bool, str)


def task_fields(task: type[Any], base: type[Any]) -> dict[str, Field]:
    """The settings of a task by path, those that it inherits first. Names of `base`, which is
    Drumline's, names with an underscore and other types are no settings."""
    fields = {}
    taken = {*dir(base), *_annotations(base), "config"}
    for cls in reversed(task.__mro__):
        if not issubclass(cls, base) or cls.__module__.startswith("drumline."):
            continue
        for name, declared in _annotations(cls).items():
            annotation = _evaluated(declared, cls)
            is_own = not name.startswith("_") and name not in taken
            if is_own and hasattr(task, name) and _is_setting_type(annotation):
                fields[f"{TASK_SECTION}.{name}"] = Field(annotation, getattr(task, name))
    return fields


def _annotations(cls: type[Any]) -> dict[str, Any]:
    if sys.version_info >= (3, 14):  # a name that only type checkers import must not end the run
        from annotationlib import Format

        return inspect.get_annotations(cls, format=Format.FORWARDREF)
    return inspect.get_annotations(cls)


def _evaluated(annotation: Any, cls: type[Any]) -> Any:
    """The type that an annotation names. Not by get_type_hints, which fails for all if one is
    unknown at run time."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(sys.modules[cls.__module__]), dict(vars(cls)))  # noqa: S307 - the user's own code
    except Exception:
        return None


def _is_setting_type(annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    arguments = get_args(annotation)
    if kind is Annotated:
        return isinstance(arguments[1], Bounds) and _is_setting_type(arguments[0])
    if kind in UNIONS:
        inner = [argument for argument in arguments if argument is not NoneType]
        is_scalar = len(inner) == len(arguments) and all(
            argument in PLAIN_TYPES for argument in inner
        )
        return is_scalar or (len(inner) == 1 and _is_setting_type(inner[0]))
    if kind is Literal:
        return all(isinstance(argument, str) for argument in arguments)
    if kind is tuple:
        alike = {argument for argument in arguments if argument is not Ellipsis}
        return len(arguments) > 1 and len(alike) == 1 and alike.pop() in PLAIN_TYPES
    return kind in PLAIN_TYPES
