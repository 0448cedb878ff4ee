"""One host opens a door where its data will come in, and the others knock: plain TCP, answered with a word.

The word is the host's own, made up for this start. An address may be held by more than one machine (every docker0 has
the same), so that somebody answers is not enough. With the word comes the time by that host's wall clock.
"""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumline.errors import PreflightError
from drumline.net.reasons import (
    CAUSES,
    CLOSED_S,
    MUTE,
    NO_ROUTE,
    REFUSED,
    SILENT,
    STRANGER,
    closed_rendezvous_port,
)
from drumline.terminal import print_message, show_progress

CONNECT_S = 3.0
ANSWER_S = 10.0
AT_ONCE = 256
TIME_BYTES = 20
FIRST_WORD_S = 5.0
# Of a port that is refused: the launcher there may still load torch.
REFUSED_S = 60.0
NO_NAME = "its name does not resolve here"
GROWTH = 3.0
# Between two tries to reach the first node: short at first, since after a restart it is there in a moment.
FIRST_POLL_S, LAST_POLL_S = 0.02, 0.2
WHY_NOT = {
    REFUSED: "refused (nobody listens there; the launcher of node 0 is not up)",
    SILENT: "no answer (a firewall drops it, or the machine is off)",
}


class Patience:
    """When somebody who waits should say so again: soon, and then at intervals that grow."""

    def __init__(self, *, first_s: float = FIRST_WORD_S, growth: float = GROWTH) -> None:
        self.begin = time.monotonic()
        self.first_s = self.next_s = first_s
        self.interval_s, self.growth = max(1.0, first_s), growth

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.begin

    def is_over(self) -> bool:
        """Whether it is time for a word; asking starts the wait for the next."""
        if self.waited_s < self.next_s:
            return False
        self.interval_s *= self.growth
        self.next_s = self.waited_s + self.interval_s
        return True

    def tell(self, words: str) -> None:
        """What is waited for, as one line that counts: in place on a terminal, else when it is time. Call it often."""
        if not sys.stderr.isatty():
            if self.is_over():
                print_message(words)
        elif self.waited_s >= self.first_s:
            show_progress(f"drumline: {words}")

    def end(self) -> None:
        """The wait is over: on a terminal its line is removed."""
        if sys.stderr.isatty():
            show_progress("")


def wait_for_port(
    endpoint: str,
    *,
    timeout_s: float,
    hosts: tuple[str, str] | None = None,
    closed_s: float = CLOSED_S,
    refused_s: float = REFUSED_S,
) -> None:
    """Return when the first node listens: people start nodes in any order, and torchrun would wait a minute only.

    `hosts`: this one and the first, where both are known to be up: then what stays in the way for so long is an error.
    """
    host, _, port = endpoint.rpartition(":")
    patience = Patience()
    limits = {SILENT: closed_s, NO_ROUTE: closed_s, NO_NAME: closed_s, REFUSED: refused_s}
    before, since, pause_s = "", 0.0, FIRST_POLL_S
    try:
        while cause := _obstacle(host, int(port), timeout_s=max(0.1, min(4.0, timeout_s))):
            why = WHY_NOT.get(cause, cause)
            if cause != before:
                before, since = cause, time.monotonic()
            if hosts and cause in limits and time.monotonic() - since >= limits[cause]:
                raise _closed(host, int(port), hosts, cause)
            if patience.waited_s >= timeout_s:
                raise PreflightError(
                    f"the first node did not answer at {endpoint}, where the nodes meet, within {timeout_s:g} s: {why}",
                    next_step="start the node with NODE_RANK 0 there, and open that port to this machine",
                )
            patience.tell(
                f"waiting for the first node at {endpoint}, {patience.waited_s:.0f} s so far: {why}"
            )
            time.sleep(pause_s)
            pause_s = min(LAST_POLL_S, 1.3 * pause_s)
    finally:
        patience.end()


def _closed(host: str, port: int, hosts: tuple[str, str], cause: str) -> PreflightError:
    source, target = hosts
    if cause == NO_NAME:
        return PreflightError(
            f"{source} does not know the name {host}, by which --hosts has the first host",
            next_step=f"add {host} to DNS, or to /etc/hosts on {source}; or give an address in --hosts",
        )
    return closed_rendezvous_port(port, source=source, target=target, cause=cause)


def _obstacle(host: str, port: int, *, timeout_s: float) -> str:
    """What stands between this machine and that port; empty when it can be reached."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except TimeoutError:
        return SILENT
    except socket.gaierror:
        return NO_NAME
    except OSError as error:
        return CAUSES.get(error.errno or 0) or str(error.strerror or error)
    return ""


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
