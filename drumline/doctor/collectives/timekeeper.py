"""Sees that every phase of the collectives comes to an end, and says who is to blame when one does not.

A collective that hangs cannot tell of itself, and torch's own timeouts name nobody. So each rank writes into the store
which phase it is in, and a timer beside it looks, when a phase takes too long, who is behind and who is silent.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from drumline.doctor.background import in_background
from drumline.doctor.finding import Finding
from drumline.errors import Place
from drumline.launch.node.sealed_store import SealedStore
from drumline.text import join_names

POLL_S = 0.1
# What is late on one rank is late on all, but for the time that their clocks started apart.
GRACE_S = 2.0
UNCONNECTED = "open high ports between the hosts, and see which network they take: drumline doctor --hosts"
LOST = "see which pair of hosts loses large messages (MTU, firewall): drumline doctor --hosts"
SEE_IT = (
    "see what that process does (py-spy dump, dmesg) and whether its host is reached: drumline doctor --hosts"
)


class Timekeeper:
    """One rank's phases: each by its name, in the order that all ranks share."""

    def __init__(
        self, *, limit_s: float, place: Callable[[], Place], on_late: Callable[[list[Finding]], None]
    ) -> None:
        """`place`: which rank this is, as far as is known yet."""
        self._limit_s = limit_s
        self._place = place
        self._on_late = on_late
        self._store: SealedStore | None = None
        self._rank, self._world_size, self._host = 0, 1, ""
        self._number = 0
        self.current = "the start"

    def joined(self, store: SealedStore, *, rank: int, world_size: int, host: str) -> None:
        """From here on ranks can tell each other where they are."""
        self._store, self._rank, self._world_size, self._host = store, rank, world_size, host

    @contextlib.contextmanager
    def phase(self, name: str, *, limit_s: float | None = None) -> Iterator[None]:
        """It must end within the limit."""
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
            findings = in_background(lambda: self._blame(name, limit_s)).result(2 * GRACE_S)
        except (TimeoutError, dist.DistError, RuntimeError):
            findings = [
                _finding(
                    self._host,
                    f"rank {self._rank} did not come out of {name} within {limit_s:g} s, and rank 0, where ranks tell "
                    "each other how far they are, does not answer: it is stopped, or its host is cut off",
                )
            ]
        self._on_late(findings)

    def _blame(self, name: str, limit_s: float) -> list[Finding]:
        if self._store is None:
            # Who never came is told by the meeting itself, so all have met by now.
            place = self._place()
            what = f"{place} did not come out of {name} within {limit_s:g} s: ranks reach the place where they meet, "
            what += "but not each other"
            return [_finding(place.host or "?", what, UNCONNECTED)]
        self._write("late", name)
        deadline = time.monotonic() + GRACE_S
        while True:
            at, late = self._read("at"), self._read("late")
            silent = [
                rank for rank, mark in at.items() if mark["number"] == self._number and rank not in late
            ]
            behind = [rank for rank, mark in at.items() if mark["number"] < self._number]
            if behind or not silent or time.monotonic() > deadline:
                return self._sentences(name, limit_s, at, behind=behind, silent=silent)
            time.sleep(POLL_S)

    def _sentences(
        self, name: str, limit_s: float, at: dict[int, Any], *, behind: list[int], silent: list[int]
    ) -> list[Finding]:
        if behind:
            return [
                _finding(
                    at[rank]["host"],
                    f"rank {rank} on {at[rank]['host']} did not come to {name} within {limit_s:g} s: it is still in "
                    f"{at[rank]['phase']}",
                )
                for rank in behind
            ]
        if silent:
            return [
                _finding(
                    at[rank]["host"],
                    f"rank {rank} on {at[rank]['host']} did not come out of {name} within {limit_s:g} s, and says "
                    "nothing any more: it is stopped, or its host is cut off",
                )
                for rank in silent
            ]
        stuck = [rank for rank, mark in at.items() if mark["number"] == self._number]
        hosts = list(dict.fromkeys(at[rank]["host"] for rank in stuck))
        what = f"{join_names([f'rank {rank}' for rank in stuck])} all came to {name}, and were not through within "
        what += f"{limit_s:g} s: what they send does not arrive"
        return [_finding(join_names(hosts), what, LOST)]

    def _write(self, kind: str, name: str) -> None:
        if self._store is not None:
            mark = {"number": self._number, "phase": name, "host": self._host}
            self._store.set(f"doctor/{kind}/{self._rank}", json.dumps(mark))

    def _read(self, kind: str) -> dict[int, Any]:
        """Every rank's last mark; one that has none yet is at the beginning."""
        assert self._store is not None
        marks = {}
        for rank in range(self._world_size):
            key = f"doctor/{kind}/{rank}"
            if (mark := self._store.peek(key)) is not None:
                marks[rank] = json.loads(mark)
            elif kind == "at":
                marks[rank] = {"number": 0, "phase": "its start", "host": "its host"}
        return {rank: mark for rank, mark in marks.items() if kind == "at" or mark["number"] == self._number}


def _finding(where: str, what: str, fix: str = SEE_IT) -> Finding:
    return Finding(level="problem", check="collectives", where=where, what=what, fix=fix)
