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
    torch = sys.modules.get("torch")
    of_torch = (f"{Path(torch.__file__).parent}/",) if torch is not None and torch.__file__ else ()
    is_pythons = filename.startswith(_PYTHON) and "-packages" not in filename
    return not is_pythons and not filename.startswith(("<", _PACKAGE, *of_torch))


def load_class(spec: str, base: type[Any] = object) -> type[Any]:
    """The class that `file.py:Class` or `package.module:Class` names. `base`: for an unknown name,
    subclasses of it are suggested."""
    found: type[Any] = _load(spec, "class", "ClassName", inspect.isclass, base)
    return found


def find_named(kind: str, name: str, built_in: Mapping[str, Any], base: type[Any] = object) -> Any:
    """What a name refers to: something built in, or a class of the user's (`base` as for
    `load_class`)."""
    if is_class_spec(name):
        return load_class(name, base)
    if name not in built_in:
        raise UsageError(
            f"there is no {kind} {name!r}; {did_you_mean(name, built_in)}",
            next_step=f"name a {kind} of your own as path/to/file.py:ClassName",
        )
    return built_in[name]


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `package.module:function` names."""
    found: Callable[..., Any] = _load(spec, "function", "function", inspect.isfunction)
    return found


def _load(
    spec: str, kind: str, example: str, is_one: Callable[[Any], bool], base: type[Any] = object
) -> Any:
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name.isidentifier():
        raise UsageError(
            f"{spec!r} does not name a {kind}",
            next_step=f"write path/to/file.py:{example} or package.module:{example}",
        )
    module = (
        _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    )
    known = {known: value for known, value in vars(module).items() if is_one(value)}
    if name in known:
        return known[name]
    # Suggest what a file defines before what it imports, such as a base class.
    fitting = {
        one: value for one, value in known.items() if base is object or issubclass(value, base)
    }
    own = [
        one
        for one, value in fitting.items()
        if f"{value.__module__}.".startswith(f"{module.__name__}.")
    ]
    choices = own or [one for one, value in fitting.items() if value is not base]
    none = "it defines none" if base is object else f"it defines no {base.__name__}"
    raise UsageError(
        f"{module_name} has no {kind} {name!r}; {did_you_mean(name, choices) if choices else none}"
    )


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
    known = sys.modules.get(path.stem)
    if (
        known is not None
        and Path(getattr(known, "__file__", None) or "").resolve() == path.resolve()
    ):
        return known
    if known is not None:
        raise UsageError(
            f"{path} cannot be loaded: a module named {path.stem!r} is already loaded",
            next_step=f"rename {path.name}",
        )
    return importlib.import_module(path.stem)


def _load_module(name: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
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
    given = {**{name: value for name, value in pool.items() if name in accepted}, **options}
    needed = {name for name, parameter in accepted.items() if parameter.default is parameter.empty}
    if missing := sorted(needed - given.keys()):
        raise UsageError(
            f"{what} needs {', '.join(missing)}, which neither the dataset nor the settings provide"
        )
    return builder(**given)
