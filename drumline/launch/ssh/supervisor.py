"""One node's supervisor, started over ssh by the controller: `python -m
drumline.launch.ssh.supervisor`, without torch.

It reads from stdin what to run, then a heartbeat every few seconds. It starts the node's agent,
follows the files that the ranks write, and sends what is new as frames on its stdout. When stdin
ends, or no heartbeat arrives for a lease, it ends everything that it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Protocol

from drumline.base.background import resolve_all
from drumline.base.processes import Termination, descendants
from drumline.base.rank_environment import LAUNCHER_LINK, LOST_AFTER_S, LauncherLink
from drumline.base.text import signal_name
from drumline.base.untrusted import make_own_folder, open_append, open_log
from drumline.launch.keep_going import SPACE_POLL_S, has_space, needed_bytes
from drumline.launch.node.guard import JOB_ENV, job_processes
from drumline.launch.node.rank_logs import last_lines
from drumline.launch.node_plan import silence_limit_s
from drumline.launch.ssh.node_output import NodeOutput, Sink
from drumline.net.frames import MAX_PIPE_BYTES, FrameReader, FrameWriter, Message, encode
from drumline.watch.watch_folder import hold, make_memory_folder

PROTOCOL = 13
PR_SET_CHILD_SUBREAPER = 36
# Until the first spec says how long it is.
LEASE_S = float(silence_limit_s(LOST_AFTER_S))
# When a lease has expired, ranks cannot save together: most likely they cannot reach each other
# either.
LOST_GRACE_S = 3.0
TICK_S = 0.1
# How long the last frames may take to reach the controller.
DRAIN_S = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A launcher that is silent for this long may be cut off; it sends heartbeats twice a second.
SILENT_S = 1.5
LINK_FILE = "launcher-link.json"
# How long the names of the hosts may take to resolve.
RESOLVE_S = 5.0


class Orders(Protocol):
    """Who starts and ends the attempt, and gets the frames about it."""

    @property
    def out(self) -> Sink: ...
    def read(self) -> list[Message]: ...


class ControllerLink:
    """Frames from and to the controller. Heartbeats are answered here."""

    def __init__(self) -> None:
        self.frames = FrameReader(0, max_bytes=MAX_PIPE_BYTES)
        self.out = FrameWriter(1)
        self.heard_at = time.monotonic()
        self.lease_s = LEASE_S
        self.grace_s = LOST_GRACE_S
        self.num_nodes = 1
        self.silent_nodes: tuple[int, ...] = ()
        """The nodes from which the launcher gets no heartbeat."""
        self._folder = make_memory_folder()
        self._lock = hold(self._folder)
        self._written: LauncherLink | None = None

    @property
    def link_file(self) -> Path:
        """For the sidecars: from which hosts the launcher gets heartbeats."""
        return self._folder / LINK_FILE

    def _share(self) -> None:
        """Write that file, when its content changes."""
        link = LauncherLink(
            is_cut_off=self.waited_s > SILENT_S,
            silent_nodes=self.silent_nodes,
            num_nodes=self.num_nodes,
        )
        if link != self._written:
            self._written = link
            with contextlib.suppress(OSError):
                link.write(self.link_file)

    def close(self) -> None:
        """Send what is left, for a limited time, and remove what was shared."""
        deadline = time.monotonic() + DRAIN_S
        while not self.out.is_empty() and time.monotonic() < deadline:
            select.select([], [1], [], TICK_S)
            self.out.flush()
        os.close(self._lock)
        shutil.rmtree(self._folder, ignore_errors=True)

    def read(self) -> list[Message]:
        """The frames that have arrived; waits a moment if there are none. The last one when the
        controller is lost: its order to end."""
        self.out.flush()
        select.select([] if self.frames.is_closed else [0], [], [], TICK_S)
        frames = self.frames.read()
        for frame in frames:
            self.heard_at = time.monotonic()
            if frame["kind"] == "silent":
                self.silent_nodes = tuple(frame["nodes"])
            if frame["kind"] == "heartbeat":
                self.out.send("heartbeat", number=frame["number"], now=time.monotonic())

        self._share()
        if self.frames.is_closed:
            why = "the launcher or the connection to it was lost"
            frames.append({"kind": "end", "grace_s": self.grace_s, "why": why})
        elif self.waited_s > self.lease_s:
            why = f"no heartbeat of the launcher for {self.lease_s:g} s"
            frames.append({"kind": "end", "grace_s": LOST_GRACE_S, "why": why})
        return frames

    @property
    def waited_s(self) -> float:
        """How long ago the last frame arrived."""
        return time.monotonic() - self.heard_at

    @property
    def is_alive(self) -> bool:
        """Whether the controller still sends."""
        return not self.frames.is_closed and self.waited_s < self.lease_s

    def wait_for_spec(self) -> Message | None:
        """What to run; None when the connection to the controller has ended."""
        while self.is_alive:
            for frame in self.read():
                if frame["kind"] == "spec":
                    self.lease_s = frame.get("lease_s", LEASE_S)
                    return frame
        return None


class AgentProcess:
    """The process of an agent (agent_process.py): it loads torch at once, and runs ranks when
    it gets its node."""

    def __init__(self, spec: Message, log: Path) -> None:
        reading, writing = os.pipe()
        module = ["-m", "drumline.launch.ssh.agent_process", str(writing), str(os.getpid())]
        variables = {"PYTHONUNBUFFERED": "1", **spec["environment"], JOB_ENV: spec["job"]}
        with open_append(log) as file:
            self.process = subprocess.Popen(
                [sys.executable, *module],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**os.environ, **variables},
                pass_fds=[writing],
                start_new_session=True,
            )

        os.close(writing)
        self.status = FrameReader(reading, max_bytes=MAX_PIPE_BYTES)
        """Starts and failures of its ranks."""
        self.send({**spec, "environment": {}})

    def send(self, frame: Message) -> None:
        """First the spec, then its node, when all hosts have answered and its ranks may start."""
        assert self.process.stdin
        with contextlib.suppress(OSError):  # it was killed
            self.process.stdin.write(encode(frame) + b"\n")
            self.process.stdin.flush()


class Supervisor:
    """One attempt on this node: its agent, the processes of its ranks, and what they write."""

    def __init__(self, spec: Message, link: Orders) -> None:
        self.spec = spec
        self.link = link
        self.out = link.out
        self.ending: Termination | None = None
        self.output = NodeOutput(spec, link.out)
        self.node_log = self.output.node_log
        self.agent = AgentProcess(spec, self.node_log)
        self.end_reason = ""
        """Why this process ended the attempt by itself; empty: the controller asked for it, or the
        agent exited."""
        self.error: list[str] = []
        """Why the agent failed, if no rank was the cause."""
        self.lost_first_node = False
        """Whether that was because the first node, which runs the rendezvous, is lost."""

    def run(self) -> None:
        """Run this attempt to its end, which is reported."""
        for number in SIGNALS:
            signal.signal(number, self._end_by_signal)

        agent = self.agent.process
        while agent.poll() is None or self.ending:
            self._handle(self.link.read())
            _reap_orphans(agent.pid)
            self._send_news()
            if self.ending and self.ending.step() and agent.poll() is not None:
                break

        # The agent has ended; end the processes that its ranks left running.
        Termination(self._processes, LOST_GRACE_S).wait()
        self._send_news(is_last=True)
        self._report_end(agent.wait())

    def _report_end(self, code: int) -> None:
        """`code`: of the agent."""
        self._log(*self.error)
        log_end = last_lines(self.node_log) if code else []
        self.out.send(
            "ended",
            code=code,
            last_lines=self.error or log_end,
            end_reason=self.end_reason,
        )

    def _end_by_signal(self, number: int, _: FrameType | None) -> None:
        """As when the host is shut down."""
        self.end(self.spec["grace_s"], f"ended by {signal_name(number)}")

    def end(self, grace_s: float, why: str = "") -> None:
        """End all processes of the attempt. The reason is in the node's log: the controller may not
        know it."""
        if self.ending is None:
            if why:
                self.end_reason = why
                self._log(f"drumline: {why}")
            self.ending = Termination(self._processes, grace_s)

        self.ending.shorten(grace_s)

    def _log(self, *lines: str) -> None:
        """Add lines to the node's log."""
        with contextlib.suppress(OSError), open_log(self.node_log) as log:
            log.writelines(f"{line}\n" for line in lines)

    def _processes(self) -> set[int]:
        """The processes of this attempt: by its name, and by descent, as a process may have changed
        its environment."""
        return {*job_processes(self.spec["job"]), *descendants(os.getpid())}

    def _handle(self, frames: list[Message]) -> None:
        """Do what was asked for."""
        for frame in frames:
            if frame["kind"] == "start":
                self.agent.send(frame["node"])
            elif frame["kind"] == "end":
                self.end(frame["grace_s"], frame.get("why", ""))

    def _send_news(self, *, is_last: bool = False) -> None:
        """Send what ranks did and wrote, as fast as the controller reads."""
        for frame in self.agent.status.read():
            if frame["kind"] == "error":
                self.error = f"drumline: error: {frame['text']}".splitlines()
                self.lost_first_node = frame["lost_first_node"]
                continue

            if frame["kind"] == "started":
                self.output.follow(frame["ranks"], frame["start"])
            elif frame["kind"] == "failed":
                frame["last_lines"] = self.output.last_lines(frame["rank"], frame["start"])
            self.out.send(**frame)

        self.output.send_news(is_last=is_last)
        self.out.flush()


