"""A rank's heartbeat: a small record in a mapped file that shows what the rank is doing; another
process can read it even when the rank cannot answer.

It consists of 64-bit words in the machine's byte order. A mark is two stores, without a lock or a
system call: the total time of the phase that ends, and the new phase together with the number of
marks. The beginning of the new phase is the start time plus all these times, by CLOCK_MONOTONIC,
which all processes of a machine share.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from time import monotonic

from drumline.watch.failure_kind import FailureKind

MAGIC = 0x3442544145424C44  # "DLBEATB4" from the right
_PID, _RANK, _STEP, _MICRO, _COLLECTIVE, _NOW, _START, _SPENT = range(1, 9)
_PHASES = 32  # that the record has room for; in _NOW a mark counts as many
_MOVES = _SPENT + _PHASES
_MOVED = _SPENT + _PHASES + 1
_FAILURE_KIND = _MOVED + 1
_BEGUN = _FAILURE_KIND + 1
KEPT_STEPS = 2048
"""Of so many steps, a power of two, the record has when they began. A sidecar reads it five times a
second."""

_NUM_WORDS = _BEGUN + KEPT_STEPS
_FAILURE_KINDS = tuple(FailureKind)
_TEXT_BYTES = 512
SIZE = _NUM_WORDS * 8 + _TEXT_BYTES
_MAX_READS = 4


class Phase(IntEnum):
    """What a rank can be doing. The numbers are in files that another process reads; new ones go to
    the end."""

    START = 0  # before the first step: the job is built, restored, warmed up
    DATA = 1
    FORWARD = 2

    # gradients are reduced here: most waits for other ranks are in this phase
    BACKWARD = 3
    OPTIMIZER = 4
    BETWEEN = 5  # between steps: a log line, the comparison of replicas
    EVALUATION = 6
    SAVE = 7
    USER = 8  # in a user's own loop, everything except data
    LEFT = 9  # out of the loop and of the process group: nothing is left to observe
    FAILED = 10  # an error was raised; the record has it in one line
    LEAVING = 11
    """Out of the loop: done, preempted, or too early. Workers, files and the process group are
    being closed."""

    COMPILE = 12  # torch compiles, before the first step or in any other phase: rank/watched/job_connection.py
    COMPILED = 13  # its own compilation is done; it waits for those of the other ranks


COMPILE_FACTOR = 6
"""How many times `watch.hang_s` a rank may compile, an hour by default: torch may take minutes for
a large model."""

# As plain numbers, for the hot path: enum lookup and arithmetic would take a fifth of a mark's
# time.
DATA, FORWARD, BACKWARD, OPTIMIZER = (
    int(phase) for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)


class HeartbeatWriter:
    """The rank's side. Without a file it writes to private memory, so that the code path is the
    same."""

    mark: Callable[..., None]
    """The rank enters this phase; the hot path. With a second argument, 0, the mark is not counted
    in `num_marks`."""

    begin_step: Callable[[int], None]
    """The rank begins a step, by the number of optimizer steps that are done; the hot path."""

    def __init__(self, path: Path | None = None, *, rank: int = 0) -> None:
        self._memory: mmap.mmap | bytearray = bytearray(SIZE) if path is None else _make_file(path)
        record = memoryview(self._memory)[: _NUM_WORDS * 8]
        self._words = record.cast("Q")
        self.mark, self.begin_step = _markers(record)
        self._has_failed = False
        self._words[_PID] = os.getpid()
        self._words[_RANK] = rank
        self._words[0] = MAGIC  # last: from here on it is a record

        if path is not None:
            detach_method = weakref.WeakMethod(self._detach_in_fork)
            os.register_at_fork(after_in_child=lambda: (detach := detach_method()) and detach())

    def next_micro(self) -> None:
        """The rank begins another micro-batch of its step."""
        self._words[_MICRO] += 1

    def count_collectives(self, number: int) -> None:
        """Record how many collectives the group has begun, as the backend counts them."""
        self._words[_COLLECTIVE] = number

    @property
    def num_marks(self) -> int:
        """How often the rank has entered a phase."""
        return self._words[_NOW] // _PHASES

    @property
    def phase(self) -> int:
        return self._words[_NOW] % _PHASES

    @property
    def step(self) -> int:
        return self._words[_STEP]

    def spent_s(self) -> dict[str, float]:
        """By the name of the phase: the total time spent in it, without the present one's since its
        beginning."""
        times = self._words.cast("B").cast("d")[_SPENT : _SPENT + len(Phase)]
        return {
            phase.name.lower(): seconds
            for phase, seconds in zip(Phase, times.tolist(), strict=True)
        }

    def move(self, num_collectives: int | None) -> None:
        """Record progress that a monitor thread saw; its phase is not known."""
        if num_collectives is not None:
            self._words[_COLLECTIVE] = num_collectives
        self._words.cast("B").cast("d")[_MOVED] = monotonic()
        self._words[_MOVES] += 1

    def fail(self, error: str, kind: FailureKind = FailureKind.OTHER) -> None:
        """The last mark: the error in one line. Errors in the clean-up after it are not recorded.
        Never raises."""
        if self._has_failed:
            return

        self._has_failed = True
        text = error.encode(errors="replace")
        if len(text) >= _TEXT_BYTES:
            text = text[: _TEXT_BYTES - 4] + b"..."

        self._memory[_NUM_WORDS * 8 : _NUM_WORDS * 8 + len(text) + 1] = text + b"\0"
        self._words[_FAILURE_KIND] = _FAILURE_KINDS.index(kind)
        self.mark(Phase.FAILED)
        self.mark = _write_nothing

    def _detach_in_fork(self) -> None:
        """A forked child shares the memory, but must not write the rank's heartbeat."""
        self.mark = _write_nothing
        self.begin_step = _write_nothing
        self._memory = bytearray(SIZE)
        self._words = memoryview(self._memory)[: _NUM_WORDS * 8].cast("Q")


