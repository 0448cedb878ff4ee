"""A rank's heartbeat: a small record in a mapped file that says what the rank is doing, and that another process reads
even when the rank cannot answer.

Whole words of 64 bits, in the machine's own order. A mark is two stores, without a lock or a system call: the time that
went to the phase that ends, and the phase that begins together with the number of marks. When that phase began is the
start and all these times together, by CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic

from drumline.watch.failure_kind import FailureKind

MAGIC = 0x3342544145424C44  # "DLBEATB3" from the right
_PID, _RANK, _STEP, _MICRO, _COLLECTIVE, _NOW, _START, _SPENT = range(1, 9)
_PHASES = 32  # that the record has room for; in _NOW a mark counts as many
_MOVES, _MOVED = _SPENT + _PHASES, _SPENT + _PHASES + 1
_FAILURE_KIND = _MOVED + 1
_NUM_WORDS = _FAILURE_KIND + 1
_FAILURE_KINDS = tuple(FailureKind)
_TEXT_BYTES = 512
SIZE = _NUM_WORDS * 8 + _TEXT_BYTES
_MAX_READS = 4
_LONG_S = 1e11  # no machine runs for three thousand years


class Phase(IntEnum):
    """What a rank can be doing. The numbers are in files that another process reads; new ones go to the end."""

    START = 0  # before the first step: the job is built, restored, warmed up
    DATA = 1
    FORWARD = 2
    BACKWARD = 3  # gradients are reduced here: a rank that waits for another one most often waits here
    OPTIMIZER = 4
    BETWEEN = 5  # between steps: a log line, the comparison of replicas
    EVALUATION = 6
    SAVE = 7
    USER = 8  # in a loop that is the user's own, all that is not data
    LEFT = 9  # out of the loop and of the process group: nothing is left to observe
    FAILED = 10  # an error is on its way to the user; the record has it in a line
    LEAVING = 11
    """Out of the loop: done, preempted, or too early. Workers, files and the process group are being closed."""


# As plain numbers, for the hot path: to look one up in an enum, and to count with it, takes a fifth of a mark's time.
DATA, FORWARD, BACKWARD, OPTIMIZER = (
    int(phase) for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)


class HeartbeatWriter:
    """The rank's side. Without a file it writes to memory that nobody reads, so that the code path is the same."""

    mark: Callable[[int], None]  # the rank enters this phase; the hot path

    def __init__(self, path: Path | None = None, *, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _make_file(path)
        self._words = memoryview(self._memory)[: _NUM_WORDS * 8].cast("Q")
        self.mark = _marker(memoryview(self._memory)[: _NUM_WORDS * 8])
        self._has_failed = False
        self._words[_PID], self._words[_RANK] = os.getpid(), rank
        self._words[0] = MAGIC  # last: from here on it is a record
        if path is not None:
            mine = weakref.WeakMethod(self._detach_in_fork)
            os.register_at_fork(after_in_child=lambda: (detach := mine()) and detach())

    def begin_step(self, step: int) -> None:
        """`step`: the optimizer steps that are done."""
        words = self._words
        words[_STEP] = step
        words[_MICRO] = 0

    def next_micro(self) -> None:
        self._words[_MICRO] += 1

    def count_collectives(self, number: int) -> None:
        """How many the group has begun, as the backend counts them."""
        self._words[_COLLECTIVE] = number

    @property
    def num_marks(self) -> int:
        return self._words[_NOW] // _PHASES

    def move(self, num_collectives: int | None) -> None:
        """A monitor thread saw that the rank makes progress; its phase is not known."""
        if num_collectives is not None:
            self._words[_COLLECTIVE] = num_collectives
        self._words.cast("B").cast("d")[_MOVED] = monotonic()
        self._words[_MOVES] += 1

    def fail(self, error: str, kind: FailureKind = FailureKind.OTHER) -> None:
        """The last mark: what went wrong, in a line. Errors in the clean-up after it are not recorded. Never raises."""
        if self._has_failed:
            return
        self._has_failed = True
        text = error.encode(errors="replace")
        if len(text) >= _TEXT_BYTES:
            text = text[: _TEXT_BYTES - 4] + b"..."
        self._memory[_NUM_WORDS * 8 : _NUM_WORDS * 8 + len(text) + 1] = text + b"\0"
        self._words[_FAILURE_KIND] = _FAILURE_KINDS.index(kind)
        self.mark(Phase.FAILED)
        self.mark = _mark_nothing

    def _detach_in_fork(self) -> None:
        """A fork has the same memory: what it does, and how it ends, is not what the rank does."""
        self.mark = _mark_nothing
        self._memory = bytearray(SIZE)
        self._words = memoryview(self._memory)[: _NUM_WORDS * 8].cast("Q")


def _marker(memory: memoryview) -> Callable[[int], None]:
    """Makes `mark`. A function with variables of its own, floats, and sums that are not read back from the record:
    each of them is worth a tenth of the time that a mark takes."""
    times, clock, per_mark = memory.cast("d"), monotonic, _PHASES
    spent_by_phase, present = times[_SPENT:], memory.cast("Q")[_NOW : _NOW + 1]
    spent, phase, marks = [0.0] * _PHASES, int(Phase.START), 0
    since = times[_START] = clock()

    def mark(following: int) -> None:
        nonlocal phase, since, marks
        now = clock()
        # This first: a rank that is stopped between the two stores has entered nothing yet.
        spent_by_phase[phase] = spent[phase] = spent[phase] + (now - since)
        since, phase = now, following
        marks += per_mark
        present[0] = marks + following

    return mark


def _mark_nothing(following: int) -> None:
    pass


class LoopHeartbeats:
    """The `LoaderObserver` (data/loader.py) that makes the heartbeats of a user's own loop."""

    def __init__(self, heartbeat: HeartbeatWriter, phase: Phase, num_collectives: Callable[[], int]) -> None:
        """`phase`: what the batches are for."""
        self._heartbeat = heartbeat
        self._phase = int(phase)
        self._num_collectives = num_collectives
        self._step: int | None = None

    def batch_requested(self, step: int | None) -> None:
        """`step`: the optimizer steps that are done; None: the batch is not for training."""
        if step != self._step and step is not None:
            self._step = step
            self._heartbeat.count_collectives(self._num_collectives())
            self._heartbeat.begin_step(step)
        self._heartbeat.mark(DATA)

    def batch_ready(self) -> None:
        if self._step is not None:
            self._heartbeat.next_micro()
        self._heartbeat.mark(self._phase)

    def epoch_ended(self) -> None:
        self._heartbeat.mark(Phase.USER)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a record says."""

    rank: int
    pid: int
    num_marks: int
    step: int
    phase: Phase
    micro: int
    since_ns: int  # when the phase began, by CLOCK_MONOTONIC
    collective: int
    num_moves: int  # how often progress was seen without a mark
    moved_ns: int  # when it last was, by CLOCK_MONOTONIC; 0: never
    spent_ns: tuple[int, ...]  # by phase: the total time spent in it, without the current stay in the present one
    failure: str
    failure_kind: FailureKind


def read_heartbeat(path: Path) -> Heartbeat | None:
    """None when there is no record yet, or something else in its place."""
    data = _read_settled(path)
    if len(data) != SIZE:
        return None
    words = memoryview(data)[: _NUM_WORDS * 8].cast("Q")
    times = memoryview(data)[: _NUM_WORDS * 8].cast("d")
    num_marks, phase = divmod(words[_NOW], _PHASES)
    start, spent = times[_START], times[_SPENT : _SPENT + len(Phase)].tolist()
    if (
        words[0] != MAGIC
        or phase >= len(Phase)
        or words[_FAILURE_KIND] >= len(_FAILURE_KINDS)
        or not all(0 <= time < _LONG_S for time in (start, times[_MOVED], *spent))
    ):
        return None
    return Heartbeat(
        rank=words[_RANK],
        pid=words[_PID],
        num_marks=num_marks,
        step=words[_STEP],
        phase=Phase(phase),
        micro=words[_MICRO],
        since_ns=int((start + math.fsum(spent)) * 1e9),
        collective=words[_COLLECTIVE],
        num_moves=words[_MOVES],
        moved_ns=int(times[_MOVED] * 1e9),
        spent_ns=tuple(int(seconds * 1e9) for seconds in spent),
        failure=data[_NUM_WORDS * 8 :].partition(b"\0")[0].decode(errors="ignore"),
        failure_kind=_FAILURE_KINDS[words[_FAILURE_KIND]],
    )


def _read_settled(path: Path) -> bytes:
    """The file as two reads in a row saw it, or as the last of a few did: one alone may see half of a mark."""
    data = b""
    try:
        with path.open("rb", buffering=0) as file:
            for _ in range(_MAX_READS):
                before, data = data, os.pread(file.fileno(), SIZE + 1, 0)
                if data == before:
                    break
    except OSError:
        pass
    return data


def _make_file(path: Path) -> mmap.mmap:
    with path.open("xb+") as file:
        # With its memory: to store to a mapped page that cannot be had any more would end the rank.
        os.posix_fallocate(file.fileno(), 0, SIZE)
        return mmap.mmap(file.fileno(), SIZE)