def _reap_orphans(agent: int) -> None:
    """Orphans of the job become our children, and are zombies until they are reaped. `agent`: its
    pid; whoever waits for it reaps it."""
    without_reaping = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        child = os.waitid(os.P_ALL, 0, without_reaping)
        while child is not None and child.si_pid != agent:
            os.waitpid(child.si_pid, 0)
            child = os.waitid(os.P_ALL, 0, without_reaping)


def refusals(spec: Message) -> Iterator[tuple[str, str]]:
    """Why the job cannot start on this node: what is wrong, and what to do."""
    words = spec["program"]["words"]
    if not spec["program"]["is_task"] and not Path(words[0]).is_file():
        yield f"there is no file {words[0]} in {Path.cwd()}", "copy the code there, or add --sync"
    try:
        make_own_folder(Path(spec["logs"]), follow_links=True)
    except OSError as error:
        yield (
            f"the log folder {spec['logs']} cannot be made: {error.strerror}",
            "choose another with --logs",
        )


def accept_or_refuse(spec: Message, link: ControllerLink) -> bool:
    """Answer whether the job can start on this node: with the address at which ssh has reached it,
    and the hosts' names that it does not resolve; or with what is wrong."""
    if problems := list(refusals(spec)):
        link.out.send("refused", problems=problems)
        return False

    answers = resolve_all(spec["names"], limit_s=RESOLVE_S)
    unknown_names = [
        name for name, answer in answers.items() if "error" in answer and ":" not in name
    ]
    ends = os.environ.get("SSH_CONNECTION", "").split()
    address = ends[2] if len(ends) == 4 else ""
    link.out.send("hello", protocol=PROTOCOL, address=address, unknown_names=unknown_names)
    return True


