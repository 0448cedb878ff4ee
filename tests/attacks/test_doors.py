"""Each check that keeps someone out, tried from outside. `make soak-mutants` takes these checks
away one by one, and a test of this folder must notice."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from drumline.base.errors import UsageError
from drumline.launch.hosts import hosts_from_flag
from drumline.net.frames import FrameError, Session
from drumline.net.handshake import WRONG_SECRET, RefusedError, answer, dial
from drumline.report.live_server import MAX_CONNECTIONS, LiveServer
from drumline.report.page import render_page
from drumline.report.run_data import read_run
from drumline.storage.backends import FsspecBackend
from drumline.storage.object_store import ObjectStore
from tests.report_runs import write_run

SECRET = b"a secret of these tests"
EVIL = "</script><script>window.pwned=1</script><img src=x onerror='window.pwned=1'>"

# Connections


@pytest.mark.parametrize("proof", ["0" * 64, "", None, True, [], "proof"])
def test_a_dialler_without_the_secret_is_refused_whatever_it_sends_as_a_proof(proof: Any) -> None:
    listener = answer(SECRET, "watch", 0, {1})
    next(listener)
    listener.send({"drumline": "watch", "node": 1, "to": 0, "nonce": "0" * 32, "secret": True})
    with pytest.raises(RefusedError, match="DRUMLINE_SECRET of node 1 differs from that of node 0"):
        listener.send({"proof": proof})


@pytest.mark.parametrize("proof", ["0" * 64, "", None, True])
def test_a_listener_without_the_secret_is_refused_whatever_it_sends_as_a_proof(proof: Any) -> None:
    dialler = dial(SECRET, "watch", 1, 0)
    next(dialler)
    dialler.send({"nonce": "0" * 32})
    with pytest.raises(FrameError) as caught:
        dialler.send({"proof": proof})
    assert caught.value.kind == WRONG_SECRET


def sealed_pair() -> tuple[Session, Session]:
    return Session(b"one", b"two"), Session(b"two", b"one")


def test_a_line_is_accepted_once_and_in_its_place() -> None:
    sender, receiver = sealed_pair()
    lines = [sender.encode({"number": number}).removesuffix(b"\n") for number in range(3)]
    assert receiver.decode(lines[0]) == {"number": 0}
    for line in (lines[0], lines[2]):  # replayed; the one before it was removed
        with pytest.raises(FrameError, match="wrong seal"):
            receiver.decode(line)
    assert receiver.decode(lines[1]) == {"number": 1}


def test_a_line_is_not_accepted_in_the_other_direction() -> None:
    sender, _ = sealed_pair()
    line = sender.encode({"order": "stop"}).removesuffix(b"\n")
    with pytest.raises(FrameError, match="wrong seal"):
        sender.decode(line)


# The live report


def status_of(server: LiveServer, path: str, host: str) -> int:
    address = urlsplit(server.url)
    with closing(
        http.client.HTTPConnection(str(address.hostname), address.port, timeout=20)
    ) as connection:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status


def test_a_page_of_another_site_cannot_read_the_live_report() -> None:
    """Its name may resolve to the loopback address; the browser still sends it as the host."""
    with closing(LiveServer(lambda: "the page")) as server:
        address = urlsplit(server.url)
        for host in (
            "evil.example",
            f"evil.example:{address.port}",
            "127.0.0.1",
            f"127.0.0.1:{address.port}.evil.example",
        ):
            assert status_of(server, address.path, host) == 404, host
        for host in (address.netloc, f"localhost:{address.port}"):
            assert status_of(server, address.path, host) == 200, host


def test_another_user_cannot_read_the_live_report_without_its_path() -> None:
    with closing(LiveServer(lambda: "the page")) as server:
        address = urlsplit(server.url)
        for path in ("/", "/index.html", f"{address.path[:-2]}/", f"{address.path}x"):
            assert status_of(server, path, address.netloc) == 404, path


def test_another_user_who_holds_connections_keeps_nobody_out() -> None:
    """They can connect, but do not know the address of the page."""
    with closing(LiveServer(lambda: "the page")) as server, ExitStack() as connections:
        address = urlsplit(server.url)
        silent = [
            connections.enter_context(
                socket.create_connection((address.hostname, address.port), timeout=20)
            )
            for _ in range(MAX_CONNECTIONS + 3)
        ]
        for connection in silent[-3:]:
            connection.sendall(b"GET /guess")  # and nothing after it
        for _ in range(3):
            assert status_of(server, address.path, address.netloc) == 200


# Objects


class HostileBackend(FsspecBackend):
    """A store may list any name."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def entries(self, under: str) -> Iterator[tuple[str, int, str]]:
        return ((name, 1, "") for name in self.names)


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a/.", "a/..", "..", "a\0b", "a/", ""],
)
def test_a_name_that_leaves_the_folder_is_not_listed(name: str) -> None:
    store = ObjectStore("gs://bucket", HostileBackend([name, "a/b"]))
    assert list(store.sizes()) == ["a/b"]


# Pages


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", task=EVIL, metric=EVIL, message=EVIL, slow_rank=1, settings={"lr": EVIL}
    )
    page = render_page([read_run(run)])
    assert "window.pwned" in page
    assert re.search(r"<script>window|<img src=x", page) is None


# Hosts


@pytest.mark.parametrize(
    "name",
    [
        "-oProxyCommand=touch /tmp/x",
        "a;reboot",
        "a b",
        "$(reboot)",
        "`reboot`",
        "a|b",
        "a&b",
        "a\nb",
        "-a@b",
        "a@-oProxyCommand=x",
        "a@b@c",
        "a'b",
        "a/b",
        "*",
    ],
)
def test_a_name_that_a_shell_or_ssh_could_misread_is_no_host(name: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"(a host is `name`, `user@name` or an address|does not start with a dash)",
    ):
        hosts_from_flag(name)
