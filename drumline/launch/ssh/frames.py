"""What the controller and a node's supervisor say to each other: JSON objects, one on a line, over ssh's pipes.

Neither side ever waits for the other: what cannot be written yet is kept, and a pipe that is gone is no error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from drumline.untrusted import parse_json

PROTOCOL = 5
MAX_WAITING = 1 << 18
# A line that is longer is no frame; what comes without an end is not kept.
MAX_LINE = 1 << 24


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


def _is_number(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 53


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1 << 53  # a NaN is not


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(fits, value))


def _are_problems(value: Any) -> bool:
    return type(value) is list and all(
        type(one) is list and len(one) == 2 and type(one[0]) is str and type(one[1]) in (str, type(None))
        for one in value
    )


NUMBER, TEXT, TEXTS, FLAG = _is_number, _is(str), _list_of(_is(str)), _is(bool)
# What a host may send, and of which kind: nothing else is looked at further on. A host may be of another version, or
# taken over; the controller goes on without what it cannot read.
FORMS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "hello": {"protocol": NUMBER},
    "refused": {"problems": _are_problems},
    "started": {"ranks": _list_of(NUMBER), "world_size": NUMBER, "start": NUMBER, "restarts_left": NUMBER},
    "diagnosis": {"alarm": TEXT, "action": TEXT, "sentence": TEXT, "was_printed": FLAG, "is_last": FLAG},
    "ended": {"code": NUMBER, "last_words": TEXTS},
    "failed": {
        **dict.fromkeys(("rank", "code", "restarts_left"), NUMBER),
        "at": _is_time,
        "last_words": TEXTS,
    },
    "lines": {"rank": lambda value: value is None or NUMBER(value), "stream": TEXT, "lines": TEXTS},
    "beat": {"number": NUMBER, "now": _is_time},
}


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
        frame = parse_json(line) if len(line) <= MAX_LINE else None
    except ValueError:
        return None
    return frame if isinstance(frame, dict) and isinstance(frame.get("kind"), str) else None


def decode_from_host(line: bytes) -> dict[str, Any] | None:
    """A frame that a supervisor sends; None for anything else."""
    frame = decode(line)
    form = FORMS.get(frame["kind"]) if frame is not None else None
    if frame is None or form is None:
        return None
    return frame if all(name in frame and fits(frame[name]) for name, fits in form.items()) else None
