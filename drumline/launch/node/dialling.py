"""One host opens a door where its data will come in, and the others knock: plain TCP, answered with a word.

The word is the host's own, made up for this start. An address may be held by more than one machine (every docker0 has
the same), so that somebody answers is not enough. With the word comes the time by that host's wall clock.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

CONNECT_S = 3.0
ANSWER_S = 10.0
AT_ONCE = 256
TIME_BYTES = 20
SILENT, REFUSED, NO_ROUTE, STRANGER, MUTE = "silent", "refused", "no route", "stranger", "mute"
CAUSES = {
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: SILENT,
    errno.EHOSTUNREACH: NO_ROUTE,
    errno.ENETUNREACH: NO_ROUTE,
}


@dataclass(frozen=True)
class Door:
    """Where a host can be reached, if it can."""

    rank: int
    host: str
    interface: str
    address: str
    port: int
    word: str


class OpenDoor:
    """Tells its word to whoever connects, until it is closed."""

    def __init__(self, address: str) -> None:
        self.word = secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        if ":" in address:  # IPv4 too, also where net.ipv6.bindv6only is 1
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind((address, 0))
        self._socket.listen(512)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer, name="drumline-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            with caller:
                caller.settimeout(ANSWER_S)
                try:
                    caller.sendall(f"{self.word}{time.time():{TIME_BYTES}.3f}".encode())
                except OSError:
                    continue


@dataclass
class _Call:
    door: Door
    heard: bytes = b""
    is_connected: bool = False
    begun: float = field(default_factory=time.monotonic)
    deadline: float = field(default_factory=lambda: time.monotonic() + CONNECT_S)


@dataclass
class Answers:
    """What came of the knocking, by the rank behind each door."""

    failed: dict[int, str] = field(default_factory=dict)
    """What stands in the way of those that did not open."""
    clocks: dict[int, float] = field(default_factory=dict)
    """By how many seconds the wall clocks of the others are ahead of this one, at least."""


def knock(doors: Sequence[Door]) -> Answers:
    """Some hundred doors at a time."""
    answers = Answers()
    for first in range(0, len(doors), AT_ONCE):
        _knock(doors[first : first + AT_ONCE], answers)
    return answers


def _knock(doors: Sequence[Door], answers: Answers) -> None:
    with selectors.DefaultSelector() as selector:
        for door in doors:
            if cause := _dial(selector, door):
                answers.failed[door.rank] = cause
        while selector.get_map():
            until = min(key.data.deadline for key in selector.get_map().values())
            ready = selector.select(max(0.0, until - time.monotonic()))
            for key, _ in ready:
                _go_on(selector, key, answers)
            # Only with nothing to hear: this process itself may not have run for seconds.
            if not ready:
                _give_up_on_late(selector, answers.failed)


def _dial(selector: selectors.BaseSelector, door: Door) -> str | None:
    caller = socket.socket(socket.AF_INET6 if ":" in door.address else socket.AF_INET)
    caller.setblocking(False)
    number = caller.connect_ex((door.address, door.port))
    if number not in (0, errno.EINPROGRESS):
        caller.close()
        return _cause(number)
    selector.register(caller, selectors.EVENT_WRITE, _Call(door))
    return None


def _go_on(selector: selectors.BaseSelector, key: selectors.SelectorKey, answers: Answers) -> None:
    call: _Call = key.data
    caller = key.fileobj
    assert isinstance(caller, socket.socket)
    if not call.is_connected:
        if number := caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            answers.failed[call.door.rank] = _cause(number)
            _hang_up(selector, caller)
            return
        call.is_connected, call.deadline = True, time.monotonic() + ANSWER_S
        selector.modify(caller, selectors.EVENT_READ, call)
        return
    try:
        part = caller.recv(256)
    except OSError:
        part = b""
    call.heard += part
    word = call.door.word.encode()
    is_whole = len(call.heard) >= len(word) + TIME_BYTES
    if part and not is_whole:
        return
    if not call.heard.startswith(word):
        answers.failed[call.door.rank] = STRANGER
    elif not is_whole:  # it ended before it had sent the time
        answers.failed[call.door.rank] = MUTE
    else:
        answers.clocks[call.door.rank] = _ahead(float(call.heard[len(word) :]), call.begun)
    _hang_up(selector, caller)


def _ahead(theirs: float, begun: float) -> float:
    """How far a clock is ahead of ours for certain, when it was read between `begun` and now; negative: behind."""
    after = theirs - time.time()
    before = after + time.monotonic() - begun
    return after if after > 0 else min(before, 0.0)


def _give_up_on_late(selector: selectors.BaseSelector, failed: dict[int, str]) -> None:
    for key in list(selector.get_map().values()):
        if key.data.deadline <= time.monotonic():
            failed[key.data.door.rank] = MUTE if key.data.is_connected else SILENT
            assert isinstance(key.fileobj, socket.socket)
            _hang_up(selector, key.fileobj)


def _hang_up(selector: selectors.BaseSelector, caller: socket.socket) -> None:
    selector.unregister(caller)
    caller.close()


def _cause(number: int) -> str:
    return CAUSES.get(number) or errno.errorcode.get(number, str(number))
