"""What the controller and a node's supervisor say to each other: JSON objects, one on a line, over ssh's pipes.

Neither side ever waits for the other: what cannot be written yet is kept, and a pipe that is gone is no error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from drumline.untrusted import parse_json

PROTOCOL = 4
MAX_WAITING = 1 << 18


class FrameWriter:
    """Frames to a pipe, as fast as its other end takes them."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._waiting = bytearray()
        self.is_broken = False

    def send(self, kind: str, **content: Any) -> None:
        self._waiting += encode({"kind": kind, **content})
        self.flush()

    def has_room(self) -> bool:
        return len(self._waiting) < MAX_WAITING

    def is_empty(self) -> bool:
        return not self._waiting

    def flush(self) -> None:
        while self._waiting:
            try:
                written = os.write(self._fd, self._waiting)
            except BlockingIOError:
                return
            except OSError:  # the other side is gone; that is noticed elsewhere
                self.is_broken, written = True, len(self._waiting)
            del self._waiting[:written]


class FrameReader:
    """Frames from a pipe, as far as they have come."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._partial = b""
        self.is_closed = False

    def read(self) -> list[dict[str, Any]]:
        data = b""
        while not self.is_closed:
            try:
                part = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            data += part
            self.is_closed = not part
        *whole, self._partial = (self._partial + data).split(b"\n")
        return [frame for line in whole if (frame := decode(line)) is not None]


def encode(frame: Mapping[str, Any]) -> bytes:
    return json.dumps(frame).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """None for what is no frame: a shell over there may greet whoever comes."""
    try:
        frame = parse_json(line)
    except ValueError:
        return None
    return frame if isinstance(frame, dict) and isinstance(frame.get("kind"), str) else None
