"""The ranks of this node, as its sidecar sees them; and their end, when the run must be ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from drumline.processes import descendants
from drumline.watch.beats.phase import Phase
from drumline.watch.facts import NodeFacts, RankFacts
from drumline.watch.sidecar.kernel import kernel_lines
from drumline.watch.sidecar.link import link_problem
from drumline.watch.sidecar.processes import RankLook
from drumline.watch.sidecar.terms import Terms

GONE = ("X", "Z")


class Node:
    """Looks, and keeps the latest look."""

    def __init__(self, terms: Terms, address: str = "") -> None:
        """`address`: what the other nodes reach this one by."""
        self.terms = terms
        self._address = address
        self._looks = [RankLook(Path(terms.folder), rank, terms.host) for rank in terms.ranks]
        self._begun = time.monotonic()
        self._heard: set[int] = set()
        self.facts = NodeFacts(node=terms.node, host=terms.host)

    def look(self, now_s: float, heard_s: Mapping[int, float]) -> NodeFacts:
        """What is cheap to see; for each pulse."""
        found = [look.look(now_s) for look in self._looks]
        self.facts = NodeFacts(
            node=self.terms.node,
            host=self.terms.host,
            ranks=tuple(facts for facts in found if facts is not None),
            heard_s=heard_s,
            activity=tuple(
                activity for look in self._looks if (activity := look.activity(now_s)) is not None
            ),
        )
        return self.facts

    def hear_ends(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at once when a rank ends: how it did can be seen until its parent has buried it, and only then."""
        for look in self._looks:
            descriptor = look.fileno()
            if descriptor is not None and descriptor not in self._heard:
                self._heard.add(descriptor)
                loop.add_reader(descriptor, self._heard_end, loop, look, descriptor)

    @staticmethod
    def _heard_end(loop: asyncio.AbstractEventLoop, look: RankLook, descriptor: int) -> None:
        loop.remove_reader(descriptor)
        look.look(time.monotonic())

    async def look_closely(self, heard_s: Mapping[int, float]) -> NodeFacts:
        """All that can be seen; takes a second or two."""
        found = await asyncio.gather(*(look.look_closely() for look in self._looks))
        return NodeFacts(
            node=self.terms.node,
            host=self.terms.host,
            ranks=tuple(facts for facts in found if facts is not None),
            heard_s=heard_s,
            link=link_problem(self._address) if self._address else "",
            kernel=kernel_lines(self._begun),
        )

    @property
    def has_begun(self) -> bool:
        """Whether every rank was seen at least once."""
        return len(self.facts.ranks) == len(self.terms.ranks)

    @property
    def is_over(self) -> bool:
        """Whether no rank here has anything left to do."""
        return self.has_begun and all(map(is_out, self.facts.ranks))

    @property
    def ended_well(self) -> bool:
        return self.has_begun and all(rank.phase is Phase.LEFT for rank in self.facts.ranks)

    def kill(self) -> None:
        """At once, with all that the ranks have started: they are stuck, and some may be stopped."""
        for rank in self.facts.ranks:
            if rank.state not in GONE:
                for pid in (rank.pid, *descendants(rank.pid)):
                    if pid != os.getpid():
                        with contextlib.suppress(OSError):
                            os.kill(pid, signal.SIGKILL)


def is_out(rank: RankFacts) -> bool:
    """Out of its loop, or ended."""
    return rank.phase is Phase.LEFT or rank.state in GONE
