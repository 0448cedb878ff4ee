"""Waiting for a port, the notices meanwhile, and probing many hosts at once."""

from __future__ import annotations

import os
import socket
import sys
import threading

import pytest

from drumline.base.text import print_message
from drumline.net import dial
from drumline.net.dial import ProbeListener, ProbeTarget, Reason, WaitNotice, probe_hosts


def test_a_wait_is_reported_soon_and_then_at_intervals_that_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(dial.time, "monotonic", lambda: now[0])
    notice = WaitNotice()
    every_second = WaitNotice(first_s=1, growth=1)
    due_seconds: list[list[int]] = [[], []]
    for second in range(600):
        now[0] = float(second)
        for index, waiting in enumerate((notice, every_second)):
            due_seconds[index] += [second] if waiting.is_due() else []
    assert due_seconds == [[5, 20, 65, 200], list(range(1, 600))]


def test_on_a_terminal_a_wait_is_one_line_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr, os.fdopen(screen, "rb", buffering=0) as shown:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("COLUMNS", "30")
        notice = WaitNotice(first_s=0)
        for seconds in range(3):
            notice.report(f"waiting for node 1, {seconds} s so far")
        notice.clear()
        print_message("2 ranks")
        clear = b"\r\x1b[K"
        lines = [b"drumline: waiting for node 1,"] * 3
        read = b""
        while not read.endswith(b"\n"):
            read += shown.read(4096)
        assert read == b"".join(clear + line for line in [*lines, b"", b"drumline: 2 ranks\r\n"])


def test_many_targets_answer_at_once_and_wrong_hosts_do_not_count() -> None:
    opened = [ProbeListener("127.0.0.1") for _ in range(70)]
    doors = [
        ProbeTarget(rank, "here", "lo", "127.0.0.1", listener.port, listener.token)
        for rank, listener in enumerate(opened)
    ]
    try:
        assert probe_hosts(doors) == {}
        other_host = ProbeTarget(7, "here", "lo", "127.0.0.1", opened[0].port, opened[1].token)
        assert probe_hosts([other_host]) == {7: Reason.WRONG_HOST}
    finally:
        for listener in opened:
            listener.close()
    assert probe_hosts([doors[0]]) == {0: Reason.REFUSED}
    assert probe_hosts([]) == {}


@pytest.mark.parametrize(
    ("reply", "cause"), [(b"", Reason.WRONG_HOST), (b"wor", Reason.WRONG_HOST)]
)
def test_a_connection_that_ends_early_is_another_host(reply: bytes, cause: str) -> None:
    def answer() -> None:
        with listener.accept()[0] as caller:
            caller.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer)
        answering.start()
        closed = ProbeTarget(1, "x", "lo", "127.0.0.1", listener.getsockname()[1], "word")
        assert probe_hosts([closed]) == {1: cause}
        answering.join()
