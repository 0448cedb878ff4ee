"""A module that is loaded when somebody asks it for something, not because somebody imports it."""

from __future__ import annotations

import importlib
import sys
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

    def load(self) -> ModuleType:
        """The real one, which takes this one's place."""
        if self.stands_in:
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
