"""A store listens on one address, and its connections break when the other end is dead."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from drumline.rank.tcp_store import break_dead_connections, close_connections, listen_for_store


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
            assert open_files() == before, (
                "a copy that stays open keeps others waiting for the end of a pipe"
            )
            answers = [
                end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                for end in (caller, callee)
            ]
    assert answers == [6000, 0]


def test_connections_with_an_address_are_closed_but_not_those_of_some_ports() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as caller,
        server.accept()[0] as callee,
    ):
        close_connections({"127.0.0.2"}, but=())
        close_connections({"127.0.0.1"}, but={server.getsockname()[1]})
        callee.sendall(b"open")
        assert caller.recv(4) == b"open"
        close_connections({"127.0.0.1"}, but=())
        assert caller.recv(4) == b""
