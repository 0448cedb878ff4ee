"""A store listens on one address, and its connections break when the other end is dead."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from drumline.net.tcp_store import break_dead_connections, listen_for_store


def test_a_listener_that_only_this_machine_reaches() -> None:
    number, port = listen_for_store("127.0.0.1")
    with socket.socket(fileno=number) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen_for_store("127.0.0.1", taken.getsockname()[1])


def open_files() -> list[str]:
    return sorted(str(path.resolve()) for path in Path("/proc/self/fd").iterdir() if path.exists())


def test_connections_to_a_port_break_when_it_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as caller, server.accept()[0] as callee:
            before = open_files()
            break_dead_connections(address[1], after_s=6)
            assert open_files() == before, "a copy that stays open keeps others waiting for the end of a pipe"
            told = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in (caller, callee)]
    assert told == [6000, 0]
