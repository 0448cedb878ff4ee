"""What a sidecar sees of one rank on its node. A look is a few reads of /proc, five times a second; a close look asks
the rank for its stacks and its flight recorder, and takes a second and a half at most, whatever the rank does."""

from __future__ import annotations

import asyncio
import math
import os
import time
from dataclasses import replace
from pathlib import Path

from drumline.processes import (
    EXITED,
    GONE,
    STOPPED,
    TICKS_PER_S,
    ProcessHandle,
    ProcessStat,
    io_bytes,
    read_stat,
    read_status,
)
from drumline.watch.beats.record import Beat, read_beat
from drumline.watch.facts import Collective, RankFacts, WorkerFacts
from drumline.watch.rank.stacks import WORKER_SIGNAL
from drumline.watch.sidecar.descendants import Descendants, refreshed
from drumline.watch.sidecar.flight import ask_flight, left_collectives, told_calls, told_workers
from drumline.watch.sidecar.memory import MemoryWatch
from drumline.watch.sidecar.stacks import described, last_stack, stack_of

# Looks that follow each other faster tell nothing new of CPU time, which is counted in hundredths of a second.
MIN_INTERVAL_S = 0.1
# What a rank that stands still uses is measured over so long: where others compute too, it gets the CPU now and then.
MEASURED_S, LEAST_MEASURED_S = 2.0, 0.8
# Looks that are further apart than this have not seen what was in between.
LATE_S = 1.0
STILL_AFTER_S = 1.0
QUESTIONED_WITHIN_S = 1.7
# Python gives its lock to another thread some milliseconds after it asks.
ANSWERS_WITHIN_S = 0.5


class RankLook:
    """One rank, from its first beat to its end. Keeps what it saw last, to tell what has changed since."""

    def __init__(self, folder: Path, rank: int, host: str) -> None:
        self._folder, self._rank, self._host = folder, rank, host
        self._beat_file = self._file("beat")
        self._beat: Beat | None = None
        self._beat_s = 0.0
        self._seen: _Seen | None = None

    def fileno(self) -> int | None:
        """Becomes readable when the rank ends: a look at that moment still finds out how, before anybody buries it.
        None until there is a beat, and where the kernel has no such thing."""
        return self._seen.process.exit_fd if self._seen else None

    def look(self, now_s: float) -> RankFacts | None:
        """The first part of the facts; None until the rank has a beat. `now_s`: of time.monotonic()."""
        beat = read_beat(self._beat_file) or self._beat
        if beat is None:
            return None
        if self._seen is None or self._beat is None or beat.pid != self._beat.pid:
            self.close()
            self._seen = _Seen(beat)
        if self._beat is None or (beat.beats, beat.moves) != (self._beat.beats, self._beat.moves):
            self._beat_s = now_s
        self._beat = beat
        self._seen.look(now_s, is_still=now_s - self._beat_s >= STILL_AFTER_S)
        return self._facts(beat, self._seen, now_s)

    def activity(self, now_s: float) -> RankFacts | None:
        """Of a script, which marks no phases itself (rank/seams.py)."""
        record = read_beat(self._file("activity"))
        if record is None:
            return None
        return RankFacts(
            rank=self._rank,
            host=self._host,
            pid=record.pid,
            step=record.step,
            phase=record.phase,
            age_s=max(0.0, now_s - record.since_ns / 1e9),
            spent_s=tuple(spent / 1e9 for spent in record.spent_ns),
        )

    async def look_closely(self) -> RankFacts:
        """All that can be found out. Never raises for a rank that ends meanwhile. One at a time for each rank."""
        facts = self.look(time.monotonic())
        if facts is None or self._seen is None:
            return RankFacts(rank=self._rank, host=self._host, pid=0)
        if facts.state not in EXITED:
            facts = await self._questioned(facts, self._seen)
        if facts.state in EXITED and facts.exit in (None, -9):
            facts = replace(facts, memory=self._seen.memory.evidence())
        if facts.state in EXITED and not facts.collectives:
            facts = replace(facts, collectives=left_collectives(self._folder, self._rank))
        if facts.state in EXITED and not facts.stack:
            facts = replace(facts, stack=last_stack(self._file("stacks")))
        return facts

    def close(self) -> None:
        if self._seen:
            self._seen.process.close()
        self._seen = None

    async def _questioned(self, facts: RankFacts, seen: _Seen) -> RankFacts:
        end = time.monotonic() + QUESTIONED_WITHIN_S
        facts = replace(facts, tracer=_tracer(facts.pid))
        asked = asyncio.create_task(self._ask(facts.state))
        # A rank that answers tells its stack by itself. The signal is for one in which Python stands still: to any
        # other it is a danger (rank/stacks.py).
        await asyncio.wait({asked}, timeout=ANSWERS_WITHIN_S)
        told = told_calls(self._folder, self._rank) if asked.done() and asked.result()[0] else []
        stack = described(facts.pid, told) if told else await stack_of(facts.pid, self._file("stacks"))
        answers, collectives = await asked
        workers = seen.descendants.workers(told_workers(self._folder, self._rank) if answers else ())
        workers = await self._with_stacks(workers, end)
        seen.forgive(time.monotonic())
        facts = replace(facts, stack=stack, workers=workers, answers=answers, collectives=collectives)
        latest = self.look(time.monotonic())
        if latest is not None and facts.state in STOPPED and latest.state not in (*STOPPED, *EXITED):
            return replace(facts, state=latest.state, state_s=latest.state_s, answers=None)  # it goes on
        if latest is None or latest.state not in EXITED:
            return facts
        # It has ended meanwhile: that is why it did not answer.
        return replace(facts, state=latest.state, exit=latest.exit, answers=None)

    async def _with_stacks(self, workers: tuple[WorkerFacts, ...], end: float) -> tuple[WorkerFacts, ...]:
        """One after the other, because all write into the same file; those for whom there is no time are left out."""
        found: list[WorkerFacts] = []
        for worker in workers:
            left_s = min(end - time.monotonic(), 0.4)
            stack: tuple[str, ...] = ()
            if left_s > 0:
                file = self._file("stacks")
                stack = await stack_of(worker.pid, file, within_s=left_s, signal=WORKER_SIGNAL)
            found.append(refreshed(worker, stack))
        return tuple(found)

    def _file(self, kind: str) -> Path:
        return self._folder / f"rank-{self._rank:05d}.{kind}"

    async def _ask(self, state: str) -> tuple[bool | None, tuple[Collective, ...]]:
        # A stopped one cannot answer, and would do so late when it goes on.
        return (False, ()) if state in STOPPED else await ask_flight(self._folder, self._rank)

    def _facts(self, beat: Beat, seen: _Seen, now_s: float) -> RankFacts:
        return RankFacts(
            rank=self._rank,
            host=self._host,
            pid=beat.pid,
            step=beat.step,
            phase=beat.phase,
            micro=beat.micro,
            beats=beat.beats,
            collective=beat.collective,
            moves=beat.moves,
            moved_s=max(0.0, now_s - beat.moved_ns / 1e9) if beat.moves else None,
            age_s=max(0.0, now_s - beat.since_ns / 1e9),
            state=seen.state,
            state_s=now_s - seen.state_since_s,
            cpu=seen.cpu,
            has_io=seen.has_io,
            exit=_exit_file(self._folder, self._rank, seen.exit) if seen.state in EXITED else None,
            failure=beat.failure,
            spent_s=tuple(spent / 1e9 for spent in beat.spent_ns),
        )


