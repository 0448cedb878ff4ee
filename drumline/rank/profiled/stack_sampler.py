"""What a rank runs while steps are recorded: a thread looks at the stack of the one that takes the
steps, and garbage collections and other threads are measured.

A step pays nothing for it outside the recorded steps, and its code has no marks for it.
"""

from __future__ import annotations

import gc
import inspect
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import data

import drumline
from drumline.base.processes import ThreadTimes, thread_times
from drumline.rank.torch_internals import (
    LoaderIterator,
    broadcast_of_ddp,
    end_workers,
    next_index,
    start_workers,
)
from drumline.runs.profile_files import (
    BUFFERS,
    CLIPPING,
    GRADIENTS,
    IN_BACKWARD,
    SAMPLER,
    WORKERS,
    Collection,
    SampledLine,
    StackSample,
    StackSamples,
    ThreadUse,
)

FIRST_INTERVAL_S = 0.001
SAMPLES_PER_INTERVAL = 2000
"""After so many samples the interval is doubled: a profile of an hour has 30,000."""

SWITCH_INTERVAL_S = 0.0005
"""For as long the sampler waits for a thread that runs Python. With Python's own 5 ms it would see
only what releases the GIL."""

BUSY_THREAD = 0.2
"""Of a core: a thread that could use more competes for the GIL, and Python's interval is a part of what
it costs."""

MOST_THREADS = 5
MOST_SOURCE = 100
NEW_THREAD = ThreadTimes(run_ns=0, wait_ns=0, num_slices=0)
NO_LINE = SampledLine(file="", line=0, function="")
REST = "rest"
END = "end"
"""The frame from which on the stack is the launcher's, or the engine's own loop."""

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
EVALUATION = "evaluation"
PAUSE_SHARE = 0.3
"""A statement that evaluates for so much of its time is an evaluation."""

INSIDE = {
    "on_device": "forward",
    BUFFERS: "forward",
    "to the device": "data",
    WORKERS: "data",
    SAMPLER: "data",
    IN_BACKWARD: "backward",
    GRADIENTS: "forward",
}
"""Phases that are a part of another one."""

Phases = Mapping[CodeType | None, str]


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """That of a function or method, without its decorators; None: it is not in Python."""
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    return code


def phases_of_torch() -> dict[CodeType | None, str]:
    """Where the phases of a hand-written loop begin."""
    wrappers = Optimizer.profile_hook_step.__code__.co_consts
    return {
        code_of(LoaderIterator.__next__): "data",
        code_of(data.default_collate): "data",
        code_of(next_index): SAMPLER,
        code_of(start_workers): WORKERS,
        code_of(end_workers): WORKERS,
        code_of(nn.Module.__call__): "forward",
        code_of(broadcast_of_ddp()): BUFFERS,
        code_of(torch.Tensor.backward): "backward",
        code_of(torch.autograd.backward): "backward",
        code_of(torch.autograd.grad): GRADIENTS,
        code_of(Optimizer.zero_grad): "optimizer",
        code_of(nn.utils.clip_grad_norm_): CLIPPING,
        code_of(nn.utils.clip_grad_value_): CLIPPING,
        code_of(torch.save): "save",
        **dict.fromkeys(_nested(wrappers), "optimizer"),
        **dict.fromkeys(_codes_of_torchs_hooks(), IN_BACKWARD),
    }


def _codes_of_torchs_hooks() -> Iterator[CodeType]:
    """The hooks on the communication of gradients that torch has, where they are loaded."""
    hooks = [module for name, module in sys.modules.items() if name.startswith(HOOKS)]
    for module in hooks:
        for function in vars(module).values():
            if inspect.isfunction(function):
                yield function.__code__


def _nested(constants: Iterable[Any]) -> list[CodeType]:
    """The functions inside a function, and those inside them."""
    codes = [constant for constant in constants if isinstance(constant, CodeType)]
    return codes + [inner for code in codes for inner in _nested(code.co_consts)]


