"""Runs a script under the watch: `python -m drumline.watch.rank.script SCRIPT.py ARGS`, or `-m MODULE ARGS`.

`drumline launch --watch` starts ranks so. The script is run as Python itself would: it is `__main__`, has its own
arguments, path, tracebacks and exit code, and torch is loaded only if it loads it. What is different: a beat, the
answers to a sidecar, one thread that looks once a second how many collectives there were, and, once the script has
imported torch, notes of what can be compared with the other ranks (seams.py).
"""

from __future__ import annotations

import atexit
import builtins
import errno
import io
import os
import runpy
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from drumline.launch.topology import own_variables, topology_from
from drumline.terminal import show
from drumline.watch.beats.phase import Phase
from drumline.watch.beats.record import BeatWriter
from drumline.watch.rank import seams
from drumline.watch.rank.attend import Attendance, attend_script
from drumline.watch.rank.collective_count import CollectiveCount
from drumline.watch.rank.script_notes import ScriptNotes

CANNOT_OPEN = 2


def main(words: list[str]) -> None:
    """Never returns before the script does; what it raises is raised."""
    if not words:
        sys.exit("usage: python -m drumline.watch.rank.script SCRIPT.py|-m MODULE [arguments]")
    attended = _Attended(words)
    try:
        if words[0] == "-m":
            _run_module(words[1:])
        else:
            _run_script(words)
    except BaseException as error:
        attended.failed(error)
        _hide_ourselves(error)
        raise


class _Attended:
    """The watch over this process: to its very end, and not over what it forks."""

    def __init__(self, words: list[str]) -> None:
        self._attendance = attend_script(own_variables())
        self._beat = BeatWriter() if self._attendance is None else self._attendance.beat
        self._notes: ScriptNotes | None = None
        activity: BeatWriter | None = None
        if self._attendance is not None:
            self._notes, activity = _observe(self._attendance, words)
        self._count = CollectiveCount(
            self._beat,
            patience_s=None if self._attendance is None else self._attendance.patience_s,
            sign=lambda: None if activity is None else activity.marks,
            also=self._notes.write if self._notes else lambda: None,
        )
        self._error: BaseException | None = None
        self._pid = os.getpid()
        # Those that the script registers come before it, and its threads end before those.
        atexit.register(self._close)

    def failed(self, error: BaseException) -> None:
        if isinstance(error, Exception) and os.getpid() == self._pid:
            self._error = error
            said = str(error).partition("\n")[0]
            self._beat.fail(f"{type(error).__name__}: {said}" if said else type(error).__name__)

    def _close(self) -> None:
        if os.getpid() == self._pid:
            self._count.close()
            if self._notes is not None:
                self._notes.write()
            if self._error is None:
                self._beat.mark(Phase.LEFT)
            if self._attendance is not None:
                self._attendance.close()


def _observe(attendance: Attendance, words: list[str]) -> tuple[ScriptNotes, BeatWriter] | tuple[None, None]:
    variables = own_variables()
    topology = topology_from(variables)
    if topology is None or topology.world_size == 1:
        return None, None
    notes = ScriptNotes(attendance.file("notes"), topology, node_rank=int(variables.get("GROUP_RANK", "0")))
    notes.note_arguments(words[1:] if words[0] != "-m" else words[2:])
    activity = BeatWriter(attendance.file("activity"), rank=topology.rank)
    seams.observe_torch(activity, notes)
    return notes, activity


def _run_script(words: list[str]) -> None:
    path, code = os.path.abspath(words[0]), _compiled(words[0])  # noqa: PTH100 - as Python: links stay
    sys.argv = words
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))  # noqa: PTH120
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None, __package__=None
    )
    _become(module)
    exec(code, module.__dict__)  # noqa: S102


def _become(module: ModuleType) -> None:
    """For good, unlike runpy: what a script leaves running after its last line is still of `__main__`."""
    module.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = module


def _compiled(script: str) -> CodeType:
    path = os.path.abspath(script)  # noqa: PTH100
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        where = f"[Errno {error.errno}] {os.strerror(error.errno or errno.ENOENT)}"
        show(f"{sys.executable}: can't open file {path!r}: {where}", stream=sys.stderr)
        sys.exit(CANNOT_OPEN)
    return compile(source, path, "exec", dont_inherit=True)


def _run_module(words: list[str]) -> None:
    """The way of `python -m`, which is Python's own and has no public name."""
    sys.argv = ["-m", *words[1:]]
    _become(ModuleType("__main__"))
    runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]


def _hide_ourselves(error: BaseException) -> None:
    """A traceback begins where the script does."""
    hook = sys.excepthook

    def from_script_on(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        trace = _without_us(trace)
        hook(kind, value.with_traceback(trace) if value is error else value, trace)

    sys.excepthook = from_script_on


def _without_us(trace: TracebackType | None) -> TracebackType | None:
    kept, entry = trace, trace
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == __file__:
            kept = entry.tb_next
        entry = entry.tb_next
    entry = kept
    while entry is not None:  # nor does it show where torch is observed
        while entry.tb_next is not None and entry.tb_next.tb_frame.f_globals is vars(seams):
            entry.tb_next = entry.tb_next.tb_next
        entry = entry.tb_next
    return kept


if __name__ == "__main__":
    main(sys.argv[1:])
