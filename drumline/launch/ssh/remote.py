"""One host's part in one attempt, as the controller sees it: what is to run there, and what is known of its ranks."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drumline.launch.hosts import Host
from drumline.launch.node.rank_logs import LAST_LINES
from drumline.launch.node.watch_folder import SidecarDiagnosis
from drumline.launch.ssh.host_connection import HostConnection
from drumline.launch.ssh.screen import Screen
from drumline.text import how_it_ended

DIAGNOSIS_FIELDS = ("alarm", "action", "sentence", "was_printed")


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    host: str
    rank: int
    code: int
    at: float
    """By the controller's monotonic clock."""
    last_lines: tuple[str, ...] = ()
    is_follower: bool = False
    """The rank itself knows of another that failed first."""
    error: str = ""
    """What it failed by, in one line, where the rank could report it."""
    was_shown: bool = False
    """Whether its last lines are on the screen already, marked with its host and rank."""

    @property
    def in_a_line(self) -> str:
        return self.error or next((line.strip() for line in reversed(self.last_lines) if line.strip()), "")

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({how_it_ended(self.code)})"


@dataclass(eq=False)
class Remote:
    """From the spec that is sent to the frame that it has ended, or to the end of the connection."""

    connection: HostConnection
    spec: Mapping[str, Any] = field(repr=False)
    screen: Screen
    on_frame: Callable[[Remote, Mapping[str, Any]], None]
    """Called for each frame that is not about output."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    was_refused: bool = False
    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    """How many ranks the job had when these were started; others may have been restarted since."""
    num_starts: int = 0
    """Of ranks here, over all attempts of the launch."""
    restarts_left: int | None = None
    """As its agent counts them; None: it has not started ranks yet."""
    failures: list[RankFailure] = field(default_factory=list)
    """Since the ranks were last started."""
    diagnosis: SidecarDiagnosis | None = None
    """What the sidecars found about that."""
    code: int | None = None
    """The exit code of the node's agent."""
    agent_lines: list[str] = field(default_factory=list)
    """The agent's last lines of output, when it failed."""
    _shown: defaultdict[int | None, deque[str]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=2 * LAST_LINES))
    )
    """The latest lines on the screen, by rank, without its stdout."""

    @property
    def host(self) -> Host:
        return self.connection.host

    @property
    def name(self) -> str:
        return self.host.address

    @property
    def has_begun(self) -> bool:
        """Whether the supervisor has answered."""
        return self.begun.is_set()

    @property
    def is_running(self) -> bool:
        return self.connection.ssh_code is None and self.code is None

    async def run(self) -> None:
        """Have the supervisor run it, to the end."""
        self.connection.on_frame = self._receive
        closed = await self.connection.open()
        self.connection.send(self.spec)
        ended = asyncio.create_task(self.ended.wait())
        await asyncio.wait({closed, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if closed.done():
            closed.result()  # raises what a frame's handler raised

    def end(self, grace_s: float) -> None:
        if self.has_begun:
            self.connection.send({"kind": "end", "grace_s": grace_s})
        else:
            self.connection.hang_up()

    def give_up(self) -> None:
        """Where its part has not ended; else the connection is for the next attempt."""
        if self.is_running:
            self.connection.hang_up()

    def seen_failures(self) -> list[RankFailure]:
        """With whether the user has read the last lines of each. To be called when all lines have come."""
        return [
            replace(failure, was_shown=bool(failure.last_lines) and shown.issuperset(failure.last_lines))
            for failure in self.failures
            for shown in [set(self._shown[failure.rank])]
        ]

    def end_lines(self) -> tuple[str, ...]:
        """How its part of the job ended, when no rank was the cause."""
        how = how_it_ended(self.code or 0)
        return f"the job failed on {self.name} ({how}){':' if self.agent_lines else ''}", *self.agent_lines

    def _receive(self, frame: Mapping[str, Any]) -> None:
        if frame["kind"] == "lines":
            rank = frame["rank"]
            label = self.name if rank is None else f"{self.name} {rank}"
            is_all_shown = self.screen.show(label, frame["lines"], is_error=frame["stream"] == "err")
            if is_all_shown and frame["stream"] != "out":
                self._shown[rank].extend(frame["lines"])
        else:
            self._remember(frame)
            self.on_frame(self, frame)

    def _remember(self, frame: Mapping[str, Any]) -> None:
        kind = frame["kind"]
        if kind == "hello":
            self.begun.set()
            self.connection.stderr.clear()  # a banner, most likely
        elif kind == "refused":
            self.was_refused = True
            self.ended.set()
        elif kind == "started":
            self.ranks, self.world_size, self.failures = frame["ranks"], frame["world_size"], []
            self.num_starts, self.restarts_left = frame["start"] + 1, frame["restarts_left"]
            self.diagnosis = None
        elif kind == "diagnosis":
            self.diagnosis = SidecarDiagnosis(**{name: frame[name] for name in DIAGNOSIS_FIELDS})
        elif kind == "ended":
            self.code, self.agent_lines = frame["code"], frame["last_lines"]
            self.ended.set()
        elif kind == "failed" and frame["rank"] not in (known.rank for known in self.failures):
            self.restarts_left = frame["restarts_left"]
            self.failures.append(
                RankFailure(
                    host=self.name,
                    rank=frame["rank"],
                    code=frame["code"],
                    at=frame["at"] - self.connection.clock_ahead_s,
                    last_lines=tuple(frame["last_lines"]),
                    is_follower=bool(frame.get("follows")),
                    error=str(frame.get("error", "")),
                )
            )