_PATHS = sysconfig.get_paths()
_FOLDERS = {
    f"{Path(drumline.__file__).parent}{os.sep}": "drumline",
    f"{Path(torch.__file__).parent}{os.sep}": "torch",
    # Packages may be inside the library.
    **{f"{_PATHS[name]}{os.sep}": "" for name in ("purelib", "platlib", "stdlib", "platstdlib")},
}


@cache
def package_of(file: str) -> str:
    """The package that a file belongs to, as in `torch`; empty: the user's own code."""
    for folder, name in _FOLDERS.items():
        if file.startswith(folder):
            return name or Path(file[len(folder) :]).parts[0].removesuffix(".py")
    return "python" if file.startswith("<") else ""


def _with_source(line: SampledLine) -> SampledLine:
    """The line with its text, if that can be read."""
    text = linecache.getline(line.file, line.line).strip() if line.file else ""
    return replace(line, source=text[:MOST_SOURCE])


def runnable_ns(times: ThreadTimes) -> int:
    """How long a thread ran or waited for a CPU: on a busy machine what computes does not look
    asleep."""
    return times.run_ns + times.wait_ns


def other_threads_ns() -> dict[int, int]:
    """How long each Python thread but the present one could run."""
    times = thread_times(os.getpid())
    threads = {thread.native_id for thread in threading.enumerate()}
    threads.discard(threading.get_native_id())
    return {number: runnable_ns(times[number]) for number in threads if number in times}


class RunnableClock:
    """How long the thread that makes it could run so far, as `runnable_ns`."""

    def __init__(self) -> None:
        self._cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._schedule: int | None = None
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        with suppress(OSError):  # the kernel does not count it
            self._schedule = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def now_ns(self) -> int:
        """Raises OSError when the thread has ended."""
        queued_ns = 0
        if self._schedule is not None:
            queued_ns = int(os.pread(self._schedule, 100, 0).split()[1])
        return time.clock_gettime_ns(self._cpu_clock) + queued_ns

    def close(self) -> None:
        """From here on `now_ns` must not be called."""
        if self._schedule is not None:
            os.close(self._schedule)


def _line_of(frame: FrameType) -> SampledLine:
    """A comprehension is a part of the function around it."""
    code = frame.f_code
    function = code.co_qualname.partition(".<locals>.<")[0]
    return SampledLine(file=code.co_filename, line=frame.f_lineno or 0, function=function)


def line_of_user(frame: FrameType | None) -> SampledLine:
    """The innermost line of the user's, with its text."""
    while frame is not None and package_of(frame.f_code.co_filename):
        frame = frame.f_back
    return NO_LINE if frame is None else _with_source(_line_of(frame))


def outermost_code(frame: FrameType) -> CodeType:
    """The function at the bottom of a stack."""
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


class StackView(NamedTuple):
    """What a stack shows."""

    phase: str
    """The outermost that it is in."""

    line: SampledLine
    """The innermost of the user's."""

    statement: SampledLine
    """The line of a script's training loop, or of a task, that led there; none in the engine's
    loop."""


@dataclass
class SampledView:
    """A view that did not change for some samples in a row."""

    until_ns: int
    cpu_ns: int
    view: StackView


class SampledCollection(NamedTuple):
    """A garbage collection, and the line that ran then."""

    began_ns: int
    ended_ns: int
    line: SampledLine


