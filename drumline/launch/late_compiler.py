"""torch's compiler (torch._dynamo) is loaded when something is compiled, not because an optimizer is made.

Without this torch loads 800 modules at the first call of an optimizer or of DDP, a third of the time to the first
step, for three things that are known while nothing is compiled: that a function is left out, that a graph ends here,
and how DDP is to be compiled. A small module in its place answers these. Whatever else is asked of it, by torch or by
the user's code, loads the real one, and all is as if that had been there from the beginning.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from drumline.launch.late_module import LateModule

NAME = "torch._dynamo"
# Where torch keeps what came of leaving a function out.
KEPT = "__dynamo_disable"


def load_compiler_late() -> None:
    """From here on. Not before the process group: with a compiler there, torch then clears its caches."""
    if NAME not in sys.modules:
        import torch

        sys.modules[NAME] = torch._dynamo = _Compiler()


class _Compiler(LateModule):
    def __init__(self) -> None:
        super().__init__(NAME)
        self.__spec__ = importlib.util.find_spec(NAME)
        self.left_out: list[tuple[Callable[..., Any], bool]] = []
        self.graph_break = _graph_break
        self.utils = _Compiling(self)

    def disable(self, function: Any = None, recursive: bool = True, **more: Any) -> Any:
        """torch's own functions ask without a wrapping, and keep the answer where it can be mended later."""
        if more != {"wrapping": False} or not self.stands_in:
            return self.load().disable(function, recursive, **more)
        self.left_out.append((function, recursive))
        return function

    def load(self) -> Any:
        is_first = self.stands_in
        real: Any = super().load()
        if is_first:
            for function, recursive in self.left_out:
                setattr(function, KEPT, real.disable(function, recursive, wrapping=False))
            vars(self).update(vars(real))  # for whoever holds this one still
        return real


class _Compiling(ModuleType):
    """What the compiler's `utils` are asked before there is any need of it."""

    def __init__(self, compiler: _Compiler) -> None:
        super().__init__(f"{NAME}.utils")
        self._compiler = compiler

    def get_optimize_ddp_mode(self) -> str:
        """Its default: who sets another loads the compiler for that."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiler.load().utils, name)


def _graph_break(msg: str = "") -> None:
    """There is no graph."""