def _markers(memory: memoryview) -> tuple[Callable[..., None], Callable[[int], None]]:
    """Makes `mark` and `begin_step`. Closures, floats, and sums that are not read back from the
    record each save a tenth of them."""
    times = memory.cast("d")
    words = memory.cast("Q")
    begun = times[_BEGUN:]
    last_kept = KEPT_STEPS - 1
    evaluation = int(Phase.EVALUATION)
    save = int(Phase.SAVE)
    clock = monotonic
    per_mark = _PHASES
    spent_by_phase = times[_SPENT:]
    present = words[_NOW : _NOW + 1]
    spent = [0.0] * _PHASES
    phase = int(Phase.START)
    marks = 0
    since = times[_START] = clock()

    def mark(following: int, counted: int = per_mark) -> None:
        nonlocal phase, since, marks
        now = clock()

        # This store first: a rank that is stopped between the two stores has not entered the new
        # phase.
        spent_by_phase[phase] = spent[phase] = spent[phase] + (now - since)
        since = now
        phase = following
        marks += counted
        present[0] = marks + following

    def begin_step(step: int) -> None:
        # A step modulo KEPT_STEPS, which is a power of two.
        begun[step & last_kept] = clock() - spent[evaluation] - spent[save]
        words[_STEP] = step
        words[_MICRO] = 0

    return mark, begin_step


def _write_nothing(*numbers: int) -> None:
    """In place of `mark` and `begin_step` where the record must not change any more."""


