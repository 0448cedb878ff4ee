"""The server of a live report: which page counts as sent, and what it prints."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from drumline.report import live_server
from drumline.report.live_server import LiveServer


@contextmanager
def request(server: LiveServer) -> Iterator[socket.socket]:
    """A connection that has asked for the page."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        connection.sendall(f"GET {url.path} HTTP/1.0\r\nHost: {url.netloc}\r\n\r\n".encode())
        yield connection


def answer(connection: socket.socket) -> bytes:
    """All that is sent until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_a_page_counts_from_its_reading_and_once_it_is_sent() -> None:
    is_rendered = threading.Event()
    read_at = []

    def render() -> str:
        read_at.append(time.monotonic())
        is_rendered.set()
        return "x" * (32 << 20)  # more than the kernel buffers

    with closing(LiveServer(render)) as server, request(server) as connection:
        assert is_rendered.wait(20)
        time.sleep(0.1)
        assert server.served_at == 0.0, "nobody has read it"
        assert answer(connection).endswith(b"xxx")
        assert 0.0 < server.served_at <= read_at[0], (
            "what it shows may be older than the time of sending"
        )


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (ConnectionResetError("closed"), ""),
        (
            ValueError("evil\x1b[2J"),
            "drumline: warning: the live report could not be served: ValueError: evil\\x1b[2J\n",
        ),
    ],
)
def test_a_failed_request_is_a_line_and_a_closed_tab_is_none(
    error: Exception, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(LiveServer(raising(error))) as server, request(server) as connection:
        assert answer(connection) == b""
    assert capsys.readouterr().err == printed


def raising(error: Exception) -> Callable[[], str]:
    def render() -> str:
        raise error

    return render


def is_served(server: LiveServer) -> bool:
    with suppress(ConnectionError), request(server) as connection:
        return answer(connection).endswith(b"the page")
    return False


def test_connections_are_limited_and_a_closed_one_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_server, "MAX_CONNECTIONS", 2)
    may_render = threading.Event()

    def render() -> str:
        may_render.wait(20)
        return "the page"

    with closing(LiveServer(render)) as server, request(server) as first, request(server):
        wait_until(lambda: len(server._served) == 2)
        assert not is_served(server)
        may_render.set()
        assert answer(first).endswith(b"the page")
        wait_until(lambda: is_served(server))


def wait_until(is_done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
