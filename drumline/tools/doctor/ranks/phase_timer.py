"""A time limit for every phase of the collectives; when one is exceeded, the rank that blocks it is
named.

A collective that hangs cannot report itself, and torch's timeouts name no rank. So each rank writes
its phase to the store, and when a phase takes too long, a timer checks which ranks are behind and
which do not respond.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from drumline.base.background import in_background
from drumline.base.errors import Place
from drumline.base.text import join_names
from drumline.rank.sealed_store import SealedStore
from drumline.tools.doctor.finding import Finding

POLL_S = 0.1
# Ranks start at slightly different times, so all are late within this time.
LATE_START_S = 2.0
NO_CONNECTION_FIX = (
    "open high ports between hosts, and check which network they use: drumline doctor --hosts"
)
LOST_FIX = (
    "find the pair of hosts that loses large messages (MTU, firewall): drumline doctor --hosts"
)
INSPECT_FIX = (
    "inspect that process (py-spy dump, dmesg), and check its host: drumline doctor --hosts"
)


class PhaseTimer:
    def __init__(
        self,
        *,
        limit_s: float,
        place: Callable[[], Place],
        on_late: Callable[[list[Finding]], None],
    ) -> None:
        """`place`: this rank and its host, as far as known."""
        self._limit_s = limit_s
        self._place = place
        self._on_late = on_late
        self._store: SealedStore | None = None
        self._rank = 0
        self._world_size = 1
        self._host = ""
        self._number = 0
        self.current = "the start"

    def joined(self, store: SealedStore, *, rank: int, world_size: int, host: str) -> None:
        """From here on ranks see each other's phases."""
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._host = host

    @contextlib.contextmanager
    def phase(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        """`on_late` is called if it takes longer than the limit."""
        self._number += 1
        self.current = name
        self._write("at", name)
        limit = self._limit_s if limit_s is None else limit_s
        timer = threading.Timer(limit, self._late, [name, limit])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _late(self, name: str, limit_s: float) -> None:
        try:
            findings = in_background(lambda: self._find_blocked(name, limit_s)).result(
                2 * LATE_START_S
            )
        except (TimeoutError, dist.DistError, RuntimeError):
            what = f"rank {self._rank} did not finish {name} within {limit_s:g} s, and rank 0, which runs the store, "
            what += "does not respond: it is stopped, or its host is cut off"
            findings = [_finding(self._host, what, rank=0)]
        self._on_late(findings)

    def _find_blocked(self, name: str, limit_s: float) -> list[Finding]:
        if self._store is None:
            # The rendezvous itself reports ranks that never joined, so by now all have.
            place = self._place()
            what = f"{place} did not finish {name} within {limit_s:g} s: ranks reach the rendezvous port, but not "
            what += "each other"
            return [_finding(place.host or "?", what, NO_CONNECTION_FIX)]
        self._write("late", name)
        deadline = time.monotonic() + LATE_START_S
        while True:
            phases = self._read("at")
            late = self._read("late")
            here = [rank for rank, mark in phases.items() if mark["number"] == self._number]
            unresponsive = [rank for rank in here if rank not in late]
            behind = [rank for rank, mark in phases.items() if mark["number"] < self._number]
            if behind or not unresponsive or time.monotonic() > deadline:
                return _findings(
                    name, limit_s, phases, here=here, behind=behind, unresponsive=unresponsive
                )
            time.sleep(POLL_S)

    def _write(self, kind: str, name: str) -> None:
        if self._store is not None:
            mark = {"number": self._number, "phase": name, "host": self._host}
            self._store.set(f"doctor/{kind}/{self._rank}", json.dumps(mark))

    def _read(self, kind: str) -> dict[int, Any]:
        """Every rank's last mark; `late` has only those of this phase."""
        assert self._store is not None
        marks = {}
        for rank in range(self._world_size):
            if (mark := self._store.peek(f"doctor/{kind}/{rank}")) is not None:
                marks[rank] = json.loads(mark)
            elif kind == "at":
                marks[rank] = {"number": 0, "phase": "its start", "host": "?"}
        return {
            rank: mark
            for rank, mark in marks.items()
            if kind == "at" or mark["number"] == self._number
        }


def _findings(
    name: str,
    limit_s: float,
    phases: dict[int, Any],
    *,
    here: list[int],
    behind: list[int],
    unresponsive: list[int],
) -> list[Finding]:
    within = f"{name} within {limit_s:g} s"
    late = {rank: f"reach {within}: it is still in {phases[rank]['phase']}" for rank in behind}
    if not behind:
        end = "and does not respond: it is stopped, or its host is cut off"
        late = dict.fromkeys(unresponsive, f"finish {within} {end}")
    if late:
        hosts = {rank: phases[rank]["host"] for rank in late}
        return [
            _finding(hosts[rank], f"rank {rank} on {hosts[rank]} did not {what}", rank=rank)
            for rank, what in late.items()
        ]
    places = dict.fromkeys(phases[rank]["host"] for rank in here)
    ranks = join_names(f"rank {rank}" for rank in here)
    what = f"{ranks} all started {name} and did not finish it within {limit_s:g} s: what they send does not arrive"
    return [_finding(join_names(places), what, LOST_FIX)]


def _finding(where: str, what: str, fix: str = INSPECT_FIX, *, rank: int | None = None) -> Finding:
    return Finding("problem", "collectives", where, what, fix, rank)
