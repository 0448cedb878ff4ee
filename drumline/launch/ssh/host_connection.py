"""The connection to one host: an ssh client or a socket, frames in both directions, heartbeats, and
the offset of its clock.

`drumline doctor` sends its requests over the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from drumline.base.text import how_it_ended
from drumline.base.untrusted import from_json
from drumline.launch.hosts import Host
from drumline.launch.node.rank_logs import decoded
from drumline.launch.ssh.supervisor import LEASE_S
from drumline.net.dial import WaitNotice
from drumline.net.frames import MAX_PIPE_BYTES, WRONG_SEAL, FrameError, LineBuffer, Message, Session

HEARTBEAT_S = 0.5
# If more bytes than this are unsent, the network is cut: heartbeats that wait in a queue do not
# count.
MAX_UNSENT = 1 << 14
MAX_SHOWN = 1 << 12
# How long ssh may take to send a last frame.
LAST_FRAME_S = 0.5
# An ssh that was asked to end and does not (it is stopped, or a wrapper that ignores it) is killed.
HANG_UP_S = 2.0
# A host may take so many times as long to answer as the slowest of those that have.
START_FACTOR = 3.0
# How long a supervisor that has nothing left to do may take to exit.
CLOSE_S = 5.0
Int = Annotated[int, Meta(gt=-(1 << 53), lt=1 << 53)]
Number = Annotated[float, Meta(gt=-(1 << 53), lt=1 << 53)]


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """A rank that failed, as its host reports it."""

    host: str = ""
    rank: Int
    code: Int
    failed_at: Number
    """By the clock of its host; once it is noted, by the controller's monotonic clock."""
    restarts_left: Int
    last_lines: tuple[str, ...]
    is_follower: bool = False
    """Whether it failed because another rank failed first, as the rank itself reports."""
    error: str = ""
    """Its error in one line, if the rank could report it."""
    full_disk: str = ""
    """The folder whose disk is full, if that is why."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({how_it_ended(self.code)})"


# What a host may send, with the type of each field; anything else is ignored, since a host may have
# another version, or be compromised.
FORMS: dict[str, Any] = {
    "hello": {
        "protocol": Int,
        "address": NotRequired[str],
        "unknown_names": NotRequired[list[str]],
    },
    "refused": {"problems": list[tuple[str, str]]},
    "started": {"ranks": list[Int], "world_size": Int, "start": Int, "restarts_left": Int},
    "diagnosis": {
        "alarm": str,
        "action": str,
        "sentence": str,
        "was_printed": bool,
        "is_last": bool,
        "what": NotRequired[str],
        "rank": NotRequired[Int | None],
        "host": NotRequired[str],
        "is_ranks_error": NotRequired[bool],
    },
    "progress": {"reached_step": Int, "counted_step": Int},
    "ended": {"code": Int, "last_lines": list[str]},
    "failed": RankFailure,
    "lines": {"rank": Int | None, "stream": str, "lines": list[str]},
    "heartbeat": {"number": Int, "now": Number},
    "answer": {"id": Int},
    "notice": {"text": str},
    "job": {"name": str},
}
_FRAMES: dict[str, Any] = {
    kind: TypedDict(kind, form) if isinstance(form, dict) else form  # type: ignore[operator]
    for kind, form in FORMS.items()
}


def decode_from_host(line: bytes, session: Session) -> Message | None:
    """A frame from a host; None for anything else: a remote shell may print a greeting."""
    try:
        frame = session.decode(line)
        from_json(_FRAMES[str(frame.get("kind"))], frame)
    except FrameError as error:
        if error.kind == WRONG_SEAL:
            raise
        return None
    except (KeyError, ValueError):
        return None

    return frame


@dataclass
class StartTimes:
    """How long hosts take to answer: one that takes much longer than the others is stuck."""

    least_s: float
    most_s: float
    """While none has answered: all may load Python from one slow disk."""
    measured_s: list[float] = field(default_factory=list)

    @property
    def limit_s(self) -> float:
        """For a host that has not answered yet."""
        if not self.measured_s:
            return self.most_s
        return min(self.most_s, max(self.least_s, START_FACTOR * max(self.measured_s)))


@dataclass(eq=False)
class HostConnection:
    """Opened once; closed when ssh has ended."""

    host: Host
    words: list[str]
    """The command line, which contains nothing secret; empty: `reader` and `writer` are
    connected."""
    start_timeout_s: float
    """For the first frame."""
    on_waiting: Callable[[str], None] = lambda _: None
    """Called with a message while the first frame does not come."""
    lease_s: float = LEASE_S
    """How long it may be silent."""
    on_frame: Callable[[Message], None] = lambda _: None
    """Called for each frame except heartbeats; set by the current attempt."""
    start_times: StartTimes | None = None
    """Of all hosts, where these set the limit in place of `start_timeout_s`."""
    session: Session = field(default_factory=lambda: Session(max_bytes=MAX_PIPE_BYTES))
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    stderr: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """Lines since the last success: ssh's own messages, or why there is no supervisor."""
    stdout: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """Lines that are not frames: a shell's greeting, or why it allows no login."""
    is_stuck: bool = False
    """Whether it was closed because nothing started in time."""
    ssh_code: int | None = None
    """None: it has not ended, as far as we know."""
    heard_at: float = 0.0
    """When the last frame arrived, by this machine's monotonic clock, as for failures; 0: never."""
    _process: asyncio.subprocess.Process | None = None
    _reading: asyncio.Task[None] | None = None
    _heartbeats: dict[int, float] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    """How far the host's monotonic clock is ahead of ours, as measured in the shortest round
    trip."""
    _round_trip_s: float = float("inf")
    _opened_at: float = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the remote program was started, and has not ended."""
        return self._reading is not None and self.ssh_code is None

    async def open(self) -> asyncio.Task[None]:
        """Start the remote program, unless it runs. The task ends with the connection."""
        if self._reading is None:
            if self.words:
                # In a new session: we handle Ctrl-C, and inform the supervisors.
                self._process = await asyncio.create_subprocess_exec(
                    *self.words,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )
                self.reader = self._process.stdout
                self.writer = self._process.stdin

            self._reading = asyncio.create_task(self._read())

        return self._reading

    async def close(self) -> None:
        """End the remote program by closing its stdin."""
        if self._reading is None or self.writer is None:
            return

        self.writer.close()
        await asyncio.wait({self._reading}, timeout=CLOSE_S)
        if self.is_open:
            self.hang_up()
        await self._reading

    def send(self, frame: Message) -> None:
        """Nothing is sent once the connection is closed."""
        if self.writer is not None and not self.writer.is_closing():
            self.writer.write(self.session.encode(frame))

    def hang_up(self) -> None:
        """End the connection; to the program at its other end this process has then ended."""
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(HANG_UP_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """Signal ssh and its children, such as the ssh to a jump host, which has our pipes too."""
        if self._process is None and self.writer is not None:
            self.writer.transport.abort()
        elif self._process is not None and self.is_open:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _read(self) -> None:
        """Read what the host sends until the connection ends."""
        heartbeats = asyncio.create_task(self._send_heartbeats())
        reading = [_read_lines(self.reader, self._receive)]
        if self._process is not None:
            reading.append(
                _read_lines(self._process.stderr, lambda line: self.stderr.append(decoded(line)))
            )

        try:
            await asyncio.gather(*reading)
        except BaseException:
            # A bug in a frame's handler, or a wrong seal; without a reader the connection is
            # useless.
            self._signal(signal.SIGKILL)
            raise
        finally:
            self.ssh_code = await self._process.wait() if self._process else 0
            heartbeats.cancel()
            if self.writer is not None:
                self.writer.close()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats, and hang up when the host does not answer them."""
        assert self.writer
        notice = WaitNotice()
        self._opened_at = time.monotonic()
        for number in itertools.count():
            if self.writer.transport.get_write_buffer_size() < MAX_UNSENT:
                latest = list(self._heartbeats.items())[-10:]
                self._heartbeats = {**dict(latest), number: time.monotonic()}
                self.send({"kind": "heartbeat", "number": number})

            await asyncio.sleep(HEARTBEAT_S)
            if not self.heard_at:
                self._check_start(notice)
            elif time.monotonic() - self.heard_at > self.lease_s:
                self.stderr.append(f"no heartbeat for {self.lease_s:g} s")
                # The host may still receive this, and would give its ranks their grace period.
                self.send({"kind": "end", "grace_s": 0})
                await asyncio.sleep(LAST_FRAME_S)
                self.hang_up()

    def _check_start(self, notice: WaitNotice) -> None:
        """ssh limits the time to connect; a remote shell or file system may still block forever."""
        if notice.is_due():
            self.on_waiting(
                f"waiting for {self.host.address} to start, {notice.waited_s:.0f} s so far"
            )

        limit_s = self.start_times.limit_s if self.start_times else self.start_timeout_s
        if notice.waited_s > limit_s:
            self.is_stuck = True
            self.stderr.append(f"no answer within {notice.waited_s:.0f} s")
            self.hang_up()

    def _receive(self, line: bytes) -> None:
        """One line: a frame, or what a shell prints."""
        frame = decode_from_host(line, self.session)
        if frame is None:
            self.stdout.append(decoded(line[:MAX_SHOWN]))
            return

        now = time.monotonic()
        if self.start_times and not self.heard_at:
            self.start_times.measured_s.append(now - self._opened_at)
        self.heard_at = now
        if frame["kind"] != "heartbeat":
            self.on_frame(frame)
        elif (sent := self._heartbeats.pop(frame["number"], None)) is not None:
            round_trip_s = self.heard_at - sent
            if round_trip_s < self._round_trip_s:
                self._round_trip_s = round_trip_s
                self.clock_ahead_s = frame["now"] - sent - round_trip_s / 2


async def _read_lines(
    stream: asyncio.StreamReader | None, receive: Callable[[bytes], None]
) -> None:
    """A line that is longer than any frame comes in pieces; the last line need not be complete."""
    assert stream
    lines = LineBuffer(MAX_PIPE_BYTES)
    with contextlib.suppress(ConnectionError):
        while data := await stream.read(1 << 16):
            lines.add(data)
            while (line := lines.pop()) is not None:
                receive(line)

    if rest := lines.clear():
        receive(rest)
