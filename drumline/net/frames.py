"""JSON objects, one per line: the format of every channel between our processes, over sockets and
pipes.

Lines are bounded in size, nothing that arrives is evaluated, and a line that is not a frame is an
error that shows what arrived. After a handshake (handshake.py) each line is also sealed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
from collections.abc import Mapping
from typing import Any

from drumline.base.errors import PreflightError
from drumline.base.untrusted import parse_json

Message = dict[str, Any]
# The facts of a machine with some hundred packages, and one host's results about 255 others, are
# below 200 kB.
MAX_BYTES = 1 << 20
# For a frame on a pipe from a supervisor, which carries the output of ranks.
MAX_PIPE_BYTES = 1 << 24
# How many bytes may wait to be written to a pipe before its writer should stop adding more.
MAX_WAITING = 1 << 18
MAX_SHOWN = 80
SEAL_BYTES = 64

NOT_JSON = "not a JSON object"
TOO_LONG = "the line is too long"
WRONG_SEAL = "the seal is wrong"


class FrameError(PreflightError):
    """Received or outgoing data is not a frame. `kind` is one of a few constants, for counting."""

    def __init__(self, kind: str, detail: str = "", *, next_step: str | None = None) -> None:
        super().__init__(detail or kind, next_step=next_step)
        self.kind = kind


def encode(message: Mapping[str, Any]) -> bytes:
    """One line, without the newline."""
    text = json.dumps(message, separators=(",", ":")).encode()
    _check_numbers(text)
    return text


def decode(line: bytes, *, max_bytes: int = MAX_BYTES) -> Message:
    """The frame of one line."""
    if len(line) > max_bytes:
        raise FrameError(TOO_LONG, f"received a line of more than {max_bytes:,} bytes, the limit")
    try:
        message = parse_json(line)
    except ValueError as error:
        raise FrameError(NOT_JSON, f"received what is not JSON: {_shown(line)}") from error
    if not isinstance(message, dict):
        raise FrameError(NOT_JSON, f"received what is not a JSON object: {_shown(line)}")
    _check_numbers(line)
    return message


def _check_numbers(text: bytes) -> None:
    """Infinity means "never"; NaN and -Infinity are mistakes."""

    def refuse(name: str) -> None:
        if name != "Infinity":
            raise FrameError(NOT_JSON, f"{name} is not a number")

    if b"NaN" in text or b"-Infinity" in text:  # unless it is in a string
        json.loads(text, parse_constant=refuse)


class Session:
    """Frames as lines, for both directions of one connection. With keys, one for each direction, a
    line carries a keyed hash over its number and text: a line that was replayed, changed, removed
    or added on the way is refused."""

    def __init__(
        self, send_key: bytes = b"", receive_key: bytes = b"", *, max_bytes: int = MAX_BYTES
    ) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._max_bytes = max_bytes
        self._num_sent = 0
        self._num_received = 0
        self.max_line = max_bytes + (SEAL_BYTES + 1 if send_key else 0)

    def encode(self, message: Mapping[str, Any]) -> bytes:
        """The next line, which must be sent."""
        text = encode(message)
        if len(text) > self._max_bytes:
            raise FrameError(
                TOO_LONG, f"a frame of {len(text):,} bytes is over the limit of {self._max_bytes:,}"
            )
        if not self._send_key:
            return text + b"\n"
        line = _seal(self._send_key, self._num_sent, text) + b" " + text + b"\n"
        self._num_sent += 1
        return line

    def decode(self, line: bytes) -> Message:
        """The frame of the next received line. Its seal is checked before its text is parsed."""
        if len(line) > self.max_line:
            raise FrameError(
                TOO_LONG, f"received a line of more than {self._max_bytes:,} bytes, the limit"
            )
        if not self._receive_key:
            return decode(line, max_bytes=self._max_bytes)

        seal = line[: SEAL_BYTES + 1]
        text = line[SEAL_BYTES + 1 :]
        expected_seal = _seal(self._receive_key, self._num_received, text) + b" "
        if not hmac.compare_digest(seal, expected_seal):
            raise FrameError(
                WRONG_SEAL, "received a line with a wrong seal: it was changed or added on the way"
            )

        self._num_received += 1
        return decode(text, max_bytes=self._max_bytes)


def _seal(key: bytes, number: int, text: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + text, hashlib.sha256).hex().encode()


class LineBuffer:
    """Splits received data into lines, and never holds more than the limit of one line and one
    read."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data

    def pop(self) -> bytes | None:
        """The next line; None: it has not arrived yet. A line that is too long is cut after
        `max_bytes` + 1 bytes."""
        length = self._data.find(b"\n", 0, self.max_bytes + 1) + 1
        if length == 0 and len(self._data) <= self.max_bytes:
            return None
        length = length or self.max_bytes + 1
        line = bytes(self._data[:length])
        del self._data[:length]
        return line.removesuffix(b"\n")

    def clear(self) -> bytes:
        """The incomplete last line."""
        incomplete = bytes(self._data)
        self._data.clear()
        return incomplete


class FrameReader:
    """Frames from a pipe or a socket."""

    def __init__(self, fd: int, *, max_bytes: int = MAX_BYTES) -> None:
        self.fd = fd
        self.is_closed = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self.session = Session(max_bytes=max_bytes)
        self._lines = LineBuffer(self.session.max_line)

    def use(self, session: Session) -> None:
        """Use this session from the next line on."""
        self.session = session
        self._lines.max_bytes = session.max_line

    def read(self) -> list[Message]:
        """All frames with a `kind` that have arrived; never blocks. Other lines, like a greeting,
        are skipped."""
        while self._receive(0.0):
            pass
        frames = []
        while (line := self._lines.pop()) is not None:
            with contextlib.suppress(FrameError):
                frames.append(self.session.decode(line))
        return [frame for frame in frames if isinstance(frame.get("kind"), str)]

    def next(self, timeout_s: float) -> Message | None:
        """The next frame; None when the other side has closed, or after the timeout."""
        while (line := self._lines.pop()) is None:
            if not self._receive(timeout_s):
                return None
        return self.session.decode(line)

    def _receive(self, timeout_s: float) -> bool:
        """Read once; False: nothing came within this time, or the other side has closed."""
        if self.is_closed or not self._poll.poll(timeout_s * 1000):
            return False
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._lines.add(data)
        self.is_closed = not data
        return bool(data)


class FrameWriter:
    """Frames to a pipe, as fast as its other end reads them, without blocking. A closed pipe is not
    an error."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._waiting = bytearray()

    def send(self, kind: str, **content: Any) -> None:
        self._waiting += encode({"kind": kind, **content}) + b"\n"
        self.flush()

    def has_room(self) -> bool:
        return len(self._waiting) < MAX_WAITING

    def is_empty(self) -> bool:
        return not self._waiting

    def flush(self) -> None:
        """Write as much as the pipe takes now."""
        while self._waiting:
            try:
                del self._waiting[: os.write(self._fd, self._waiting)]
            except BlockingIOError:
                return
            except OSError:
                # the other side has closed; the reader of this connection handles that
                self._waiting.clear()


def write_all(fd: int, data: bytes) -> None:
    """Write to a blocking pipe or socket, which may accept only a part at a time."""
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
