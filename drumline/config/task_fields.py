"""A task's own settings (`--task.NAME`): the annotated attributes with a default in the user's
class.

Flags and files hold them as they were given until the task is loaded, which imports torch; then
they are checked here.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from drumline.config.fields import TASK_SECTION, UNIONS, Field, Mismatch
from drumline.config.flags import Layer, Setting, cannot_be_turned_off, missing_value
from drumline.config.schema import Bounds

PLAIN_TYPES = (int, float, bool, str)
HOW_TO_DECLARE = (
    "a setting is an attribute of the class with a type and a default, such as `width: int = 64`; its type is int, "
    "float, bool, str, a Literal of texts, a tuple of one of them, or one of these | None"
)


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


def name_in_task(path: str) -> str:
    return path.removeprefix(f"{TASK_SECTION}.")


def is_in_task(path: str) -> bool:
    return path.startswith(f"{TASK_SECTION}.")


def check_task_settings(layer: Layer, fields: Mapping[str, Field], *, task: str) -> Layer:
    """The layer with the task's own settings checked, too."""
    settings = dict(layer.settings)
    problems = list(layer.problems)
    broken = set(layer.broken)
    for path, setting in layer.settings.items():
        if not is_in_task(path):
            continue
        try:
            settings[path] = _checked(setting, fields, task)
        except Mismatch as mismatch:
            del settings[path]
            problems.append(str(mismatch))
            broken.add(path)
    return Layer(settings, tuple(problems), frozenset(broken))


def _checked(setting: Setting, fields: Mapping[str, Field], task: str) -> Setting:
    path = setting.path
    value = setting.value
    if path not in fields:
        raise Mismatch(f"{setting.name}: unknown setting; {_hint(path, fields, task)}")
    annotation = fields[path].annotation
    if setting.is_text and annotation is not bool:
        if value is True:
            raise Mismatch(missing_value(setting.where, annotation))
        if setting.where == f"--no-{path}":
            raise Mismatch(cannot_be_turned_off(setting.where, path, annotation))
    if annotation is str and value == "":  # a user's own text may be empty
        return setting
    return replace(setting, is_text=setting.is_text and value is not True).coerced(annotation)


def _hint(path: str, fields: Mapping[str, Field], task: str) -> str:
    if not fields:
        return f"{task} has no settings of its own; {HOW_TO_DECLARE}"
    if near := difflib.get_close_matches(name_in_task(path), map(name_in_task, fields), n=1):
        return f"did you mean '{TASK_SECTION}.{near[0]}'?"
    return f"{task} has {', '.join(fields)}; {HOW_TO_DECLARE}"


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
