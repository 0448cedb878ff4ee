"""A rank's beat: one small record in a mapped file, which another process reads even when the rank cannot answer.

Whole words of 64 bits, in the machine's own order: the reader is on the same machine. A mark is a handful of stores:
no lock, no system call but the clock's (which is none), and nothing for a reader to disturb. Times are of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

from drumline.watch.beats.phase import Phase

MAGIC = 0x3142544145424C44  # "DLBEATB1" from the right
_PID, _RANK, _BEATS, _STEP, _PHASE, _MICRO, _SINCE, _COLLECTIVE, _SPENT = range(1, 10)
_NUM_WORDS = 32
_TEXT_BYTES = 256
SIZE = _NUM_WORDS * 8 + _TEXT_BYTES


class BeatWriter:
    """The rank's side. Without a file it writes to memory that nobody reads: a run that is not watched has one code
    path less that way."""

    def __init__(self, path: Path | None = None, *, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _make_file(path)
        self._words = memoryview(self._memory)[: _NUM_WORDS * 8].cast("Q")
        self._phase = int(Phase.START)
        self._since = self._words[_SINCE] = monotonic_ns()
        self._words[_PID], self._words[_RANK] = os.getpid(), rank
        self._words[0] = MAGIC  # last: from here on it is a record

    def mark(self, phase: int) -> None:
        """The rank goes over to this phase. The hot path."""
        now, words = monotonic_ns(), self._words
        words[_SPENT + self._phase] += now - self._since
        self._phase, self._since = phase, now
        words[_PHASE] = phase
        words[_SINCE] = now
        words[_BEATS] += 1

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

    def fail(self, error: str) -> None:
        """The last word: what went wrong, in a line."""
        text = error.encode()[: _TEXT_BYTES - 1]
        self._memory[_NUM_WORDS * 8 : _NUM_WORDS * 8 + len(text) + 1] = text + b"\0"
        self.mark(Phase.FAILED)


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
    spent_ns: tuple[int, ...]
    """By phase: the time in all that was spent in it, the present one's without what it has taken so far."""
    failure: str


def read_beat(path: Path) -> Beat | None:
    """A rank's record; None when there is none yet."""
    try:
        with path.open("rb", buffering=0) as file:
            data = file.read(SIZE)
    except OSError:
        return None
    if len(data) < SIZE:
        return None
    words = memoryview(data)[: _NUM_WORDS * 8].cast("Q")
    if words[0] != MAGIC:
        return None
    return Beat(
        rank=words[_RANK],
        pid=words[_PID],
        beats=words[_BEATS],
        step=words[_STEP],
        phase=Phase(words[_PHASE]),
        micro=words[_MICRO],
        since_ns=words[_SINCE],
        collective=words[_COLLECTIVE],
        spent_ns=tuple(words[_SPENT : _SPENT + len(Phase)]),
        failure=data[_NUM_WORDS * 8 :].partition(b"\0")[0].decode(errors="replace"),
    )


def _make_file(path: Path) -> mmap.mmap:
    with path.open("xb+") as file:
        file.truncate(SIZE)
        return mmap.mmap(file.fileno(), SIZE)
