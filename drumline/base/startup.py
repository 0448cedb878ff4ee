"""How a command starts: when it began, what Ctrl-C does until its ranks run, and how torch is
imported, and where its compiler keeps what it compiled.

Until ranks run, a signal handler exits: importlib drops a KeyboardInterrupt in its callbacks.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from drumline.base.errors import ExitCode, UsageError
from drumline.base.processes import TICKS_PER_S, parse_stat
from drumline.base.rank_environment import COMMAND_START, LAUNCH_START
from drumline.base.text import paragraph
from drumline.base.untrusted import check_own_folder

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a launcher and its ranks."""
SAME_SIGNAL_S = 2.0
"""A scheduler, a shell or `timeout` may signal a process and its parent, which passes it on: within
this many seconds they count as one signal."""
INTERRUPTED_EARLY = "interrupted before the first step; rerun the same command"
STORE_LOG = "TORCH_CPP_LOG_LEVEL"
Handler = Callable[[int, FrameType | None], object]
_task_began: float | None = None
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_CACHE = "TRITON_CACHE_DIR"


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
    stat = parse_stat(Path("/proc/self/stat").read_bytes())
    return stat.start_ticks / TICKS_PER_S


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


def load_torch_quietly() -> None:
    """Import torch without its C++ logs: its store logs a lost connection with a stack, we print
    one line. The ranks' log level does not change."""
    if "torch" in sys.modules:
        return
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
    load_torch_quietly()
    import torch

    return max(1, torch.cuda.device_count())


# The folder of torch's compiler, which later runs load as code, is private to this user: torch's own
# default is `torchinductor_USER` in the temporary directory, and whoever makes it first decides what
# runs.


def use_private_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's and Triton's variables, for this process and those that it starts, unless the
    user has; a folder that others can write to is refused. Call it before torch's compiler is
    loaded, which sets torch's own default. The folder is on a local disk, as torch's own: a home
    directory may be on a network file system, which is slow for many small files."""
    for variable in (INDUCTOR_CACHE, TRITON_CACHE):
        folder = environment.get(variable)
        # Where it cannot be made, torch reports it when it compiles, and most runs compile nothing.
        if folder and _make(Path(folder)):
            _refuse_if_shared(Path(folder), variable)
    if not environment.get(INDUCTOR_CACHE):
        private_folder = Path(tempfile.gettempdir(), f"drumline-compile-{os.geteuid()}")
        _make(private_folder)
        # also if someone else may make it later
        _refuse_if_shared(private_folder, INDUCTOR_CACHE)
        environment[INDUCTOR_CACHE] = str(private_folder)
    if not environment.get(TRITON_CACHE):
        environment[TRITON_CACHE] = str(Path(environment[INDUCTOR_CACHE], "triton"))


def _refuse_if_shared(folder: Path, variable: str) -> None:
    if danger := _danger(folder):
        raise UsageError(
            f"torch runs code from its compile cache {folder}, which is not safe: {danger}",
            next_step=f"set {variable} to a new folder that only you can write to",
        )


def _make(folder: Path) -> bool:
    """Whether it exists now."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.path.lexists(folder)


def _danger(folder: Path) -> str | None:
    """How others could place code in this folder; None: only this user and root can."""
    try:
        check_own_folder(folder, follow_links=True)
        entry = folder.stat()
    except OSError as error:
        return error.strerror
    if entry.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it (mode {stat.S_IMODE(entry.st_mode):o})"
    return None
