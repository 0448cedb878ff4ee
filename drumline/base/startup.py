"""How a command starts: when it began, what Ctrl-C does until its ranks run, and how torch is
imported.

Until ranks run, a signal handler exits: importlib drops a KeyboardInterrupt in its callbacks. torch
loads its compiler (torch._dynamo, 800 modules) at the first call of an optimizer or of DDP, a third
of the time to the first step; a placeholder answers calls while nothing is compiled, and any other
use loads the real module.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from drumline.base.errors import ExitCode
from drumline.base.rank_environment import COMMAND_START, LAUNCH_START
from drumline.base.terminal import paragraph

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a launcher and its ranks."""
SAME_SIGNAL_S = 2.0
"""A scheduler, a shell or `timeout` may signal a process and its parent, which passes it on: within
this many seconds they count as one signal."""
INTERRUPTED_EARLY = "interrupted before the first step; rerun the same command"
COMPILER = "torch._dynamo"
# Where torch keeps the result of `disable` for a function.
DISABLED = "__dynamo_disable"
# torch's rules for tensors without data (meta tensors) take a third of its import, and are for
# compilers.
TENSOR_RULES = "torch._meta_registrations"
STORE_LOG = "TORCH_CPP_LOG_LEVEL"
# Programs that search all modules ask each for dunder names; only these two mean that it is used.
NEEDS_REAL = ("__path__", "__all__")
Handler = Callable[[int, FrameType | None], object]
_task_began: float | None = None


# When it began


def now() -> float:
    """Seconds since boot: the clock of the kernel's process start times."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def begin_now() -> None:
    """This standby process begins its work now."""
    global _task_began
    _task_began = now()


def process_start() -> float:
    """When this process began, including Python's own start."""
    if _task_began is not None:
        return _task_began
    after_name = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")


def command_start(environment: Mapping[str, str]) -> float | None:
    """When the launcher of this rank began; None for restarted ranks, and if it runs on another
    host."""
    start = environment.get(COMMAND_START)
    return float(start) if start else None


def launch_start(environment: Mapping[str, str]) -> float:
    """When the launcher of this node began, in Unix seconds, for restarted ranks too; infinity:
    unknown."""
    start = environment.get(LAUNCH_START)
    return float(start) if start else math.inf


# Signals


def set_handler(number: signal.Signals, handler: Handler | signal.Handlers) -> None:
    """Set it, unless the signal was ignored when the command began (nohup, a shell's `&`): then it
    stays ignored."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)


def exit_handler(code: ExitCode, message: str) -> Handler:
    """A handler for the time in which there is nothing to save and no process to inform."""
    data = paragraph(message).encode() if message else b""

    def end(number: int, frame: FrameType | None) -> None:
        if data:
            os.write(2, data)  # without Python's buffers, which may be in use
        os._exit(code)

    return end


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Makes long imports interruptible."""
    set_handler(signal.SIGINT, exit_handler(ExitCode.INTERRUPTED, message))
    try:
        yield
    finally:
        set_handler(signal.SIGINT, signal.default_int_handler)


def interrupted(run: Path | None, arguments: Sequence[str]) -> str:
    """The last line after Ctrl-C. `run`: the run folder, if known here; `arguments`: those of
    `drumline train`."""
    rerun = "rerun the same command"
    if "--fresh" in arguments:
        rerun += " without --fresh"
    if run is None:
        return f"interrupted; {rerun} to resume from the newest checkpoint, if one was saved"
    if any((run / "checkpoints").glob("step-*")):
        return f"interrupted; {rerun} to resume from the newest checkpoint"
    return "interrupted before the first save; rerun the same command to start from the beginning"


# Importing torch


