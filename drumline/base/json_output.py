"""`log.format json`: what a command and its ranks print, as JSON objects, one a line, on stdout.

The process that the user has started wraps the lines, and the command goes on in a child: so also
what libraries in C and scripts print is wrapped, and nothing that hangs in a rank holds it up.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from drumline.base.errors import UsageError
from drumline.base.text import PREFIX
from drumline.base.untrusted import parse_json

FORMAT = "DRUMLINE_LOG_FORMAT"
"""`json`: the format of what this process and those it starts print."""
IS_WRAPPED = "DRUMLINE_LOG_IS_WRAPPED"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
OF_TERMINALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1
QUIET_S = 0.05
LONGEST_S = 0.3
MAX_BATCH = 1 << 20
TRACEBACK = "Traceback (most recent call last)"
LEVELS = {
    **dict.fromkeys(("error", "hang", "failure", TRACEBACK), "error"),
    **dict.fromkeys(("warning", "stall", "straggler"), "warning"),
}
"""By the word before the first colon."""


def is_wrapped() -> bool:
    """Whether what this process prints becomes JSON."""
    return bool(os.environ.get(IS_WRAPPED))


def wrap_output() -> None:
    """Where the format is JSON, and no process before this one does it: go on in a child."""
    match os.environ.get(FORMAT) or "text":
        case "text":
            return
        case "json":
            pass
        case name:
            raise UsageError(f"{FORMAT} is {name!r}: it takes text or json")
    if is_wrapped():
        return
    os.environ[IS_WRAPPED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        _wrap(reader, child)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor in (1, 2):
        os.dup2(writer, descriptor)
    os.close(reader)
    os.close(writer)


def _wrap(reader: int, child: int) -> None:
    """Wrap what comes, pass signals on, and exit as the child does."""
    _pass_signals_on(child)
    rank = {"rank": int(os.environ["RANK"])} if os.environ.get("RANK", "").isdigit() else {}
    fields = {"host": socket.gethostname(), **rank}
    partial = b""
    ended = status = 0
    is_open = True
    # What it leaves running may hold the pipe; what it has written itself is in the last batch.
    while is_open and not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        batch, is_open = _read_batch(reader)
        *lines, partial = (partial + batch).split(b"\n")
        if len(partial) > MAX_BATCH:
            lines.append(partial)
            partial = b""
        _write(as_objects(map(_decoded, lines), fields))
    _write(as_objects([_decoded(partial)], fields))
    if not ended:
        _, status = os.waitpid(child, 0)
    _exit_like(status)


def _pass_signals_on(child: int) -> None:
    """Except those that a terminal sends to both."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, number)

    has_terminal = os.isatty(0)
    for number in PASSED_ON:
        if has_terminal and number in OF_TERMINALS:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)


def _read_batch(reader: int) -> tuple[bytes, bool]:
    """What is there until it is quiet, so that a traceback is whole; and whether anybody is left to
    write."""
    batch = b""
    end = time.monotonic() + LONGEST_S
    while len(batch) < MAX_BATCH and time.monotonic() < end:
        if not select.select([reader], [], [], QUIET_S)[0]:
            break
        data = os.read(reader, 1 << 16)
        if not data:
            return batch, False
        batch += data
    return batch, True


def _decoded(line: bytes) -> str:
    """Without what a progress bar has overwritten."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace")


def _write(objects: Iterable[str]) -> None:
    data = "".join(f"{text}\n" for text in objects).encode()
    while data:
        try:
            data = data[os.write(1, data) :]
        except OSError:  # no reader
            return


def _exit_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


def as_objects(
    lines: Iterable[str], fields: Mapping[str, Any], *, is_authority: bool = False
) -> Iterator[str]:
    """A message with its details, or a traceback, is one object. A line that is an object already
    keeps its own fields, but not these if the caller `is_authority`: who knows the host and rank."""
    message: list[str] = []
    for line in lines:
        is_part = line[:1] in (" ", "\t") or message[:1] == [f"{TRACEBACK}:"]
        if message and is_part:
            message.append(line)
            if line[:1] in (" ", "\t"):
                continue
            line = ""  # the error is the last line of a traceback
        if message:
            yield _wrapped(message, fields)
        message = []
        if (record := _as_object(line)) is not None:
            yield json.dumps({**fields, **record, **(fields if is_authority else {})})
        elif line.strip():
            message = [line]
    if message:
        yield _wrapped(message, fields)


def _as_object(line: str) -> dict[str, Any] | None:
    try:
        value = parse_json(line) if line.startswith("{") else None
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _wrapped(message: list[str], fields: Mapping[str, Any]) -> str:
    text = "\n".join(message).removeprefix(PREFIX).rstrip()
    level = LEVELS.get(text.partition(":")[0], "info")
    return object_line(time.time(), level, text, fields)


def object_line(unix_s: float, level: str, message: str, fields: Mapping[str, Any]) -> str:
    moment = datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": moment, "level": level, "message": message, **fields})
