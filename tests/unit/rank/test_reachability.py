"""Which closed paths between hosts matter, and how they are reported; closed ports between nodes that
have joined: reported with the rule to add, or only a warning."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from drumline.base.errors import PreflightError
from drumline.net import dial
from drumline.net.dial import ProbeTarget, Reason
from drumline.rank.rendezvous.reachability import (
    ClosedPath,
    check_data_ports,
    open_probe_port,
    refuse_closed_paths,
    unreachable_nodes,
)


def target(number: int, *, address: str | None = None, interface: str = "eth0") -> ProbeTarget:
    return ProbeTarget(
        number, f"node-{number}", interface, address or f"10.0.0.{number}", 40000 + number, "word"
    )


def text_of(closed: list[ClosedPath], *, backend: str = "gloo") -> str:
    with pytest.raises(PreflightError) as caught:
        refuse_closed_paths(closed, backend=backend)
    return str(caught.value)


def test_one_closed_path_is_one_sentence_with_its_cause() -> None:
    assert text_of([ClosedPath(target(2), target(1), Reason.REFUSED, "eth0")]) == (
        "node-2 cannot reach node-1's data port 40001 at 10.0.0.1 (eth0): refused, though a process listens there: a "
        "firewall rejects it\n  try: open all TCP ports between the nodes (in AWS: all traffic from the security "
        "group itself), on node-1"
    )
    assert "data port 40001 at 10.0.0.1 (eth0): another host or program answers there" in text_of(
        [ClosedPath(target(2), target(1), Reason.WRONG_HOST)]
    )
    assert "(eth0): EPERM" in text_of([ClosedPath(target(2), target(1), "EPERM")])


def test_a_network_that_is_not_known_is_left_to_the_user() -> None:
    local = target(1, address="127.0.0.1", interface="lo")
    assert text_of([ClosedPath(target(2), local, Reason.REFUSED)], backend="nccl") == (
        "node-1 takes data on the wrong network, 127.0.0.1 (lo), where node-2 cannot reach it: port 40001: refused, "
        "though a process listens there: a firewall rejects it\n"
        "  try: export NCCL_SOCKET_IFNAME=NAME_OF_THE_NETWORK on node-1"
    )


@pytest.mark.slow
def test_sixty_four_hosts_are_a_few_lines() -> None:
    doors = [target(number) for number in range(1, 65)]
    closed = [
        ClosedPath(source, target, Reason.NO_ANSWER, "eth0")
        for source in doors
        for target in doors
        if source is not target
    ]
    lines = text_of(closed).splitlines()
    assert len(lines) == 1 + 8 + 1 + 1
    assert (
        "  - node-1, node-3, node-4, node-5 and 59 more cannot reach node-2's data port 40002 at 10.0.0.2"
        in lines[1]
    )
    assert lines[9] == "  - and 56 more of this kind"
    assert lines[10].endswith(", on node-2, node-3, node-4, node-5 and 60 more")


def claim(rank: int, host: str, **door: Any) -> dict[str, Any]:
    no_door = {"probe_port": 0, "probe_token": ""}
    return {"rank": rank, "host": host, "address": "127.0.0.1", **no_door, **door}


def test_a_door_that_opens_is_no_closed_edge_and_one_without_is_not_tried() -> None:
    with open_probe_port("127.0.0.1") as door:
        unknown = {**claim(2, "c", **door), "address": "nowhere.invalid"}
        assert unreachable_nodes({0: claim(0, "a", **door), 1: claim(1, "b"), 2: unknown}, 1) == {}


def test_a_closed_port_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "REPLY_S", 0.5)
    with open_probe_port("127.0.0.1") as door:
        pass
    claims = {0: claim(0, "a", **door), 1: claim(1, "b")}
    assert unreachable_nodes(claims, 1) == {0: Reason.REFUSED}
    with socket.create_server(("127.0.0.1", door["probe_port"])):
        assert unreachable_nodes(claims, 1) == {}, "another answer does not show that it is closed"


def test_who_cannot_reach_the_first_node_is_an_error_with_the_rule_and_others_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    claims = {
        rank: claim(rank, host, address="10.0.0.7", probe_port=40000 + rank)
        for rank, host in enumerate("abc")
    }
    check_data_ports(claims, {0: {}, 1: {}, 2: {}})
    assert capsys.readouterr().err == ""
    check_data_ports(claims, {0: {}, 1: {}, 2: {"1": Reason.NO_ANSWER}})
    assert capsys.readouterr().err == (
        "drumline: warning: c cannot reach b's data port 40001 at 10.0.0.7: no answer: packets are dropped, as a "
        "security group or firewall does it; ranks that send data there will block\n"
    )
    with pytest.raises(PreflightError) as caught:
        check_data_ports(claims, {0: {}, 1: {"0": Reason.NO_ROUTE}, 2: {"0": Reason.NO_ROUTE}})
    assert str(caught.value) == (
        "b and c cannot reach a's data port 40000 at 10.0.0.7: no route to host, or a firewall rejects it\n"
        "  try: open all TCP ports between the nodes (in AWS: all traffic from the security group itself), on a"
    )
