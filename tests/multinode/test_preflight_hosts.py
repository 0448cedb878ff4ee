"""What stops a job before its first step, on real hosts: named with the right host, and long before
the timeout."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import firewall
from tests.multinode.flights import PORT, START_TIMEOUT_S, fly
from tests.multinode.hosts import Testbed

MakeTestbed = Callable[..., Testbed]
WRONG_NETWORK = {"environment": {"GLOO_SOCKET_IFNAME": "docker0"}}


def told(said: dict[str, str]) -> str:
    """What all ranks said alike, well before the start timeout was over."""
    texts = set()
    for text in said.values():
        words, _, seconds = text.strip().rpartition("\nafter ")
        assert float(seconds.removesuffix(" s")) < START_TIMEOUT_S / 2, text
        texts.add(words)
    assert len(texts) == 1, said
    return texts.pop()


@pytest.mark.soak
def test_closed_ports_and_wrong_networks_are_named_by_host(make_testbed: MakeTestbed) -> None:
    bed = make_testbed("a", "b", "c")
    a, b, _ = bed.hosts
    assert told(fly(bed, {"a": {}, "b": {}, "c": {}})) == "trained"

    second = {"host": "b", "environment": {"LOCAL_RANK": "1"}}
    # Every host calls every other one.
    firewall.close_all_but(b, PORT)
    assert re.fullmatch(
        r"error: a and c cannot reach b's data port \d+ at 10.77.0.2 \(eth0\): no answer: packets are dropped, .*\n"
        r"  try: open all TCP ports between the nodes \(in AWS: .*\), on b",
        told(fly(bed, {"a": {}, "b": {}, "b, too": second, "c": {}})),
    )
    for host in (a, bed["c"]):
        firewall.close_all_but(host, PORT)
    all_closed = told(fly(bed, {"a": {}, "b": {}, "c": {}}))
    assert all_closed.startswith("error: data cannot go between these hosts:\n  - ")
    for pair, host in (("b and c", "a"), ("a and c", "b"), ("a and b", "c")):
        assert f"\n  - {pair} cannot reach {host}'s data port " in all_closed
    assert all_closed.endswith(", on b, c and a")
    for host in bed:
        firewall.lift(host)

    a.add_interface("docker0", "172.17.0.1/16")
    b.add_interface("docker0", "9.9.0.1/16")
    wrong = told(fly(bed, {"a": {}, "b": WRONG_NETWORK}))
    assert wrong.startswith(
        "error: b takes data on the wrong network, 9.9.0.1 (docker0), where a cannot reach it: "
    )
    assert wrong.endswith(
        "eth0 is the one that leads to the other hosts\n  try: export GLOO_SOCKET_IFNAME=eth0 on b"
    )
    assert told(fly(bed, {"a": {}, "c": WRONG_NETWORK})) == (
        "error: c has no network for gloo: GLOO_SOCKET_IFNAME is docker0, and fits none of lo, eth0 that is up and "
        "has an address\n"
        "  try: export GLOO_SOCKET_IFNAME=eth0 on c"
    )
    for host in (a, b):  # as Debian writes it for the host itself
        names = {"a": a.address, "b": b.address}
        host.set_names({**names, host.name: "127.0.1.1"})
    by_name = {"environment": {"GLOO_SOCKET_IFNAME": None}}
    said = fly(bed, {"a": by_name, "b": by_name})
    warning, _, said["a"] = said["a"].partition("\n")
    assert (
        "MASTER_ADDR a does not show which address of a the others reach: the store listens on"
        in warning
    )
    assert told(said).startswith(
        "error: data cannot go between these hosts:\n"
        "  - b takes data on the wrong network, 127.0.1.1 (lo), where a cannot reach it: "
    )
    assert (
        "  - a takes data on the wrong network, 127.0.1.1 (lo), where b cannot reach it: "
        in told(said)
    )
    assert told(said).endswith("\n  try: export GLOO_SOCKET_IFNAME=eth0 on b and a")


def test_absent_and_different_nodes_are_named_by_host(
    make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    bed = make_testbed("a", "b", "c")
    different = "ranks 0, 2 (a and c): {}; rank 1 (b): {}"
    orders = {host.name: {"task": f"/home/{host.name}/mine.py:Task"} for host in bed}
    orders["b"]["lr"] = 0.2
    assert told(fly(bed, orders)).startswith(
        "error: ranks differ in the setting optim.lr: " + different.format(0.1, 0.2)
    )
    orders = {
        host.name: {"task": f"{'yours' if host.name == 'b' else 'mine'}.py:Task"} for host in bed
    }
    assert different.format("mine.py:Task", "yours.py:Task") in told(fly(bed, orders))
    assert re.search(
        r"ranks differ in the training data: ranks 0, 2 \(a and c\): 10 samples, .*; rank 1 \(b\): 11 samples",
        told(fly(bed, {"a": {}, "b": {"samples": 11}, "c": {}})),
    )
    for host in bed:
        place = tmp_path / f"code-{host.name}"
        place.mkdir()
        (place / "user_model.py").write_text(f"width = {2 if host.name == 'c' else 1}\n")
    assert re.match(
        r"error: ranks differ in the code of user_model: ranks 0, 1 \(a and b\): \w+; rank 2 \(c\): \w+\n  try: use",
        told(fly(bed, {host.name: {"code": str(tmp_path / f"code-{host.name}")} for host in bed})),
    )

    # c is told a name that it does not know, and never comes; b is kept out by a firewall.
    lost = {"environment": {"MASTER_ADDR": "nowhere"}, "timeout_s": 4}
    said = fly(bed, {"a": {"timeout_s": 4}, "b": {"timeout_s": 4}, "c": lost})
    for rank, host in enumerate("ab"):
        notice, error, _, _ = said[host].splitlines()
        assert re.fullmatch(
            rf"drumline: rank {rank} on {host} waits for rank 2 \(node 2\) \([12] s of 4 s\)",
            notice,
        )
        assert (
            error
            == "error: 1 of 3 ranks did not start within 4 s: missing rank 2 (node 2); here: 0 on a, 1 on b"
        )
    assert (
        "drumline: rank 2 on c waits for rank 0's store nowhere:29500: the name does not res"
        in said["c"]
    )
    assert (
        "error: rank 2 on c could not reach rank 0's store nowhere:29500 within 4 s: the nam"
        in said["c"]
    )

    firewall.drop_port(bed["a"], PORT)
    astray = {"environment": {"MASTER_ADDR": "b"}, "timeout_s": 4}
    said = fly(bed, {"a": astray, "b": {"timeout_s": 4}, "c": astray})
    assert said["a"].startswith(
        "drumline: warning: MASTER_ADDR b does not show which address of a the others reach"
    )
    assert (
        "rank 1 on b waits for rank 0's store a:29500: no answer (a firewall drops the packets"
        in said["b"]
    )
    assert "rank 2 on c waits for rank 0's store b:29500: connection refused" in said["c"]
    assert not any("frame #" in text for text in said.values()), "torch's own stack is not shown"
