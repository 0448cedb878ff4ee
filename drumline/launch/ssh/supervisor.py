"""One node's supervisor, started over ssh by the controller: `python -m drumline.launch.ssh.supervisor`, without torch.

Its stdin has what to run, then a heartbeat every few seconds. It ends what an earlier attempt of the launch has left
here, starts the node's job, which waits until all hosts are there, follows the files that the ranks write, and sends
what is new as frames on its stdout. When stdin ends, or no heartbeat came for a lease, the controller is gone or
unreachable: it ends the job, all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any

from drumline.launch.node import guard
from drumline.launch.node.supervision import LAST_LINES, rank_output
from drumline.launch.ssh.follow import Follower, last_lines
from drumline.launch.ssh.frames import PROTOCOL, FrameReader, FrameWriter

PR_SET_CHILD_SUBREAPER = 36
# After a cut of 10 s TCP sends again within 13 s; a host that was only cut off that long is not lost.
LEASE_S = 20.0
# After a lease has run out there is nobody to save with: the ranks cannot reach each other either, most likely.
LOST_GRACE_S = 3.0
TICK_S = 0.1
# How long the last words may take to reach the controller.
DRAIN_S = 5.0


class Supervisor:
    """The job of this node and all around it."""

    def __init__(self, spec: dict[str, Any], controller: FrameReader, out: FrameWriter) -> None:
        self.spec = spec
        self.controller = controller
        self.out = out
        self.logs = Path(spec["logs"])
        self.node_log = self.logs / f"node-{spec['node']['node_rank']}.log"
        self.heard_at = time.monotonic()
        self.ending: guard.Ending | None = None
        self.followers: dict[tuple[int | None, str], Follower] = {}
        self._job_input: IO[bytes] | None = None
        self.error: list[str] = []
        """Why the node's job gave up, when no rank was to blame."""

    def run(self) -> None:
        """To the end of the job, which is told."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._told)
        self.followers[None, "err"] = Follower(self.node_log, from_end=True)
        job, self.status = self._start()
        self._job_input = job.stdin
        while job.poll() is None or self.ending:
            self._wait()
            _bury_all_but(job.pid)
            self._hear()
            self._pass_on()
            if self.ending and self.ending.step() and job.poll() is not None:
                break
        # The job has ended; what its ranks left running ends as well.
        guard.Ending(self._find, LOST_GRACE_S).finish()
        self._pass_on(is_last=True)
        code = job.wait()
        last_words = self.error or (last_lines(self.node_log, LAST_LINES) if code else [])
        self._log(*self.error)
        self.out.send("ended", code=code, last_words=last_words)

    def _told(self, number: int, _: FrameType | None) -> None:
        self.end(self.spec["grace_s"], f"told to end by {signal.Signals(number).name}")

    def end(self, grace_s: float, why: str = "") -> None:
        """Ask all to end, and see to it that they do. The controller may not know why: the node's log does."""
        if self.ending is None:
            if why:
                self._log(f"drumline: {why}")
            self.ending = guard.Ending(self._find, grace_s)
        self.ending.hurry(grace_s)

    def _log(self, *lines: str) -> None:
        with (
            contextlib.suppress(OSError),
            self.node_log.open("a", encoding="utf-8", errors="backslashreplace") as log,
        ):
            log.writelines(f"{line}\n" for line in lines)

    def _start(self) -> tuple[subprocess.Popen[bytes], FrameReader]:
        reading, writing = os.pipe()
        environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **self.spec["environment"],
            guard.VARIABLE: self.spec["job"],
        }
        with self.node_log.open("ab") as log:
            job = subprocess.Popen(
                [sys.executable, "-m", "drumline.launch.ssh.node_job", str(writing), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[writing],
                start_new_session=True,
            )
        os.close(writing)
        assert job.stdin
        with contextlib.suppress(OSError):
            job.stdin.write(json.dumps({**self.spec, "environment": {}}).encode() + b"\n")
            job.stdin.flush()
        return job, FrameReader(reading)

    def _go(self, node: dict[str, Any]) -> None:
        """All hosts are there: the job may start its ranks."""
        if self._job_input is not None:
            with contextlib.suppress(OSError), self._job_input as stdin:
                stdin.write(json.dumps(node).encode() + b"\n")

    def _find(self) -> set[int]:
        """All of the job: by its name, and by descent, for those that have changed their environment."""
        return {*guard.marked(self.spec["job"]), *guard.descendants(os.getpid())}

    def _wait(self) -> None:
        watched = [] if self.controller.is_closed else [0]
        select.select(watched, [], [], TICK_S)

    def _hear(self) -> None:
        for frame in self.controller.read():
            self.heard_at = time.monotonic()
            if frame["kind"] == "beat":
                self.out.send("beat", number=frame["number"], now=time.monotonic())
            elif frame["kind"] == "start":
                self._go(frame["node"])
            elif frame["kind"] == "end":
                self.end(frame["grace_s"])
        if self.controller.is_closed:
            if self.ending is None:
                self.end(self.spec["grace_s"], "the launcher, or the connection to it, is gone")
        elif time.monotonic() - self.heard_at > self.spec["lease_s"]:
            self.end(LOST_GRACE_S, f"nothing was heard of the launcher for {self.spec['lease_s']:g} s")

    def _pass_on(self, *, is_last: bool = False) -> None:
        """What ranks did and wrote, as far as the controller keeps up."""
        for frame in self.status.read():
            if frame["kind"] == "error":
                self.error = f"drumline: error: {frame['text']}".splitlines()
                continue
            if frame["kind"] == "started":
                self._follow(frame["ranks"], frame["start"])
            elif frame["kind"] == "failed":
                frame["last_words"] = self._last_words(frame["rank"], frame["start"])
            self.out.send(**frame)
        for (rank, stream), follower in self.followers.items():
            if not self.out.has_room() and not is_last:
                break
            if lines := follower.rest() if is_last else follower.read():
                self.out.send("lines", rank=rank, stream=stream, lines=lines)
        self.out.flush()

    def _follow(self, ranks: list[int], start: int) -> None:
        for (rank, stream), follower in self.followers.items():
            if lines := follower.rest():  # of an earlier start
                self.out.send("lines", rank=rank, stream=stream, lines=lines)
        self.followers = {key: follower for key, follower in self.followers.items() if key[0] is None}
        for rank in ranks:
            output = rank_output(self.logs, rank, start)
            self.followers[rank, "out"] = Follower(output.out)
            self.followers[rank, "err"] = Follower(output.err)
            for path in self._diverted(rank):
                self.followers[rank, "log"] = Follower(path, from_end=True)

    def _last_words(self, rank: int, start: int) -> list[str]:
        output = rank_output(self.logs, rank, start)
        places = [output.err, *self._diverted(rank), output.out]
        return next((lines for path in places if (lines := last_lines(path, LAST_LINES))), [])

    def _diverted(self, rank: int) -> list[Path]:
        """Where a rank of a task writes to by itself; rank 0, which speaks for all, does so besides."""
        folder = self.spec["task_logs"]
        return [] if folder is None or rank == 0 else [Path(folder) / f"rank-{rank:05d}.log"]


def _bury_all_but(pid: int) -> None:
    """Orphans of the job are our children, and stay as zombies until we have looked at them."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, look)) is not None and found.si_pid != pid:
            os.waitpid(found.si_pid, 0)


def refusals(spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Why the job cannot be started on this node: what is wrong, and what to do."""
    words = spec["program"]["words"]
    if not spec["program"]["is_task"] and not Path(words[0]).is_file():
        yield f"there is no file {words[0]} in {Path.cwd()}", "copy the code there, or add --sync"
    try:
        Path(spec["logs"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"the log folder {spec['logs']} cannot be made: {error.strerror}", "choose another with --logs"


def main() -> int:
    """Read what to run, and run it."""
    controller, out = FrameReader(0), FrameWriter(1)
    while not (frames := controller.read()):
        if controller.is_closed or not select.select([0], [], [], LEASE_S)[0]:
            return 1
    spec = frames[0]
    if spec["protocol"] == PROTOCOL and spec["earlier"]:
        # No two attempts of a launch may write to one run folder.
        guard.Ending(lambda: guard.marked(*spec["earlier"]), 0).finish()
    out.send("hello", host=socket.gethostname(), protocol=PROTOCOL)
    problems = list(refusals(spec)) if spec["protocol"] == PROTOCOL else []
    if problems or spec["protocol"] != PROTOCOL:
        out.send("refused", problems=problems)
    else:
        Supervisor(spec, controller, out).run()
    deadline = time.monotonic() + DRAIN_S
    while not out.is_empty() and time.monotonic() < deadline:
        select.select([], [1], [], TICK_S)
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