class _Seen:
    """The process behind a beat: its state, and what it used since the last look."""

    def __init__(self, beat: Beat) -> None:
        self.process = ProcessHandle(beat.pid)
        if _is_other(self.process.stat(), beat):
            self.process.close()
        self.memory = MemoryWatch(beat.pid)
        self.descendants = Descendants(beat.pid)
        self.state, self.state_since_s, self._looked_s = "", 0.0, math.inf
        self.exit: int | None = None
        self.cpu, self.has_io = 0.0, False
        self._readings: list[tuple[float, int, int | None]] = []
        """When, CPU time, and bytes read and written; the newest last."""

    def look(self, now_s: float, *, is_still: bool) -> None:
        stat = self.process.stat()
        state = stat.state if stat else GONE
        if state != self.state:
            self.state, self.state_since_s = state, now_s
        # While this process was stopped itself, with the whole job perhaps, it has seen no state.
        self.state_since_s += max(0.0, now_s - self._looked_s - LATE_S)
        self._looked_s = now_s
        if stat is None or state == "Z":
            self.cpu, self.has_io = 0.0, False
            if stat and (stat.exit_status or stat.num_threads <= 1):
                self.exit = os.waitstatus_to_exitcode(stat.exit_status)
            return
        if not self._readings or now_s - self._readings[-1][0] >= MIN_INTERVAL_S:
            self._count(stat, now_s, is_still=is_still)

    def forgive(self, now_s: float) -> None:
        """What the rank did to answer a question does not count as its work."""
        if stat := self.process.stat():
            self._readings = [(now_s, stat.cpu_ticks, io_bytes(self.process.pid))]
        self.descendants.forgive()

    def _count(self, stat: ProcessStat, now_s: float, *, is_still: bool) -> None:
        # A rank that moves works, whatever its files and its workers do.
        moved = io_bytes(self.process.pid) if is_still else None
        self._readings = [
            *(self._readings if is_still else self._readings[-1:]),
            (now_s, stat.cpu_ticks, moved),
        ]
        while len(self._readings) > 2 and now_s - self._readings[1][0] >= MEASURED_S:
            del self._readings[0]
        begun_s, ticks, _ = self._readings[0]
        measured_s = now_s - begun_s
        if not measured_s or (is_still and measured_s < LEAST_MEASURED_S):
            return
        self.cpu = (stat.cpu_ticks - ticks) / (measured_s * TICKS_PER_S)
        self.has_io = len({bytes_ for *_, bytes_ in self._readings if bytes_ is not None}) > 1
        if is_still:
            self.cpu += self.descendants.cores(now_s)
            self.has_io |= self.descendants.has_io


def _is_other(stat: ProcessStat | None, beat: Beat) -> bool:
    """Whether the number belongs to another process by now: one that began after the beat."""
    if stat is None:
        return False
    suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return stat.start_ticks / TICKS_PER_S > beat.since_ns / 1e9 + suspended_s + 2 / TICKS_PER_S


def _exit_file(folder: Path, rank: int, seen: int | None) -> int | None:
    """What the launcher wrote, who was told by the kernel; else what was seen of the process itself."""
    try:
        return int((folder / f"exit-{rank:05d}").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return seen


def _tracer(pid: int) -> str:
    """Who debugs it; empty when nobody does."""
    number = int(read_status(pid).get("TracerPid", "0"))
    if not number:
        return ""
    stat = read_stat(number)
    return f"{stat.name} (process {number})" if stat else f"process {number}"
