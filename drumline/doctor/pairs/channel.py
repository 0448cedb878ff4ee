"""The coordinator's end of one node: a request goes out, its answer comes back, whatever carries the lines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

from drumline.doctor.pairs.node import HELLO
from drumline.errors import PreflightError
from drumline.net.frames import MAX_BYTES, FrameError, Message, Session

# A login may greet with a page of text before our program says its first word.
MOST_GREETING_LINES = 500
LAST_WORDS_BYTES = 4000
FAREWELL_S = 2.0


class NodeGoneError(PreflightError):
    """The node has ended, or does not answer any more."""

    def __init__(self, what: str, *, code: int | None = None, words: str = "") -> None:
        super().__init__(what)
        self.code, self.words = code, words


class NodeError(PreflightError):
    """The node is there, but could not do what was asked."""


class Channel:
    """One node. `process` is what carries the lines (ssh, or the program itself), when it is a process of ours."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        process: asyncio.subprocess.Process | None = None,
    ) -> None:
        self.reader, self.writer, self.process = reader, writer, process
        self.session = Session()
        """Sealed where node and node 0 have a secret."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._gone: NodeGoneError | None = None
        self._has_met = False
        self._words = b""
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, *command: str) -> Channel:
        """A node behind a process that is started here."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=MAX_BYTES
        )
        assert process.stdout
        assert process.stdin
        return cls(process.stdout, process.stdin, process)

    @property
    def is_gone(self) -> bool:
        return self._gone is not None

    async def meet(self) -> None:
        """Wait for the node's first word, which is said once. Its caller sets the limit."""
        if self._has_met:
            return
        if self.process is not None:
            self._tasks.append(asyncio.create_task(self._keep_words()))
        for _ in range(MOST_GREETING_LINES):
            line = await self._line()
            if line is None:
                raise await self._end("it ended before its first word")
            try:
                said = self.session.decode(line)
            except FrameError as error:
                if self.process is None:
                    raise NodeGoneError(error.what) from error
                continue  # a login's greeting
            if said == HELLO:
                self._has_met = True
                self._tasks.append(asyncio.create_task(self._listen()))
                return
            if said.get("doctor") == HELLO["doctor"]:
                raise NodeGoneError("its drumline is of another version, which says other things")
        raise NodeGoneError("it says much, but not what the doctor's program says")

    async def ask(self, action: str, limit_s: float, **arguments: Any) -> Any:
        """What the node answers. One that does not within the limit counts as gone."""
        if self._gone is not None:
            raise self._gone
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._write({"id": number, "do": action, **arguments})
        try:
            return await asyncio.wait_for(answer, limit_s)
        except TimeoutError:
            raise self._lost(
                NodeGoneError(f"it did not answer within {limit_s:g} s (asked for: {action})")
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def stay(self) -> None:
        """Let the node know that we are here: it ends when it hears nothing."""
        if self._gone is None:
            await self._write({"id": 0, "do": "clock"})

    async def close(self, **farewell: Any) -> None:
        """Tell the node to end; what carries the lines ends with it, or is killed."""
        if self._gone is None and self._has_met:
            await self._write({"do": "end", **farewell})
        self.writer.close()
        if self.process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), FAREWELL_S if self._has_met else 0.0)
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def _write(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # the reading side says why
            self.writer.write(self.session.encode(message))
            await self.writer.drain()

    async def _line(self) -> bytes | None:
        try:
            line = await self.reader.readline()
        except ValueError:
            raise NodeGoneError(f"it sent a line of over {MAX_BYTES:,} bytes") from None
        except OSError:
            return None
        return line.removesuffix(b"\n") if line else None

    async def _listen(self) -> None:
        try:
            while (line := await self._line()) is not None:
                self._take(self.session.decode(line))
            self._lost(await self._end("it ended in the middle of the examination"))
        except FrameError as error:
            self._lost(NodeGoneError(error.what))
        except NodeGoneError as error:
            self._lost(error)

    def _take(self, message: Message) -> None:
        answer = self._waiting.get(message.get("id") or 0)
        if answer is None or answer.done():
            return  # to a request that nobody waits for any more
        if "error" in message:
            answer.set_exception(NodeError(str(message["error"])))
        else:
            answer.set_result(message.get("ok"))

    def _lost(self, error: NodeGoneError) -> NodeGoneError:
        self._gone = self._gone or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._gone)
        return self._gone

    async def _end(self, what: str) -> NodeGoneError:
        """Why: what the process behind it said last."""
        code = None
        if self.process is not None:
            with contextlib.suppress(TimeoutError):
                code = await asyncio.wait_for(self.process.wait(), FAREWELL_S)
            await asyncio.sleep(0)
            await asyncio.wait(self._tasks[:1], timeout=FAREWELL_S)
        return NodeGoneError(what, code=code, words=self._words.decode(errors="replace").strip())

    async def _keep_words(self) -> None:
        """The last of what the process writes to stderr."""
        assert self.process is not None
        assert self.process.stderr is not None
        while new := await self.process.stderr.read(1 << 16):
            self._words = (self._words + new)[-LAST_WORDS_BYTES:]
