from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from drumline.errors import PreflightError
from drumline.launch.node import open_rendezvous
from drumline.launch.node.open_rendezvous import wait_for_first_node
from drumline.launch.node.tcp_store import break_silent_connections, listen_for_store
from drumline.net import dial, interfaces
from drumline.net.dial import WaitNotice
from drumline.net.interfaces import check_is_own, own_address, own_binding
from drumline.net.reasons import Reason
from drumline.terminal import print_message
from tests.ranks import free_port

REFUSED = "connection refused (nothing listens there yet)"

LIMITS = [
    {**dict.fromkeys(Reason, 0.0), Reason.REFUSED: 0.5},
    {**dict.fromkeys(Reason, 0.5), Reason.REFUSED: 0.0},
]


def test_the_address_that_leads_to_the_others() -> None:
    assert own_address("127.0.0.1:29500") == "127.0.0.1"
    with pytest.raises(PreflightError, match=r"MASTER_ADDR nowhere\.invalid is unreachable from"):
        own_address("nowhere.invalid:29500")


def test_the_first_node_must_be_where_the_nodes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    check_is_own("127.0.0.1:29500")
    monkeypatch.setattr(interfaces, "own_address", lambda endpoint: "10.0.0.2")
    with pytest.raises(PreflightError) as caught:
        check_is_own("192.0.2.1:29500")  # an address for examples, which no machine has; nothing is sent
    assert caught.value.what == (
        f"this is node 0, which runs the rendezvous, but 192.0.2.1 is not an address of {socket.gethostname()}, "
        "which has 10.0.0.2"
    )
    assert "give this one a NODE_RANK of its own" in str(caught.value.next_step)


def test_a_first_node_that_never_comes_is_named_by_its_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(open_rendezvous, "WaitNotice", lambda: WaitNotice(first_s=0))
    with pytest.raises(PreflightError) as caught:
        wait_for_first_node(endpoint, timeout_s=0.3)
    assert caught.value.what == (f"the first node did not answer at {endpoint} within 0.3 s: {REFUSED}")
    assert caught.value.next_step == (
        "start the node with NODE_RANK 0 there, and open that port to this machine"
    )
    assert capsys.readouterr().err == (
        f"drumline: waiting for the first node at {endpoint}, 0 s so far: {REFUSED}\n"
    )


def test_a_rendezvous_port_that_stays_silent_between_hosts_that_are_up_is_closed() -> None:
    # A queue that is full drops what comes, as a firewall does.
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for caller in (first, second):
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        with pytest.raises(PreflightError) as caught:
            wait_for_first_node(f"127.0.0.1:{port}", timeout_s=0.2, hosts=("b", "a"), limits=LIMITS[0])
        assert str(caught.value) == (
            f"the rendezvous port {port} is closed from b to a (no answer: packets are dropped, as a security group or "
            f"firewall does it)\n  next: open TCP {port} on a to the job's hosts"
        )
        with pytest.raises(
            PreflightError, match=r"within 0.2 s: no answer \(a firewall drops the packets, or"
        ):
            wait_for_first_node(f"127.0.0.1:{port}", timeout_s=0.2)


def test_between_hosts_that_are_up_a_refused_port_and_an_unknown_name_end_the_wait_each_in_its_own_words() -> (
    None
):
    port = free_port()
    for limits in LIMITS:
        with pytest.raises(PreflightError) as caught:
            wait_for_first_node(f"127.0.0.1:{port}", timeout_s=60, hosts=("b", "a"), limits=limits)
        assert str(caught.value) == (
            f"the rendezvous port {port} is closed from b to a (refused, though a process listens there: a firewall "
            f"rejects it)\n  next: open TCP {port} on a to the job's hosts"
        )
    with pytest.raises(PreflightError) as caught:
        wait_for_first_node(f"nowhere.invalid:{port}", timeout_s=60, hosts=("b", "a"), limits=LIMITS[0])
    assert str(caught.value) == (
        "the name nowhere.invalid of the first host does not resolve on b\n"
        "  next: add nowhere.invalid to DNS, or to /etc/hosts on b; or give an address in --hosts"
    )


def test_a_first_node_that_is_there_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for_first_node(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0)


def test_who_waits_speaks_soon_and_then_at_intervals_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(dial.time, "monotonic", lambda: now[0])
    notice, every_second = WaitNotice(), WaitNotice(first_s=1, growth=1)
    told: list[list[int]] = [[], []]
    for second in range(600):
        now[0] = float(second)
        for one, waiting in enumerate((notice, every_second)):
            told[one] += [second] if waiting.is_due() else []
    assert told == [[5, 20, 65, 200], list(range(1, 600))]


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


def test_a_listener_that_only_this_machine_reaches() -> None:
    number, port = listen_for_store("127.0.0.1")
    with socket.socket(fileno=number) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen_for_store("127.0.0.1", taken.getsockname()[1])


def open_files() -> list[str]:
    return sorted(str(path.resolve()) for path in Path("/proc/self/fd").iterdir() if path.exists())


def test_connections_to_a_port_are_told_to_break_silent_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as caller, server.accept()[0] as callee:
            before = open_files()
            break_silent_connections(address[1], after_s=6)
            assert open_files() == before, "a copy that stays open keeps others waiting for the end of a pipe"
            told = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in (caller, callee)]
    assert told == [6000, 0]


@pytest.mark.parametrize(
    ("host", "leads_to", "networks", "bound"),
    [
        ("127.0.0.1", ["127.0.0.1"], [], "127.0.0.1"),
        ("localhost", ["::1", "127.0.0.1"], [], "127.0.0.1"),
        (
            "node-a",
            ["127.0.1.1"],
            ["127.0.0.2"],
            "127.0.0.2",
        ),  # Debian: the other stands for the host's only network
        ("node-a", ["127.0.1.1"], ["127.0.0.2", "127.0.0.3"], "0.0.0.0"),
        ("service", ["192.0.2.1"], ["127.0.0.2"], "0.0.0.0"),
        ("nowhere.invalid", [], ["127.0.0.2"], "0.0.0.0"),
    ],
)
def test_a_store_listens_where_the_others_find_it_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, host: str, leads_to: list[str], networks: list[str], bound: str
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in leads_to]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    outside = [SimpleNamespace(address=one, is_loopback=False, is_up=True) for one in networks]
    monkeypatch.setattr("drumline.net.interfaces.interfaces", lambda: outside)
    assert own_binding(host) == bound