@contextmanager
def loading() -> Iterator[None]:
    """Imports inside this block are never scanned by the garbage collector: they create some
    100,000 objects."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def load_torch_quietly(*, computes: bool) -> None:
    """Import torch without its C++ logs: its store logs a lost connection with a stack, we print
    one line. The ranks' log level does not change. `computes`: whether this process may use
    tensors."""
    if "torch" in sys.modules:
        return
    if not computes:
        sys.modules[TENSOR_RULES] = LateModule(TENSOR_RULES)
    is_ours = STORE_LOG not in os.environ
    os.environ.setdefault(STORE_LOG, "ERROR")
    with loading():
        import torch.distributed.launcher.api  # noqa: F401

    if is_ours:
        del os.environ[STORE_LOG]


def quiet_profiler() -> None:
    """Before torch's profiler is used for the first time: without this it prints when it starts and
    stops."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")


def default_procs() -> int:
    """One rank per GPU, or one rank on a machine without GPUs."""
    load_torch_quietly(computes=True)  # if it is one, this process becomes the rank
    import torch

    return max(1, torch.cuda.device_count())


class LateModule(ModuleType):
    """A placeholder in `sys.modules`, replaced by the real module at its first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in NEEDS_REAL:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.load(), name)

    def __dir__(self) -> list[str]:
        return dir(self.load())

    def load(self) -> ModuleType:
        """The real module, which replaces this one."""
        if self.is_placeholder:
            if LoadedMeanwhile not in sys.meta_path:
                sys.meta_path.insert(0, LoadedMeanwhile)
            del sys.modules[self.__name__]
            package, _, name = self.__name__.rpartition(".")
            # While it loads, the modules that it imports look for it there.
            if vars(sys.modules[package]).get(name) is self:
                delattr(sys.modules[package], name)
        with loading():
            return importlib.import_module(self.__name__)

    @property
    def is_placeholder(self) -> bool:
        """Whether the real module has not been loaded yet."""
        return sys.modules.get(self.__name__) is self


class LoadedMeanwhile(Loader):
    """Finds a module that was loaded while Python was importing it: to import `late.part`, Python
    checks `sys.modules`, then asks `late` for its path, which loads both, and would create a second
    `late.part`."""

    @classmethod
    def find_spec(
        cls, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if target is not None or name not in sys.modules:  # a target is to be reloaded
            return None
        return importlib.util.spec_from_loader(name, cls(sys.modules[name]))

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Its own loader has run it. Some modules do not allow Python to set attributes on them."""
        with suppress(AttributeError):
            module.__spec__ = self._spec


def load_compiler_late() -> None:
    """Install the placeholder. Not before the process group exists: torch clears the compiler's
    caches there."""
    if COMPILER not in sys.modules:
        import torch

        sys.modules[COMPILER] = torch._dynamo = _LateCompiler()


class _LateCompiler(LateModule):
    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.__spec__ = importlib.util.find_spec(COMPILER)
        self.left_out: list[tuple[Callable[..., Any], bool]] = []
        self.graph_break = lambda msg="": None  # there is no graph
        # The default mode: setting another one loads the compiler.
        self.utils = _LatePart(self, "utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
        # A second process group clears this cache, which is empty then.
        self.trace_rules = _LatePart(self, "trace_rules", clear_lru_cache=lambda: None)

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """torch's own functions ask with `wrapping=False`, and keep the answer where it can be
        corrected later."""
        if options != {"wrapping": False} or not self.is_placeholder:
            return self.load().disable(function, recursive, **options)
        self.left_out.append((function, recursive))
        return function

    def load(self) -> Any:
        is_first = self.is_placeholder
        real: Any = super().load()
        if is_first:
            for function, recursive in self.left_out:
                setattr(function, DISABLED, real.disable(function, recursive, wrapping=False))
            vars(self).update(vars(real))  # for code that still holds the placeholder
        return real


class _LatePart(ModuleType):
    """A module of the compiler before the compiler is loaded."""

    def __init__(self, compiler: _LateCompiler, part: str, **answers: Callable[[], Any]) -> None:
        """`answers`: functions whose result is known without it."""
        super().__init__(f"{COMPILER}.{part}")
        vars(self).update(answers, _load=lambda: getattr(compiler.load(), part))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._load(), name)
