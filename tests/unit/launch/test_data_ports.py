"""Closed ports between nodes that have joined: retried, reported with the rule to add, or only a
warning."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from drumline.base.errors import PreflightError
from drumline.launch.node.data_ports import check_data_ports, open_probe_port, unreachable_nodes
from drumline.net import dial
from drumline.net.dial import Reason


def claim(rank: int, host: str, **door: Any) -> dict[str, Any]:
    no_door = {"probe_port": 0, "probe_token": ""}
    return {"rank": rank, "host": host, "address": "127.0.0.1", **no_door, **door}


def test_a_door_that_opens_is_no_closed_edge_and_one_without_is_not_tried() -> None:
    with open_probe_port("127.0.0.1") as door:
        unknown = {**claim(2, "c", **door), "address": "nowhere.invalid"}
        assert unreachable_nodes({0: claim(0, "a", **door), 1: claim(1, "b"), 2: unknown}, 1) == {}


def test_a_closed_port_is_tried_again_and_reported_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "REPLY_S", 0.5)
    with open_probe_port("127.0.0.1") as door:
        pass
    claims = {0: claim(0, "a", **door), 1: claim(1, "b")}
    assert unreachable_nodes(claims, 1, limit_s=0.7) == {0: Reason.REFUSED}
    assert (
        capsys.readouterr().err == "drumline: data ports of a are closed to b; trying for 0.7 s\n"
    )
    with socket.create_server(("127.0.0.1", door["probe_port"])):
        assert unreachable_nodes(claims, 1, limit_s=0) == {}, (
            "another answer does not show that it is closed"
        )


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