class StackSampler:
    """Call `start` on the thread that takes the steps, and `stop` after the last of them."""

    def __init__(self, phases: Phases, models: Sequence[nn.Module] = ()) -> None:
        """`models`: those that are trained. While one is in evaluation mode, their forward passes
        are an evaluation."""
        self._phases = phases
        self._models = models
        self._main = threading.get_ident()
        self._outermost = outermost_code(sys._getframe())
        """With which a whole stack ends."""

        self._clock = RunnableClock()
        self._views: list[SampledView] = []
        """One row for each change of what the stack shows."""

        self._loop = self._codes_of_loop(sys._getframe())
        """The functions that a script's training loop is in."""

        self._collections: list[SampledCollection] = []
        self._collection_began_ns = 0
        self._other_lines: Counter[tuple[int, SampledLine]] = Counter()
        """How often each other thread was seen in which line of the user's."""

        self._began_ns = 0
        self._last_cpu_ns = 0
        self._is_ended = False
        self._switch_interval_s = sys.getswitchinterval()
        self._thread = threading.Thread(target=self._run, name="drumline-sampler", daemon=True)

    def start(self, *, is_alone: bool = True) -> None:
        """`is_alone`: no other thread competes for the GIL."""
        if is_alone:
            sys.setswitchinterval(SWITCH_INTERVAL_S)

        self._threads_before = thread_times(os.getpid())
        gc.callbacks.append(self._on_collection)
        self._began_ns = time.time_ns()
        self._last_cpu_ns = self._clock.now_ns()
        self._thread.start()

    def stop(self) -> StackSamples:
        """End the samples, and return them; all is as before `start`."""
        self._is_ended = True
        self._thread.join()
        self._clock.close()
        gc.callbacks.remove(self._on_collection)
        sys.setswitchinterval(self._switch_interval_s)
        self._name_pauses()

        phases: dict[str, int] = defaultdict(count().__next__)
        lines: dict[SampledLine, int] = defaultdict(count().__next__)

        samples = []
        for row in self._views:
            phase = phases[row.view.phase]
            samples.append(StackSample(row.until_ns, row.cpu_ns, phase, lines[row.view.line]))

        statements = tuple(lines[row.view.statement] for row in self._views)
        collections = tuple(
            Collection(row.began_ns, row.ended_ns, lines[row.line]) for row in self._collections
        )
        threads = tuple(
            ThreadUse(name, cpu_s, lines[line]) for name, cpu_s, line in self._other_threads()
        )

        return StackSamples(
            began_ns=self._began_ns,
            phases=tuple(phases),
            lines=tuple(map(_with_source, lines)),
            samples=tuple(samples),
            statements=statements,
            collections=collections,
            threads=threads,
        )

    # Samples

    def _run(self) -> None:
        """The thread: take samples until the end, with intervals that grow."""
        interval_s = FIRST_INTERVAL_S
        num_samples = 0
        while not self._is_ended:
            time.sleep(interval_s)
            try:
                self._take()
            except (OSError, IndexError):  # that thread has ended
                return

            num_samples += 1
            if num_samples % SAMPLES_PER_INTERVAL == 0:
                interval_s *= 2

    def _take(self) -> None:
        """Record one sample, without a garbage collection meanwhile."""
        # CPython 3.11 makes the object of a frame when it is first read. A collection at that moment
        # lets the thread of the frame go on and return, and Python then writes into what has taken
        # the frame's place. User code that turns collections on or off in this instant is
        # overruled: it would need the GIL.
        cpu_ns = self._clock.now_ns()
        is_collecting = gc.isenabled()
        gc.disable()

        try:
            self._look(time.time_ns(), cpu_ns)
        finally:
            if is_collecting:
                gc.enable()

    def _look(self, now_ns: int, cpu_ns: int) -> None:
        """Add what all threads do now to the rows."""
        frames = sys._current_frames()
        frame = frames.pop(self._main, None)
        if frame is None:
            return

        view = self._describe(frame, self._outermost)
        if view is None:
            return

        used_ns = cpu_ns - self._last_cpu_ns
        self._last_cpu_ns = cpu_ns

        last = self._views[-1] if self._views else None
        if last is not None and last.view == view:
            last.until_ns = now_ns
            last.cpu_ns += used_ns
        else:
            self._views.append(SampledView(now_ns, used_ns, view))

        for thread, top in frames.items():
            view = self._describe(top)
            if thread != self._thread.ident and view is not None:
                self._other_lines[thread, view.line] += 1

    def _describe(
        self, frame: FrameType | None, outermost: CodeType | None = None
    ) -> StackView | None:
        """None: the thread ran meanwhile, and the stack does not end with `outermost`."""
        phase = REST
        line = NO_LINE
        statement = NO_LINE
        outermost_line = NO_LINE
        library = ""
        code: CodeType | None = None
        is_gradient = False  # of a torch.autograd.Function
        is_evaluating = self._is_evaluating()

        while frame is not None:
            code = frame.f_code
            entered = self._phases.get(code)
            if entered == END:
                return StackView(phase, line, outermost_line if statement == NO_LINE else statement)

            package = package_of(code.co_filename)
            library = library or package
            if not package:
                outermost_line = _line_of(frame)
                if line == NO_LINE:
                    line = replace(outermost_line, library=library)

                is_gradient |= code.co_name == "backward"
                if statement == NO_LINE and code in self._loop:
                    statement = outermost_line

            if entered == "forward" and is_evaluating:
                entered = EVALUATION

            if entered == "backward" and phase == REST and line != NO_LINE and not is_gradient:
                phase = IN_BACKWARD
            elif entered is not None and INSIDE.get(phase) != entered:
                phase = entered

            frame = frame.f_back

        is_whole = outermost is None or code is outermost
        return StackView(phase, line, statement) if is_whole else None

    def _is_evaluating(self) -> bool:
        """Asked of the models, not of the frames: `f_locals` of a function that is returning in
        another thread has objects that are freed already."""
        return any(
            not module.training or not getattr(module, "module", module).training
            for module in self._models
        )

    def _codes_of_loop(self, frame: FrameType | None) -> frozenset[CodeType]:
        """The functions of a script that are running when a step ends."""
        codes = set()
        while frame is not None and self._phases.get(frame.f_code) != END:
            if not package_of(frame.f_code.co_filename):
                codes.add(frame.f_code)
            frame = frame.f_back

        return frozenset(codes)

    def _name_pauses(self) -> None:
        """A statement of a script's loop that evaluates or saves does all that it does for that,
        also where it loads data."""
        if not self._loop:
            return

        times_ns: dict[SampledLine, Counter[str]] = defaultdict(Counter)
        began_ns = self._began_ns
        for row in self._views:
            times_ns[row.view.statement][row.view.phase] += row.until_ns - began_ns
            began_ns = row.until_ns

        for row in self._views:
            statement = row.view.statement
            if statement == NO_LINE:
                continue

            phases = times_ns[statement]
            for name in (EVALUATION, "save"):
                if phases[name] > PAUSE_SHARE * phases.total():
                    row.view = StackView(name, statement, statement)

    # Garbage collection, in whichever thread it runs

    def _on_collection(self, event: str, info: Mapping[str, int]) -> None:
        """Python calls it at the start and the end of each collection."""
        now_ns = time.time_ns()
        if info["generation"] < 2:  # they take microseconds
            return

        if event == "start":
            self._collection_began_ns = now_ns
            return

        view = self._describe(sys._getframe().f_back)
        line = NO_LINE if view is None else view.line
        self._collections.append(SampledCollection(self._collection_began_ns, now_ns, line))

    # Other threads

    def _other_threads(self) -> Sequence[tuple[str, float, SampledLine]]:
        """How long each could run, and the user's line in which it was seen most: a thread that
        computes is there nearly always, one of a pool waits in the library's code between."""
        times = thread_times(os.getpid())
        uses = []
        for thread in threading.enumerate():
            number = thread.native_id or 0
            lines = [row for row in self._other_lines if row[0] == thread.ident]
            if thread.ident == self._main or number not in times or not lines:
                continue

            before = self._threads_before.get(number, NEW_THREAD)
            cpu_ns = runnable_ns(times[number].since(before))

            # a line of the user's, if it was seen in any
            _, line = max(lines, key=lambda row: (row[1] != NO_LINE, self._other_lines[row]))
            uses.append((thread.name, cpu_ns / 1e9, line))

        return sorted(uses, key=lambda use: -use[1])[:MOST_THREADS]