def await_space(spec: Message, link: ControllerLink) -> bool:
    """Wait until the disk that was full has space again, where there was one; False: the launcher
    is gone."""
    folder = spec["full_disk"]
    if not folder:
        return True

    size = needed_bytes(spec["program"]["run"])
    tried_at = 0.0
    while link.is_alive:
        if time.monotonic() - tried_at > SPACE_POLL_S:
            if has_space(folder, size):
                return True
            tried_at = time.monotonic()
        link.read()

    return False


def serve(answer: Callable[[Message, ControllerLink], None]) -> int:
    """Answer what the controller sends first."""
    link = ControllerLink()
    request = link.wait_for_spec()
    if request is not None and request["protocol"] == PROTOCOL:
        answer(request, link)
    elif request is not None:
        link.out.send("refused", problems=[])
    link.close()
    return 0


def main() -> int:
    """Run one attempt."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return serve(_run_attempt)


def _run_attempt(spec: Message, link: ControllerLink) -> None:
    """Check what can be checked before all hosts have answered, then run it."""
    link.grace_s = spec["grace_s"]
    link.num_nodes = spec["node"]["num_nodes"]
    if spec["earlier"]:
        # No two attempts of a launch may write to one run folder.
        Termination(lambda: job_processes(*spec["earlier"]), 0).wait()

    if not (await_space(spec, link) and accept_or_refuse(spec, link)):
        return

    spec["environment"] = {**spec["environment"], LAUNCHER_LINK: str(link.link_file)}
    Supervisor(spec, link).run()
    Termination(lambda: descendants(os.getpid()), 0).wait()


if __name__ == "__main__":
    sys.exit(main())
