"""Ports and speed, on the loopback: what a caller learns from a port, and what it cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from drumline.tools.doctor.pairs import probe as server
from drumline.tools.doctor.pairs.probe import (
    CALL,
    LARGE_BYTES,
    PING,
    Listeners,
    Target,
    measure,
    probe,
    probe_all,
)
from tests.ranks import free_port

HERE = "127.0.0.1"
TOKEN = b"0123456789abcdef"


@pytest.fixture(name="port")
def open_port() -> Iterator[int]:
    """Of node 3."""
    listeners = Listeners(TOKEN, node=3)
    yield listeners.open(HERE)
    listeners.close()


def test_open_ports_take_large_messages_and_have_a_speed(port: int) -> None:
    targets = [Target(3, HERE, port, large=True), Target(3, HERE, port)]
    assert probe_all(targets, TOKEN) == [
        {"outcome": "open", "received": LARGE_BYTES},
        {"outcome": "open"},
    ]
    assert probe_all([], TOKEN) == []
    speed = measure(targets[0], TOKEN, seconds=0.02)
    assert speed.keys() == {"latency_s", "bytes_per_s"}
    assert speed["bytes_per_s"] > speed["latency_s"] > 0


def test_a_wrong_token_or_node_is_reported_as_another_host(port: int) -> None:
    assert probe(Target(4, HERE, port), TOKEN) == {"outcome": "another host or program answers"}
    assert probe(Target(3, HERE, port), b"x" * 16) == {"outcome": "another host or program answers"}
    with socket.create_connection((HERE, port)) as call:
        call.sendall(CALL.pack(b"x" * 16, PING, 0, 0.0))
        assert call.recv(100) == b""


def test_closed_ports() -> None:
    assert probe(Target(3, HERE, free_port()), TOKEN) == {"outcome": "connection refused"}
    # Of everybody on the link, to whom no connection leads.
    assert probe(Target(3, "255.255.255.255", 9), TOKEN)["outcome"] == "no route to host"
    assert measure(Target(3, HERE, free_port()), TOKEN, 0.02)["error"].endswith(
        "Connection refused"
    )


def test_a_large_message_that_stalls_is_counted_and_the_sizes_that_pass_are_sought(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_small(call: socket.socket, num_bytes: int, seconds: float) -> None:
        """As behind a hole: what is larger than a packet of 1400 bytes never comes."""
        taken = num_bytes if num_bytes <= 1400 - 52 else 0
        call.sendall(server.COUNT_AND_SECONDS.pack(taken, seconds))

    def take_nothing(call: socket.socket, num_bytes: int, seconds: float) -> None:
        call.sendall(server.COUNT_AND_SECONDS.pack(0, 0.0))

    monkeypatch.setattr(server, "_receive", take_small)
    result = probe(Target(3, HERE, port, large=True), TOKEN)
    assert result == {"outcome": "open", "received": 0, "passes": 1400}
    monkeypatch.setattr(server, "_receive", take_nothing)
    assert probe(Target(3, HERE, port, large=True), TOKEN)["passes"] is None


def test_bytes_that_stop_coming_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALLED_S", 0.05)
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"x" * 100)
        near.shutdown(socket.SHUT_WR)
        server._receive(far, 1000, 3.0)
        reply = server.read_exactly(near, server.COUNT_AND_SECONDS.size)
        assert server.COUNT_AND_SECONDS.unpack(reply)[0] == 100


def test_bytes_that_never_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STALLED_S", 0.05)
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"x" * 100)
        with pytest.raises(TimeoutError):  # the caller does not close
            server._receive(far, 1000, 3.0)
        reply = server.read_exactly(near, server.COUNT_AND_SECONDS.size)
        assert server.COUNT_AND_SECONDS.unpack(reply)[0] == 100


def test_a_port_closes(port: int) -> None:
    listeners = Listeners(TOKEN, node=1)
    high_port = listeners.open(HERE)
    with pytest.raises(OSError, match="in use"):
        Listeners(TOKEN, node=2).open(HERE, high_port)
    listeners.close()
    assert probe(Target(1, HERE, high_port), TOKEN) == {"outcome": "connection refused"}
    again = Listeners(TOKEN, node=2)
    assert again.open(HERE, high_port) == high_port, "at once"
    again.close()
