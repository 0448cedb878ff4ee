"""A rank's beat: one small record in a mapped file, which another process reads even when the rank cannot answer.

Whole words of 64 bits, in the machine's own order: the reader is on the same machine. A mark is two stores: the time
that went to the phase that ends, and the phase that begins together with the number of marks. No lock, no system call
but the clock's (which is none), and nothing for a reader to disturb. When the phase began is not written: all time
since the start went to some phase, so it is the start and the times together. They are of CLOCK_MONOTONIC, which all
processes of a machine share.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from drumline.watch.beats.phase import Phase

MAGIC = 0x3242544145424C44  # "DLBEATB2" from the right
_PID, _RANK, _STEP, _MICRO, _COLLECTIVE, _NOW, _START, _SPENT = range(1, 9)
_PHASES = 32  # that the record has room for; in _NOW a mark counts as many
_MOVES, _MOVED = _SPENT + _PHASES, _SPENT + _PHASES + 1
_NUM_WORDS = _MOVED + 1
_TEXT_BYTES = 512
SIZE = _NUM_WORDS * 8 + _TEXT_BYTES
_LOOKS = 4
_LONG_S = 1e11  # no machine runs for three thousand years


class BeatWriter:
    """The rank's side. Without a file it writes to memory that nobody reads: a run that is not watched has one code
    path less that way."""

    mark: Callable[[int], None]
    """The rank goes over to this phase. The hot path."""

    def __init__(self, path: Path | None = None, *, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _make_file(path)
        self._words = memoryview(self._memory)[: _NUM_WORDS * 8].cast("Q")
        self.mark = _marker(memoryview(self._memory)[: _NUM_WORDS * 8])
        self._has_failed = False
        self._words[_PID], self._words[_RANK] = os.getpid(), rank
        self._words[0] = MAGIC  # last: from here on it is a record
        if path is not None:
            mine = weakref.WeakMethod(self._leave_to_parent)
            os.register_at_fork(after_in_child=lambda: (leave := mine()) and leave())

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
    def marks(self) -> int:
        """How many there were."""
        return self._words[_NOW] // _PHASES

    def move(self, num_collectives: int | None) -> None:
        """The rank was seen to move, by a thread beside it: no phase of it is known."""
        if num_collectives is not None:
            self._words[_COLLECTIVE] = num_collectives
        self._words.cast("B").cast("d")[_MOVED] = monotonic()
        self._words[_MOVES] += 1

    def fail(self, error: str) -> None:
        """The last word: what went wrong, in a line. What is done to clean up after it, and errors in that, are not
        marked. It never raises: the error itself is to be heard."""
        if self._has_failed:
            return
        self._has_failed = True
        text = error.encode(errors="replace")
        if len(text) >= _TEXT_BYTES:
            text = text[: _TEXT_BYTES - 4] + b"..."
        self._memory[_NUM_WORDS * 8 : _NUM_WORDS * 8 + len(text) + 1] = text + b"\0"
        self.mark(Phase.FAILED)
        self.mark = _mark_nothing

    def _leave_to_parent(self) -> None:
        """In a fork, which has the same memory: what it does, and how it ends, is not what the rank does."""
        self.mark = _mark_nothing
        self._memory = bytearray(SIZE)
        self._words = memoryview(self._memory)[: _NUM_WORDS * 8].cast("Q")


def _marker(memory: memoryview) -> Callable[[int], None]:
    """What makes a mark. A function with variables of its own, floats, and sums that are not read back from the record:
    each of them is worth a tenth of the time that a mark takes."""
    times, clock, per_mark = memory.cast("d"), monotonic, _PHASES
    spent_by_phase, present = times[_SPENT:], memory.cast("Q")[_NOW : _NOW + 1]
    spent, phase, marks = [0.0] * _PHASES, int(Phase.START), 0
    since = times[_START] = clock()

    def mark(following: int) -> None:
        nonlocal phase, since, marks
        now = clock()
        # This first: a rank that is stopped between the two stores has gone on to nothing yet.
        spent_by_phase[phase] = spent[phase] = spent[phase] + (now - since)
        since, phase = now, following
        marks += per_mark
        present[0] = marks + following

    return mark


def _mark_nothing(following: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a record says."""

    rank: int
    pid: int
    beats: int
    """How many marks there were: whether it moves."""
    step: int
    phase: Phase
    micro: int
    since_ns: int
    """When the phase began, by CLOCK_MONOTONIC."""
    collective: int
    moves: int
    """How often it was seen to move without a mark."""
    moved_ns: int
    """When it last was, by CLOCK_MONOTONIC; 0: never."""
    spent_ns: tuple[int, ...]
    """By phase: the time in all that was spent in it, the present one's without what it has taken so far."""
    failure: str


def read_beat(path: Path) -> Beat | None:
    """A rank's record; None when there is none yet, or something else is in its place."""
    data = _settled(path)
    if len(data) != SIZE:
        return None
    words = memoryview(data)[: _NUM_WORDS * 8].cast("Q")
    times = memoryview(data)[: _NUM_WORDS * 8].cast("d")
    beats, phase = divmod(words[_NOW], _PHASES)
    start, spent = times[_START], times[_SPENT : _SPENT + len(Phase)].tolist()
    if (
        words[0] != MAGIC
        or phase >= len(Phase)
        or not all(0 <= time < _LONG_S for time in (start, times[_MOVED], *spent))
    ):
        return None
    return Beat(
        rank=words[_RANK],
        pid=words[_PID],
        beats=beats,
        step=words[_STEP],
        phase=Phase(phase),
        micro=words[_MICRO],
        since_ns=int((start + math.fsum(spent)) * 1e9),
        collective=words[_COLLECTIVE],
        moves=words[_MOVES],
        moved_ns=int(times[_MOVED] * 1e9),
        spent_ns=tuple(int(seconds * 1e9) for seconds in spent),
        failure=data[_NUM_WORDS * 8 :].partition(b"\0")[0].decode(errors="ignore"),
    )


def _settled(path: Path) -> bytes:
    """The file as two looks in a row have seen it: one alone may see half of a mark. A rank that marks without a pause
    is taken as it was seen last."""
    data = b""
    try:
        with path.open("rb", buffering=0) as file:
            for _ in range(_LOOKS):
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
