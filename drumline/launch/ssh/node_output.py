"""What the agent and the ranks of a node write to their files, sent as frames while they write it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from drumline.base.rank_environment import read_rank
from drumline.launch.node.rank_logs import LogFollower, last_lines, rank_file, rank_output
from drumline.net.frames import Message

# The key of the agent's log among those of ranks.
AGENT = (None, "err")


class Sink(Protocol):
    """Where frames go."""

    def send(self, kind: str, **content: Any) -> None: ...
    def has_room(self) -> bool: ...
    def flush(self) -> None: ...


class NodeOutput:
    """The log files of one node."""

    def __init__(self, spec: Message, out: Sink, *, from_end: bool = True) -> None:
        """`spec`: of the attempt. `from_end`: leave out what is there already, of an earlier
        attempt."""
        self.logs = Path(spec["logs"])
        self.node_log = self.logs / f"node-{spec['node']['node_rank']}.log"
        self.run: str | None = spec["program"]["run"]
        """The run folder of a task, with its own logs."""
        self.out = out
        self.followers: dict[tuple[int | None, str], LogFollower] = {
            AGENT: LogFollower(self.node_log, from_end=from_end)
        }
        """By rank (None for the agent) and stream."""
        self.rank_files: dict[int, Path] = {}
        """By rank: where its process writes which rank it is now."""
        self.ranks_now: dict[int, int] = {}
        """The ranks that are others than when they were started, after the group of nodes has
        changed."""

    def send_news(self, *, is_last: bool = False) -> None:
        """Send new lines; `is_last`: all that are left, however many wait."""
        self._renumber()
        self._send_lines(is_last=is_last)

    def last_lines(self, rank: int, start: int) -> list[str]:
        """The last lines of a rank that failed, from the first of its files that has any."""
        out, err = rank_output(self.logs, rank, start)
        task_log = self._task_log(self.ranks_now.get(rank, rank))
        log_ends = map(last_lines, [err, *task_log, out])
        return next(filter(None, log_ends), [])

    def follow(self, ranks: list[int], start: int) -> None:
        """Follow the files of ranks that have just been started, in place of those before."""
        self._send_lines(is_last=True)  # of an earlier start
        self.followers = {AGENT: self.followers[AGENT]}
        self.ranks_now = {}
        self.rank_files = {rank: rank_file(self.logs, rank, start) for rank in ranks}
        for rank in ranks:
            out, err = rank_output(self.logs, rank, start)
            self.followers[rank, "out"] = LogFollower(out)
            self.followers[rank, "err"] = LogFollower(err)
            self._follow_task_log(rank, rank)

    def _renumber(self) -> None:
        """Without a lost node the ranks after it have other numbers, and write to the logs of
        those."""
        for rank, path in self.rank_files.items():
            number = read_rank(path)
            if number is None or number == self.ranks_now.get(rank, rank):
                continue

            self._send_lines(is_last=True)  # of its earlier number
            self.ranks_now[rank] = number
            self.followers.pop((rank, "log"), None)
            self._follow_task_log(rank, number)

    def _send_lines(self, *, is_last: bool) -> None:
        """Send what was written since the last call, as far as there is room."""
        for (rank, stream), follower in self.followers.items():
            if not self.out.has_room() and not is_last:
                break

            if lines := follower.rest() if is_last else follower.read():
                number = None if rank is None else self.ranks_now.get(rank, rank)
                self.out.send("lines", rank=number, stream=stream, lines=lines)

    def _follow_task_log(self, rank: int, number: int) -> None:
        """`number`: the rank that it is now."""
        for log in self._task_log(number):
            self.followers[rank, "log"] = LogFollower(log, from_end=True)

    def _task_log(self, rank: int) -> list[Path]:
        """The log files that a rank of a task writes itself; rank 0 also writes to its stdout."""
        if self.run is None or rank == 0:
            return []
        return [Path(self.run, "logs", f"rank-{rank:05d}.log")]
