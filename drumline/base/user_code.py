"""Names of the user's own classes: `path/to/file.py:ClassName` or `package.module:ClassName`.

Tasks, models and datasets are all named this way, on the command line and in config files;
functions too.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from drumline.base.errors import UsageError, did_you_mean

_PACKAGE = f"{Path(__file__).parents[1]}/"
_PYTHON = f"{Path(inspect.__file__).parent}/"
Built = TypeVar("Built")


def is_class_spec(name: str) -> bool:
    """Whether a name refers to the user's code rather than to something built in."""
    return ":" in name


def is_users_file(filename: str) -> bool:
    """Whether a frame of a traceback is in the user's code, or in a library that it calls: not in
    Drumline, torch or Python's own library."""
    if filename.startswith(("<", _PACKAGE)):
        return False
    if filename.startswith(_PYTHON) and "-packages" not in filename:
        return False
    torch = sys.modules.get("torch")
    if torch is None or not torch.__file__:
        return True
    return not filename.startswith(f"{Path(torch.__file__).parent}/")


def load_class(spec: str) -> type[Any]:
    """The class that `file.py:Class` or `package.module:Class` names."""
    loaded: type[Any] = _load(spec, "class", "ClassName", inspect.isclass)
    return loaded


def find_named(kind: str, name: str, built_in: Mapping[str, Any]) -> Any:
    """What a name refers to: something built in, or a class of the user's."""
    if is_class_spec(name):
        return load_class(name)
    if name not in built_in:
        raise UsageError(
            f"there is no {kind} {name!r}; {did_you_mean(name, built_in)}",
            next_step=f"name a {kind} of your own as path/to/file.py:ClassName",
        )
    return built_in[name]


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names."""
    function: Callable[..., Any] = _load(spec, "function", "function", inspect.isfunction)
    return function


def _load(spec: str, kind: str, example: str, is_kind: Callable[[Any], bool]) -> Any:
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name.isidentifier():
        raise UsageError(
            f"{spec!r} does not name a {kind}",
            next_step=f"write path/to/file.py:{example} or package.module:{example}",
        )
    is_file = module_name.endswith(".py")
    module = _load_file(Path(module_name)) if is_file else _load_module(module_name)
    members = {member: value for member, value in vars(module).items() if is_kind(value)}
    if name in members:
        return members[name]
    prefix = f"{module.__name__}."  # what it only imports is hardly meant
    choices = [
        member for member, value in members.items() if f"{value.__module__}.".startswith(prefix)
    ]
    hint = did_you_mean(name, choices) if choices else "it defines none"
    raise UsageError(f"{module_name} has no {kind} {name!r}; {hint}")


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(
            f"there is no file {path} (looked in {Path.cwd()})",
            next_step="check the path before the colon",
        )
    if not path.stem.isidentifier():
        raise UsageError(
            f"{path} cannot be imported: {path.stem!r} is not a valid module name",
            next_step="rename the file: use letters, digits and underscores only",
        )
    # Imported by its own name, so that DataLoader workers find its classes; its folder joins
    # sys.path, as it does for `python file.py`, so that the file can import its neighbours.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    loaded = sys.modules.get(path.stem)
    if loaded is None:
        return importlib.import_module(path.stem)
    loaded_file = Path(getattr(loaded, "__file__", None) or "")
    if loaded_file.resolve() != path.resolve():
        raise UsageError(
            f"{path} cannot be loaded: a module named {path.stem!r} is already loaded",
            next_step=f"rename {path.name}",
        )
    return loaded


def _load_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module was found; something that it imports was not
        raise UsageError(
            f"there is no module {name!r} on the Python path",
            next_step="check the name before the colon; a file is named with its .py ending",
        ) from error


def build_accepted(
    builder: Callable[..., Built], pool: Mapping[str, Any], *, options: Mapping[str, Any], what: str
) -> Built:
    """Call `builder` with the arguments of `pool` that it accepts, and with all of `options`, which
    it must accept."""
    parameters = inspect.signature(builder).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    accepted = {parameter.name: parameter for parameter in parameters if parameter.kind in named}
    for name in options:
        if name not in accepted and not takes_any:
            raise UsageError(f"{what} takes no option {name!r}; {did_you_mean(name, accepted)}")
    arguments = {name: value for name, value in pool.items() if name in accepted}
    arguments.update(options)
    needed = {name for name, parameter in accepted.items() if parameter.default is parameter.empty}
    if missing := sorted(needed - arguments.keys()):
        raise UsageError(
            f"{what} needs {', '.join(missing)}, which neither the dataset nor the settings provide"
        )
    return builder(**arguments)
