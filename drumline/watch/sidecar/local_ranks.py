"""The ranks of this node: their observed states, the reports of their scripts, and how they are
killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from drumline.base.errors import log
from drumline.base.processes import EXITED, TICKS_PER_S, descendants, read_stat, send_signal
from drumline.base.untrusted import parse_json
from drumline.net.frames import MAX_BYTES
from drumline.watch.cluster_state import NodeState
from drumline.watch.heartbeat import Phase
from drumline.watch.sidecar.kernel_evidence import kernel_lines, link_problem
from drumline.watch.sidecar.rank_observer import RankObserver
from drumline.watch.sidecar.sidecar_network import SidecarNetwork
from drumline.watch.sidecar.sidecar_options import SidecarOptions
from drumline.watch.watch_folder import Ending, note_ending

MAX_REPORT_BYTES = MAX_BYTES - 1024
MAX_UNSENT_BYTES = (
    1 << 16
)  # a script's report is sent only if no more than this waits: heartbeats come first


class LocalRanks:
    """Observes the ranks, and keeps their latest states."""

    def __init__(self, options: SidecarOptions, address: str = "") -> None:
        """`address`: where the other nodes reach this one."""
        self.options = options
        self._address = address
        self._observers = [
            RankObserver(Path(options.folder), rank, options.host) for rank in options.ranks
        ]
        self._begun = time.monotonic()
        self._exit_fds: set[int] = set()
        self._slowdown = start_slowdown()
        self.state = NodeState(node=options.node, host=options.host)

    def observe(self, now_s: float, heartbeat_age_s: Mapping[int, float]) -> NodeState:
        """The cheap part of the state, for each heartbeat of this node."""
        ranks = [observer.observe(now_s) for observer in self._observers]
        activity = [observer.activity(now_s) for observer in self._observers]
        self.state = NodeState(
            node=self.options.node,
            host=self.options.host,
            ranks=tuple(rank for rank in ranks if rank is not None),
            heartbeat_age_s=heartbeat_age_s,
            slowdown=self._slowdown,
            activity=tuple(rank for rank in activity if rank is not None),
        )
        return self.state

    def observe_exits(self, loop: asyncio.AbstractEventLoop) -> None:
        """Observe a rank at once when it exits: its exit status is visible only until its parent
        has reaped it."""

        def observe(observer: RankObserver, fd: int) -> None:
            loop.remove_reader(fd)
            observer.observe(time.monotonic())

        for observer in self._observers:
            fd = observer.fileno()
            if fd is not None and fd not in self._exit_fds:
                self._exit_fds.add(fd)
                loop.add_reader(fd, observe, observer, fd)

    async def inspect(self, heartbeat_age_s: Mapping[int, float]) -> NodeState:
        """The complete state; takes a second or two."""
        return NodeState(
            node=self.options.node,
            host=self.options.host,
            ranks=tuple(
                await asyncio.gather(*(observer.inspect() for observer in self._observers))
            ),
            heartbeat_age_s=heartbeat_age_s,
            slowdown=self._slowdown,
            link=link_problem(self._address) if self._address else "",
            kernel=kernel_lines(self._begun),
        )

    @property
    def pids(self) -> dict[int, int]:
        return {rank.rank: rank.pid for rank in self.state.ranks}

    @property
    def have_started(self) -> bool:
        """Whether every rank was seen at least once."""
        return len(self.state.ranks) == len(self.options.ranks)

    @property
    def are_done(self) -> bool:
        """Whether every rank is out of its loop, or has exited."""
        return self.have_started and all(
            rank.phase is Phase.LEFT or rank.state in EXITED for rank in self.state.ranks
        )

    @property
    def ended_well(self) -> bool:
        return self.have_started and all(rank.phase is Phase.LEFT for rank in self.state.ranks)

    def kill(self, why: str) -> None:
        """Kill the ranks and their descendants, except this process, with SIGKILL: some may be
        stopped."""
        note_ending(
            Path(self.options.folder), Ending(time.monotonic(), 0.0, by="watchdog", why=why)
        )
        for rank in self.state.ranks:
            if rank.state not in EXITED:
                pids = [rank.pid, *descendants(rank.pid)]
                send_signal((pid for pid in pids if pid != os.getpid()), signal.SIGKILL)


def start_slowdown() -> float:
    """How many times longer this process has taken so far than the CPU time that it used; at least
    1. It is called when the process has started: what it did was to load Python and its modules."""
    stat = read_stat(os.getpid())
    if stat is None:
        return 1.0
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / TICKS_PER_S
    return max(1.0, age_s / max(time.process_time(), 1 / TICKS_PER_S))


class ScriptReports:
    """The latest report of each rank's script: read from its file, and sent to every sidecar that
    may lead; sent again if that failed, unless it is too long."""

    def __init__(self, options: SidecarOptions) -> None:
        self._files = {
            rank: Path(options.folder, f"rank-{rank:05d}.script") for rank in options.ranks
        }
        self._peers = [peer.node for peer in options.peers]
        self._read_at: dict[int, int] = {}
        self._records: dict[int, Any] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._too_long: set[int] = set()

    def update(self, network: SidecarNetwork) -> Iterator[tuple[int, Any]]:
        """Ranks whose reports have changed, with the reports as JSON values."""
        for rank, file in self._files.items():
            try:
                changed = file.stat().st_mtime_ns
                if changed != self._read_at.get(rank):
                    text = file.read_bytes()
                    self._records[rank] = parse_json(text)
                    self._read_at[rank] = changed
                    if len(text) > MAX_REPORT_BYTES:
                        self._sent.update({(node, rank): changed for node in self._peers})
                        self._warn(rank, len(text))
                    yield rank, self._records[rank]
            except (OSError, ValueError):  # a script that has not started, or has exited
                continue
        for rank, record in self._records.items():
            for node in self._peers:
                if self._sent.get((node, rank)) != self._read_at[rank] and network.send(
                    node,
                    {"kind": "script", "rank": rank, "report": record},
                    max_unsent=MAX_UNSENT_BYTES,
                ):
                    self._sent[node, rank] = self._read_at[rank]

    def _warn(self, rank: int, num_bytes: int) -> None:
        if rank not in self._too_long:
            self._too_long.add(rank)
            log.warning(
                f"rank {rank} is not compared with the ranks of other nodes: {num_bytes} bytes about its script and "
                f"its parameters are more than the {MAX_REPORT_BYTES} that sidecars send each other"
            )
