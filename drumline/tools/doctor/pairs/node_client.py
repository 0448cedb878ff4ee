"""The client of one host: sends requests to its `node_server.py`, over ssh or a connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from typing import Any

from drumline.base.errors import PreflightError
from drumline.net.frames import MAX_BYTES, FrameError, Message, Session
from drumline.tools.doctor.pairs.node_server import HELLO

# A login may print a page of text before our program starts.
MAX_GREETING_LINES = 500
MAX_STDERR_BYTES = 4000
EXIT_S = 2.0


class NodeLostError(PreflightError):
    """The node has exited, or does not answer any more."""

    def __init__(self, what: str, *, code: int | None = None, stderr: str = "") -> None:
        super().__init__(what)
        self.code = code
        self.stderr = stderr


class NodeRequestError(PreflightError):
    """The node answers, but could not do what was asked."""


class NodeClient:
    """One node. `process`: the process that carries the frames (ssh, or the program itself), if we
    started it."""

    def __init__(
        self, reader: StreamReader, writer: StreamWriter, process: Process | None = None
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.process = process
        self.session = Session()  # sealed if both sides have a secret
        self.lost: NodeLostError | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._has_started = False
        self._stderr = b""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, *command: str) -> NodeClient:
        """A node behind a process that is started here."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_BYTES
        )
        assert process.stdout
        assert process.stdin
        return cls(process.stdout, process.stdin, process)

    async def wait_for_hello(self) -> None:
        """Returns at once if it has already arrived. The caller sets the limit."""
        if self._has_started:
            return
        if self.process is not None and self.process.stderr is not None:
            self._tasks.append(asyncio.create_task(self._keep_stderr(self.process.stderr)))
        for _ in range(MAX_GREETING_LINES):
            if (line := await self._read_line()) is None:
                raise await self._exited("it exited before it answered")
            try:
                reply = self.session.decode(line)
            except FrameError as error:
                if self.process is None:
                    raise NodeLostError(error.what) from error
                continue  # a login's greeting
            if reply == HELLO:
                self._has_started = True
                self._tasks.append(asyncio.create_task(self._read_answers()))
                return
            if reply.get("doctor") == HELLO["doctor"]:
                raise NodeLostError("its version of drumline is different")
        raise NodeLostError("it prints a lot of text, but not the answer of the doctor's program")

    async def ask(self, action: str, limit_s: float, /, **arguments: Any) -> Any:
        if self.lost is not None:
            raise self.lost
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._send({"id": number, "do": action, **arguments})
        try:
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            raise self._lose(
                NodeLostError(f"it did not answer within {limit_s:g} s (asked for: {action})")
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def keep_alive(self) -> None:
        """The node exits when nothing arrives for a while."""
        if self.lost is None:
            await self._send({"id": 0, "do": "clock"})

    async def close(self, **last: Any) -> None:
        """Ask the node to exit; the process that carries the frames exits with it, or is killed."""
        if self.lost is None and self._has_started:
            await self._send({"do": "end", **last})
        self.writer.close()
        if self.process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), EXIT_S if self._has_started else 0.0)
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _send(self, request: Message) -> None:
        with contextlib.suppress(OSError):  # the reading side reports why
            self.writer.write(self.session.encode(request))
            await self.writer.drain()

    async def _read_line(self) -> bytes | None:
        try:
            line = await self.reader.readline()
        except ValueError:
            raise NodeLostError(f"it sent a line of over {MAX_BYTES:,} bytes") from None
        except OSError:
            return None
        return line.removesuffix(b"\n") if line else None

    async def _read_answers(self) -> None:
        try:
            while (line := await self._read_line()) is not None:
                reply = self.session.decode(line)
                answer = self._waiting.get(reply.get("id") or 0)
                if answer is None or answer.done():
                    continue  # the request has timed out
                if "error" in reply:
                    answer.set_exception(NodeRequestError(str(reply["error"])))
                else:
                    answer.set_result(reply.get("ok"))
            self._lose(await self._exited("it exited during the check"))
        except PreflightError as error:  # not a frame, or too long a line
            self._lose(NodeLostError(error.what))

    def _lose(self, error: NodeLostError) -> NodeLostError:
        self.lost = self.lost or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.lost)
        return self.lost

    async def _exited(self, what: str) -> NodeLostError:
        """With the exit code and the last of stderr."""
        code = None
        if self.process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self.process.wait(), EXIT_S)
            await asyncio.wait(self._tasks[:1], timeout=EXIT_S)
        return NodeLostError(what, code=code, stderr=self._stderr.decode(errors="replace").strip())

    async def _keep_stderr(self, stderr: StreamReader) -> None:
        while new := await stderr.read(1 << 16):
            self._stderr = (self._stderr + new)[-MAX_STDERR_BYTES:]
