"""A module that is loaded when somebody asks it for something, not because somebody imports it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from drumline.launch.loading import loading

# Names of this kind are looked for in every module by those who search through all of them; these two are for use.
NEEDS_IT = ("__path__", "__all__")


class LateModule(ModuleType):
    """Stands in `sys.modules` for the one of its name, until that is needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in NEEDS_IT:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.load(), name)

    def __dir__(self) -> list[str]:
        return dir(self.load())

    def load(self) -> ModuleType:
        """The real one, which takes this one's place."""
        if self.stands_in:
            if LoadedByThen not in sys.meta_path:
                sys.meta_path.insert(0, LoadedByThen)
            del sys.modules[self.__name__]
            package, _, name = self.__name__.rpartition(".")
            # As it is being loaded, those whom it imports look for it there in turn.
            if vars(sys.modules[package]).get(name) is self:
                delattr(sys.modules[package], name)
        with loading():
            return importlib.import_module(self.__name__)

    @property
    def stands_in(self) -> bool:
        """Whether nobody has asked for the real one yet."""
        return sys.modules.get(self.__name__) is self


class LoadedByThen(Loader):
    """Finds what was loaded between Python's look for it and its search.

    To import `late.part` Python looks for that, then asks `late` for its path, and does not look again. If the question
    has loaded `late` with its parts, it would make a second `late.part` of which nobody else knows.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if target is not None or name not in sys.modules:  # a target is to be loaded once more
            return None
        return importlib.util.spec_from_loader(name, cls(sys.modules[name]))

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It was, by its own loader. Some modules let nobody change them, Python neither."""
        with suppress(AttributeError):
            module.__spec__ = self._spec