@dataclass
class LoopHeartbeats:
    """Marks the heartbeats of a user's own loop, as its loader (data/loader.py) calls it."""

    heartbeat: HeartbeatWriter
    phase: int
    """What the batches are for, as a plain number: see `DATA`."""

    num_collectives: Callable[[], int]
    _step: int | None = None

    def batch_requested(self, step: int | None) -> None:
        """`step`: the optimizer steps that are done; None: the batch is not for training."""
        if step != self._step and step is not None:
            self._step = step
            self.heartbeat.count_collectives(self.num_collectives())
            self.heartbeat.begin_step(step)

        self.heartbeat.mark(DATA)

    def batch_ready(self) -> None:
        """The loop gets a batch."""
        if self._step is not None:
            self.heartbeat.next_micro()
        self.heartbeat.mark(self.phase)

    def epoch_ended(self) -> None:
        """The loop gets no more batches."""
        self.heartbeat.mark(Phase.USER)


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """How far a rank is: the part of its heartbeat that the sidecars send each other."""

    rank: int
    pid: int
    step: int = 0
    phase: Phase = Phase.START
    micro: int = 0
    num_marks: int = 0
    collective: int = 0
    """How many collectives its process group has begun."""

    num_moves: int = 0
    """How often its monitor thread saw progress without a mark:
    rank/watched/progress_monitor.py."""

    spent_s: tuple[float, ...] = ()
    """By phase: the total time spent in it, without that in the present one."""

    failure: str = ""
    """Its own last error."""

    failure_kind: FailureKind = FailureKind.OTHER


@dataclass(frozen=True, kw_only=True)
class Heartbeat(RankProgress):
    """The content of a record. Moments are by CLOCK_MONOTONIC."""

    entered_at: float
    """When the phase began."""

    moved_at: float
    """When progress was last seen without a mark; 0: never."""

    begun: tuple[float, ...] = ()
    """When the last `KEPT_STEPS` steps began, less the time in evaluations and saves before; a step
    is at its number modulo their count. Empty: not recorded."""

    def step_s(self, first: int) -> Iterator[tuple[int, float]]:
        """The steps from this one on that are complete and recorded, and how long each took."""
        for step in range(max(first, self.step - len(self.begun) + 1), self.step):
            end_s = self.begun[(step + 1) % len(self.begun)]
            yield step, end_s - self.begun[step % len(self.begun)]


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The record; None if there is none yet, or the file is not a record."""
    data = _read_settled(path)
    if len(data) != SIZE:
        return None

    record = memoryview(data)[: _NUM_WORDS * 8]
    words = record.cast("Q")
    times = record.cast("d")
    num_marks, phase = divmod(words[_NOW], _PHASES)
    spent = times[_SPENT : _SPENT + len(Phase)].tolist()

    if words[0] != MAGIC:
        return None

    try:
        return Heartbeat(
            rank=words[_RANK],
            pid=words[_PID],
            num_marks=num_marks,
            step=words[_STEP],
            phase=Phase(phase),
            micro=words[_MICRO],
            entered_at=times[_START] + math.fsum(spent),
            collective=words[_COLLECTIVE],
            num_moves=words[_MOVES],
            moved_at=times[_MOVED],
            spent_s=tuple(spent),
            failure=data[_NUM_WORDS * 8 :].partition(b"\0")[0].decode(errors="ignore"),
            failure_kind=_FAILURE_KINDS[words[_FAILURE_KIND]],
            begun=tuple(times[_BEGUN:]),
        )
    except (ValueError, IndexError, OverflowError):  # damaged
        return None


def _read_settled(path: Path) -> bytes:
    """The file when two reads in a row are equal, or the last of a few reads: a single read may see
    half of a mark."""
    data = b""
    try:
        with path.open("rb", buffering=0) as file:
            for _ in range(_MAX_READS):
                before = data
                data = os.pread(file.fileno(), SIZE + 1, 0)
                if data == before:
                    break
    except OSError:
        pass

    return data


def _make_file(path: Path) -> mmap.mmap:
    """A new file, mapped into memory."""
    with path.open("xb+") as file:
        # With its memory allocated: a store to a mapped page that cannot be allocated would end the
        # rank.
        os.posix_fallocate(file.fileno(), 0, SIZE)
        return mmap.mmap(file.fileno(), SIZE)
