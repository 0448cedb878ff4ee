"""One host of a job as the controller sees it: the ssh client, the frames both ways, and what is known of its ranks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drumline.launch.hosts import Host
from drumline.launch.node.addresses import Patience
from drumline.launch.node.local import how_it_ended
from drumline.launch.node.supervision import LAST_LINES
from drumline.launch.node.watch_folder import Ruling
from drumline.launch.ssh.errors import NOT_STARTED
from drumline.launch.ssh.follow import shown
from drumline.launch.ssh.frames import decode, encode
from drumline.launch.ssh.screen import Screen
from drumline.launch.ssh.supervisor import LEASE_S
from drumline.launch.ssh.verdict import Failure

BEAT_S = 2.0
# ssh itself mostly notices sooner; not where the connection is one that others share.
SILENCE_S = LEASE_S
# More than that unsent is a network that is cut; beats that wait in a queue prove nothing.
MAX_UNSENT = 1 << 14
# How long ssh has to pass on a last frame.
PASS_ON_S = 0.5
# An ssh that was asked to end and does not (it is stopped, or a wrapper that does not listen) is killed.
HANG_UP_S = 2.0


@dataclass(eq=False)
class Remote:
    """Its ssh client runs as long as `run` does."""

    host: Host
    words: list[str]
    """The command line, which has nothing secret in it."""
    spec: Mapping[str, Any] = field(repr=False)
    screen: Screen
    heard: Callable[[Remote, Mapping[str, Any]], None]
    """Called for each frame that is not about output."""

    said: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """What came on stderr since the last thing that went well: ssh's own words, or why there is no supervisor."""
    greeting: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """What a shell over there says to whoever comes, or to whom it does not let in."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_refused: bool = False
    ranks: list[int] = field(default_factory=list)
    world_size: int = 0
    """How many ranks the job had when these were started; others may have been started again since."""
    num_starts: int = 0
    """Of ranks here, over all attempts of the launch."""
    restarts_left: int | None = None
    """As its agent counts them; None: it has not started ranks yet."""
    failures: list[Failure] = field(default_factory=list)
    """Since the ranks were last started."""
    ruling: Ruling | None = None
    """What the sidecars said of that."""
    code: int | None = None
    """What the node's job ended with."""
    node_words: list[str] = field(default_factory=list)
    """What the agent said last, when that was no success."""
    ssh_code: int | None = None
    heard_at: float = 0.0
    """By this machine's monotonic clock, as the times of failures are."""
    _process: asyncio.subprocess.Process | None = None
    _shown: defaultdict[int | None, deque[str]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=2 * LAST_LINES))
    )
    """The latest lines on the screen, by rank, without what it prints to stdout."""
    _beats: dict[int, float] = field(default_factory=dict)
    _clock: tuple[float, float] = (float("inf"), 0.0)
    """The shortest way to and fro, and how far the host's monotonic clock was ahead then."""

    @property
    def name(self) -> str:
        return self.host.address

    @property
    def has_begun(self) -> bool:
        """Whether a supervisor has answered."""
        return self.begun.is_set()

    @property
    def is_running(self) -> bool:
        return self.ssh_code is None

    async def run(self) -> None:
        """Start the supervisor over there, and stay with it to the end."""
        # Apart from our terminal: Ctrl-C is for us, and we tell the supervisors.
        self._process = await asyncio.create_subprocess_exec(
            *self.words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self.send(self.spec)
        beating = asyncio.create_task(self._beat())
        assert self._process.stdout
        assert self._process.stderr
        await asyncio.gather(self._read_frames(self._process.stdout), self._read_errors(self._process.stderr))
        self.ssh_code = await self._process.wait()
        beating.cancel()

    def send(self, frame: Mapping[str, Any]) -> None:
        stdin = self._process.stdin if self._process else None
        if stdin is not None and not stdin.is_closing():
            stdin.write(encode(frame))

    def marked(self, failure: Failure) -> Failure:
        """With whether the user has read its last words. To be asked when all lines have come."""
        lines = set(self._shown[failure.rank])
        return replace(failure, was_shown=bool(failure.last_words) and lines.issuperset(failure.last_words))

    def last_words(self) -> str:
        """How its part of the job ended, when no rank was to blame."""
        how = how_it_ended(self.code or 0)
        lines = [f"drumline: the job failed on {self.name} ({how}){':' if self.node_words else ''}"]
        return "".join(f"{line}\n" for line in [*lines, *(f"  {line}" for line in self.node_words)])

    def end(self, grace_s: float) -> None:
        """Ask the supervisor to end the job."""
        if self.has_begun:
            self.send({"kind": "end", "grace_s": grace_s})
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """End the connection; a supervisor at its other end takes that for the end of us."""
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(HANG_UP_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To ssh and what it has started, such as the ssh to a jump host: that one has our pipes too."""
        if self._process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _beat(self) -> None:
        number, patience = 0, Patience()
        while True:
            stdin = self._process.stdin if self._process else None
            if stdin is not None and stdin.transport.get_write_buffer_size() < MAX_UNSENT:
                self._beats = {**dict(list(self._beats.items())[-10:]), number: time.monotonic()}
                self.send({"kind": "beat", "number": number})
            number += 1
            await asyncio.sleep(BEAT_S)
            if not self.has_begun:
                self._wait_for_hello(patience)
            elif time.monotonic() - self.heard_at > SILENCE_S:
                self.said.append(f"no heartbeat for {SILENCE_S:g} s")
                self.end(0)  # it may still hear us, and would give its ranks their grace
                await asyncio.sleep(PASS_ON_S)
                self.hang_up()

    def _wait_for_hello(self, patience: Patience) -> None:
        """ssh limits the time to connect; a shell or a file system over there may still keep us for ever."""
        if patience.is_over():
            self.screen.say(
                f"waiting for {self.name} to start, {patience.waited_s:.0f} s so far", is_error=True
            )
        if patience.waited_s > self.spec["node"]["join_timeout_s"]:
            self.said.append(f"{NOT_STARTED} {patience.waited_s:.0f} s")
            self.hang_up()

    async def _read_frames(self, stdout: asyncio.StreamReader) -> None:
        async for line in _lines(stdout):
            self._take(line)

    async def _read_errors(self, stderr: asyncio.StreamReader) -> None:
        async for line in _lines(stderr):
            self.said.append(shown(line))

    def _take(self, line: bytes) -> None:
        frame = decode(line)
        if frame is None:
            self.greeting.append(shown(line))
            return
        self.heard_at = time.monotonic()
        if frame["kind"] == "lines":
            rank = frame["rank"]
            label = self.name if rank is None else f"{self.name} {rank}"
            is_all_shown = self.screen.show(label, frame["lines"], is_error=frame["stream"] == "err")
            if is_all_shown and frame["stream"] != "out":
                self._shown[rank].extend(frame["lines"])
        elif frame["kind"] == "beat":
            self._set_clock(frame)
        else:
            self._remember(frame)
            self.heard(self, frame)

    def _remember(self, frame: Mapping[str, Any]) -> None:
        kind = frame["kind"]
        if kind == "hello":
            self.begun.set()
            self.said.clear()  # a banner, most likely
        elif kind == "refused":
            self.was_refused = True
        elif kind == "started":
            self.ranks, self.world_size, self.failures = frame["ranks"], frame["world_size"], []
            self.num_starts, self.restarts_left = frame["start"] + 1, frame["restarts_left"]
            self.ruling = None
        elif kind == "ruling":
            self.ruling = Ruling(**{name: frame[name] for name in ("word", "action", "sentence", "was_told")})
        elif kind == "ended":
            self.code, self.node_words = frame["code"], frame["last_words"]
        elif kind == "failed":
            self.restarts_left = frame["restarts_left"]
            at = frame["at"] - self._clock[1]
            self.failures.append(
                Failure(
                    host=self.name,
                    rank=frame["rank"],
                    code=frame["code"],
                    at=at,
                    last_words=tuple(frame["last_words"]),
                    is_follower=bool(frame.get("follows")),
                    error=frame.get("error", ""),
                )
            )

    def _set_clock(self, frame: Mapping[str, Any]) -> None:
        sent = self._beats.pop(frame["number"], None)
        if sent is not None:
            way = self.heard_at - sent
            self._clock = min(self._clock, (way, frame["now"] - sent - way / 2))


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """However long they are; the last one need not be whole."""
    partial = b""
    while data := await stream.read(1 << 16):
        *whole, partial = (partial + data).split(b"\n")
        for line in whole:
            yield line
    if partial:
        yield partial
