"""Which addresses are this machine's own, and by which of them others reach it."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import pytest

from drumline.base.errors import PreflightError
from drumline.net import interfaces
from drumline.net.interfaces import check_is_own, own_address, own_binding


def test_the_address_that_leads_to_the_others() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(PreflightError, match=r"MASTER_ADDR nowhere\.invalid is unreachable from"):
        own_address("nowhere.invalid")


def test_the_first_node_must_have_the_address_of_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_is_own("127.0.0.1")
    monkeypatch.setattr(interfaces, "own_address", lambda host: "10.0.0.2")
    with pytest.raises(PreflightError) as caught:
        # an address for examples, which no machine has; nothing is sent
        check_is_own("192.0.2.1")
    assert caught.value.what == (
        f"this is node 0, which runs the rendezvous, but 192.0.2.1 is not an address of {socket.gethostname()}, "
        "which has 10.0.0.2"
    )
    assert "give this one a NODE_RANK of its own" in str(caught.value.next_step)


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
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in leads_to]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    outside = [
        SimpleNamespace(address=address, is_loopback=False, is_up=True) for address in networks
    ]
    monkeypatch.setattr("drumline.net.interfaces.interfaces", lambda: outside)
    assert own_binding(host) == bound
