"""Runs a script with the watchdog: `python -m drumline.parallel.scripts.script_runner SCRIPT.py
ARGS`, or `-m MODULE ARGS`. Before them, `--profile STEPS FOLDER only|all watched|plain` profiles
some of its steps.

The script is run as Python itself would: it is `__main__`, has its own arguments, path, tracebacks
and exit code, and torch is loaded only if it loads it.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import io
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from drumline.base.rank_environment import own_variables, topology_from
from drumline.base.text import show
from drumline.parallel.scripts import torch_hooks
from drumline.parallel.scripts.script_recorder import ScriptRecorder
from drumline.rank.watched.progress_monitor import ProgressMonitor
from drumline.rank.watched.watched_rank import WatchedRank, watch_script
from drumline.watch.failure_kind import failure_kind
from drumline.watch.heartbeat import HeartbeatWriter, Phase


def main(words: list[str]) -> None:
    """Never returns before the script does; what it raises is raised."""
    if not words:
        sys.exit(
            "usage: python -m drumline.parallel.scripts.script_runner SCRIPT.py|-m MODULE [arguments]"
        )

    if words[0] != "--profile":
        _run_watched(words)
        return

    _, steps, folder, until, how, *program = words
    profile = torch_hooks.ScriptProfile(
        steps=steps,
        folder=Path(folder),
        ends_script=until == "only",
        script=program[0],
    )

    torch_hooks.call_after_torch(profile.observe, "nothing is profiled")
    with profile:
        if how == "watched":
            _run_watched(program)
        else:
            run_program(program)


def _run_watched(words: list[str]) -> None:
    """Run the program observed; as it is where this process is no rank of a job."""
    rank = watch_script(own_variables())
    if rank is None:
        run_program(words)
    else:
        run_program(words, _WatchedScript(rank, words).fail)


def run_program(
    words: list[str], failed: Callable[[BaseException], None] = lambda error: None
) -> None:
    """Run a script or a module as `__main__`. `failed` is called with what it raises."""
    try:
        if words[0] == "-m":
            sys.argv = ["-m", *words[2:]]
            _become(ModuleType("__main__"))
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what `python -m` calls
        else:
            _run_script(words)
    except BaseException as error:
        failed(error)
        _hide_own_frames(error)
        raise


class _WatchedScript:
    """Observes this process to its very end, but not what it forks."""

    def __init__(self, rank: WatchedRank, words: list[str]) -> None:
        topology = topology_from(own_variables())
        self._rank = rank
        self._recorder: ScriptRecorder | None = None
        activity: HeartbeatWriter | None = None

        if topology is not None and topology.world_size > 1:
            self._recorder = ScriptRecorder(
                rank.file("script"),
                topology,
                arguments=words[1:] if words[0] != "-m" else words[2:],
            )

            activity = HeartbeatWriter(rank.file("activity"), rank=topology.rank)
            torch_hooks.observe_torch(activity, self._recorder)

        self._monitor = ProgressMonitor(
            rank.heartbeat,
            patience_s=rank.patience_s,
            sign=lambda: None if activity is None else activity.num_marks,
            also=self._recorder.write if self._recorder else lambda: None,
        )

        self._error: BaseException | None = None
        self._pid = os.getpid()

        # Those that the script registers come before it, and its threads end before those.
        atexit.register(self._close)

    def fail(self, error: BaseException) -> None:
        """The script has raised this."""
        if isinstance(error, Exception) and os.getpid() == self._pid:
            self._error = error
            text = _unused_parameters(error) or str(error).partition("\n")[0]
            name = type(error).__name__
            self._rank.heartbeat.fail(f"{name}: {text}" if text else name, failure_kind(error))

    def _close(self) -> None:
        """The process ends: write what is new, and report that it left."""
        if os.getpid() == self._pid:
            self._monitor.close()
            if self._recorder is not None:
                self._recorder.write()
            if self._error is None:
                self._rank.heartbeat.mark(Phase.LEFT)

            self._rank.close()


def _unused_parameters(error: Exception) -> str | None:
    """What to do about parameters that DDP waited for, where this is its error."""
    if "torch.nn.parallel.distributed" not in sys.modules:
        return None
    from drumline.parallel.wrap import explain_unused

    return explain_unused(error)


def _run_script(words: list[str]) -> None:
    """Compile the file and run it as `__main__`."""
    path = os.path.abspath(words[0])  # noqa: PTH100 - as Python: links stay
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        where = f"[Errno {error.errno}] {os.strerror(error.errno or errno.ENOENT)}"
        show(f"{sys.executable}: can't open file {path!r}: {where}", stream=sys.stderr)
        sys.exit(2)

    sys.argv = words
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120

    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
        __cached__=None,
        __package__=None,
    )

    _become(module)
    exec(code, module.__dict__)  # noqa: S102


def _become(module: ModuleType) -> None:
    """For good, unlike runpy: what a script leaves running after its last line is still of
    `__main__`."""
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module


def _hide_own_frames(error: BaseException) -> None:
    """A traceback begins where the script does, as if Python had run it: the frames of this file
    and of runpy are left out."""
    hook = sys.excepthook

    def from_script_on(
        kind: type[BaseException],
        value: BaseException,
        trace: TracebackType | None,
    ) -> None:
        trace = _without_own_frames(trace)
        hook(kind, value.with_traceback(trace) if value is error else value, trace)

    sys.excepthook = from_script_on


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the script on: after the last one of this file."""
    first_shown = trace
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            first_shown = trace.tb_next
        trace = trace.tb_next
    return first_shown


if __name__ == "__main__":
    main(sys.argv[1:])
