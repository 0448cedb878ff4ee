"""What a stranger who reaches /metrics, or another user of the machine, can do to a job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.watch.sidecar import metrics_server
from drumline.watch.sidecar.metrics_server import MAX_CONNECTIONS, MAX_REQUEST_BYTES
from tests.metrics_node import SECRET, ServedNode, ask, parsed, scrape, value
from tests.ports import listening


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedNode]:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.5)
    node = ServedNode(tmp_path / "watch", run=tmp_path / "run")
    yield node
    node.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def is_answered(node: ServedNode) -> bool:
    return value(parsed(scrape(node.port())), "rank_up", rank=0) == 1


def test_it_listens_on_the_loopback_unless_an_address_is_given(node: ServedNode) -> None:
    port = node.port()
    assert {address for address, open_port in listening() if open_port == port} == {"127.0.0.1"}


def test_connections_that_stay_silent_keep_nobody_out(node: ServedNode) -> None:
    held = [connect(node.port()) for _ in range(5 * MAX_CONNECTIONS)]
    assert is_answered(node)
    for connection in held:
        connection.close()


def test_a_request_that_is_sent_slowly_is_ended(node: ServedNode) -> None:
    began = time.monotonic()
    with connect(node.port()) as connection:
        is_closed = False
        while not is_closed and time.monotonic() - began < 10:
            try:
                connection.sendall(b"G")
                connection.settimeout(0.1)
                is_closed = connection.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                is_closed = True
    assert is_closed
    assert is_answered(node)


def test_a_huge_request_is_not_kept(node: ServedNode) -> None:
    with connect(node.port()) as connection:
        try:
            for _ in range(1000):
                connection.sendall(b"x" * MAX_REQUEST_BYTES)
            answer = connection.recv(1)
        except OSError:
            answer = b""
    assert answer == b""
    assert is_answered(node)


def test_an_answer_that_is_not_read_is_dropped(node: ServedNode) -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: localhost:1\r\n\r\n"
    connections = []
    for _ in range(MAX_CONNECTIONS):
        connection = connect(node.port())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(request)
        connections.append(connection)
    assert is_answered(node)
    for connection in connections:
        connection.close()


def test_many_requests_at_once_are_all_cheap(node: ServedNode) -> None:
    """The text is made at most five times a second, whoever asks."""
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(ask(node.port()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert is_answered(node)


@pytest.mark.parametrize(
    "host", [b"evil.example", b"evil.example:9464", b"127.0.0.1.evil.example:1", b""]
)
def test_a_page_in_a_browser_whose_name_resolves_to_the_loopback_reads_nothing(
    node: ServedNode, host: bytes
) -> None:
    answer = ask(node.port(), b"GET /metrics HTTP/1.1\r\nHost: %s\r\n\r\n" % host)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert b"drumline_" not in answer


def test_no_secret_is_shown(node: ServedNode) -> None:
    text = scrape(node.port())
    assert SECRET not in text
    assert "SECRET" not in text
