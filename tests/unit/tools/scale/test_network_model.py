"""How long an all-reduce takes: closed forms of rings and trees, links that were measured, and
links by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from drumline.base.errors import UsageError
from drumline.tools.scale.network_model import (
    INSIDE,
    NCCL,
    NETWORKS,
    RING,
    TREE,
    Link,
    Network,
    all_reduce,
    chosen_link,
    link_from_doctor,
    link_from_points,
    nccl_transfer,
    rated_link,
    read_doctor,
    usual_inside,
)
from tests.unit.tools.scale.jobs_to_scale import MIB, make_network


def test_a_ring_of_gloo_moves_its_bytes_twice_over_each_link_less_one_part() -> None:
    network = make_network(MIB, 0.0)
    for ranks in (2, 4, 8):
        transfer = all_reduce(network, 8 * MIB, ranks, 1)
        assert transfer.alone_s == transfer.busy_s == pytest.approx(2 * (ranks - 1) / ranks * 8)
    assert all_reduce(network, 8 * MIB, 1, 1).alone_s == 0.0


def test_small_messages_wait_for_every_hop() -> None:
    # 14 hops of half a byte's time and the latency; the second segment is hidden behind it.
    transfer = all_reduce(make_network(MIB, 0.01), 16, 8, 1)
    assert transfer.alone_s == pytest.approx(14 * (0.01 + 1 / MIB))
    assert transfer.busy_s == pytest.approx(14 * 2 / MIB)
    # A large message hides the latency.
    assert all_reduce(make_network(MIB, 0.01), 8 * MIB, 8, 1).alone_s == pytest.approx(14)


def test_within_a_node_the_slower_of_both_links_counts() -> None:
    fast, slow = (Link(name="", bytes_per_s=rate * MIB, latency_s=0.0) for rate in (4.0, 1.0))
    network = Network(backend="gloo", between=slow, inside=fast)
    assert all_reduce(network, MIB, 1, 4).alone_s == pytest.approx(1.5 / 4)
    assert all_reduce(network, MIB, 2, 2).alone_s == pytest.approx(1.5)


def test_rings_and_trees_of_nccl_are_those_of_its_cost_model() -> None:
    network = Network(backend="nccl", between=NETWORKS["100gbit"], inside=INSIDE["nvlink4"])
    simple = NCCL[1]
    ring, tree = (nccl_transfer(network, simple, way, 12_000_000, 16, 8) for way in (RING, TREE))
    # 254 hops, 30 of them between nodes; 127/128 of the bytes twice at 12 GB/s.
    assert ring.alone_s == pytest.approx(8.4e-6 + 224 * 3.4e-6 + 30 * 14e-6 + 2 * 127 / 128 * 1e-3)
    # Up and down: 7 GPUs and 4 levels; twice the bytes at 92% of 12 GB/s.
    assert tree.alone_s == pytest.approx(8.4e-6 + 2 * 7 * 4e-6 + 2 * 4 * 14e-6 + 2 * 1e-3 / 0.92)
    # The fastest is taken: trees for small messages on many nodes, rings for large ones on few.
    assert (
        all_reduce(network, 1024, 128, 8).alone_s
        < nccl_transfer(network, NCCL[0], RING, 1024, 128, 8).alone_s
    )
    assert all_reduce(network, 1 << 30, 2, 8) == nccl_transfer(network, simple, RING, 1 << 30, 2, 8)


@given(
    size=st.integers(1, 1 << 32),
    added=st.integers(0, 1 << 32),
    nodes=st.integers(2, 2048),
    per_node=st.sampled_from((1, 2, 8)),
    rate=st.floats(1e6, 1e12),
    latency=st.floats(0, 0.01),
    backend=st.sampled_from(("gloo", "nccl")),
)
def test_more_bytes_take_longer_and_faster_links_less(
    size: int, added: int, nodes: int, per_node: int, rate: float, latency: float, backend: str
) -> None:
    def seconds(num_bytes: int, rate: float, latency: float) -> float:
        return all_reduce(
            make_network(rate, latency, backend=backend), num_bytes, nodes, per_node
        ).alone_s

    here = seconds(size, rate, latency)
    assert 0 < here <= seconds(size + added, rate, latency) * (1 + 1e-9)
    assert seconds(size, 2 * rate, latency) <= here <= seconds(size, rate, 2 * latency) * (1 + 1e-9)
    transfer = all_reduce(make_network(rate, latency, backend=backend), size, nodes, per_node)
    assert transfer.busy_s <= transfer.alone_s


@given(
    rate=st.floats(1e6, 1e11),
    latency=st.floats(0, 0.001),
    ranks=st.integers(2, 64),
    size=st.integers(1 << 24, 1 << 30),
)
def test_a_measured_link_gives_its_measurements_back(
    rate: float, latency: float, ranks: int, size: int
) -> None:
    # below that, a message says little about the bandwidth
    assume(size / ranks / rate >= 4 * latency)
    truth = make_network(rate, latency)
    points = [
        (float(num_bytes), all_reduce(truth, num_bytes, ranks, 1).alone_s)
        for num_bytes in (ranks, size)
    ]
    link = link_from_points("again", points, world_size=ranks, backend="gloo")
    again = Network(backend="gloo", between=link, inside=truth.inside)
    for message, seconds in zip((ranks, size), (points[0][1], points[1][1]), strict=True):
        assert all_reduce(again, message, ranks, 1).alone_s == pytest.approx(seconds, rel=0.01)


def test_bandwidth_may_depend_on_the_size() -> None:
    points = [(2.0, 0.002), (2.0 * MIB, 2.0), (8.0 * MIB, 16.0)]
    link = link_from_points("slow", points, world_size=2, backend="gloo")
    assert link.latency_s == pytest.approx(0.001, rel=0.01)
    rates = [link.rate(sent) for sent in (1, 2 * MIB, 8 * MIB, 64 * MIB)]
    assert rates == [MIB, MIB, MIB / 2, MIB / 2]
    assert link.rate(4 * MIB) == pytest.approx(0.75 * MIB)  # halfway by ratio


def test_the_bandwidth_is_that_of_all_bytes_that_a_link_carries() -> None:
    """Not of those of a hop, which are fewer the more ranks there are."""
    points = [(2.0, 0.002), (2.0 * MIB, 2.0), (8.0 * MIB, 16.0)]
    link = link_from_points("slow", points, world_size=2, backend="gloo")
    network = Network(backend="gloo", between=link, inside=INSIDE["loopback"])
    transfer = all_reduce(network, 5 * MIB, 5, 1)  # 8 hops of 1 MiB
    assert transfer.busy_s == pytest.approx(16.0)


NUMBERS = {
    "world_size": 4,
    "all_reduce_bytes": 4 * MIB,
    "all_reduce_gb_per_s": 0.5,
    "all_reduce_latency_us": 600.0,
}
OF_RANKS = [
    {"host": "b", "rank": rank, "result": {"numbers": NUMBERS, "findings": []}}
    for rank in (1, 2, 3)
]


@pytest.mark.parametrize(
    "document",
    [
        {"collectives": NUMBERS},
        {"collectives": [{"host": "a", "rank": 0, "error": "no output"}, *OF_RANKS]},
    ],
    ids=["this machine", "hosts"],
)
def test_what_the_doctor_measured_is_a_link(tmp_path: Path, document: Any) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(document))
    link = link_from_doctor("lab.json", read_doctor("--network", tmp_path / "lab.json")[0], "gloo")
    assert link.bytes_per_s == pytest.approx(0.5e9)
    assert link.latency_s == pytest.approx(100e-6, rel=0.01)
    assert (link.name, link.source) == ("lab.json", "measured with gloo on 4 ranks")


@pytest.mark.parametrize(
    "collectives",
    [
        {**NUMBERS, "world_size": 1},
        {**NUMBERS, "all_reduce_gb_per_s": 0.0},
        {},
        [{"host": "a", "rank": 0, "error": "no output"}],
    ],
)
def test_a_single_rank_measured_no_link(tmp_path: Path, collectives: Any) -> None:
    path = tmp_path / "alone.json"
    path.write_text(json.dumps({"collectives": collectives}))
    with pytest.raises(
        UsageError, match=r"--doctor: .*alone.json has no measured all_reduce of several ranks"
    ) as caught:
        read_doctor("--doctor", path)
    assert caught.value.next_step is not None
    assert caught.value.next_step.startswith("make it: drumline doctor --collectives --json > ")


def test_links_have_names() -> None:
    assert chosen_link("--network", "100gbit", NETWORKS, "nccl").bytes_per_s == pytest.approx(12e9)
    assert all(link.source and link.name == name for name, link in {**NETWORKS, **INSIDE}.items())
    with pytest.raises(
        UsageError, match=r"--network: there is no network '100gb'; did you mean '100gbit'\?"
    ):
        chosen_link("--network", "100gb", NETWORKS, "nccl")
    devices = ("cpu", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4")
    assert [usual_inside(device).name for device in devices] == [
        "loopback",
        "nvlink4",
        "nvlink3",
        "pcie4",
    ]


@pytest.mark.parametrize(
    ("text", "mbit", "part", "latency_us"),
    [
        ("60mbit,0.2ms", 60, 1448 / 1538, 225),
        ("60mbit", 60, 1448 / 1538, 25),
        ("2.5gbit,80us", 2500, 1448 / 1538, 105),
        ("800kbit,0.05s", 0.8, 1448 / 1538, 50_025),
        ("800gbit,3us", 800_000, 0.96, 3),
    ],
)
def test_any_rate_and_latency_is_a_network(
    text: str, mbit: float, part: float, latency_us: float
) -> None:
    """As those by name: TCP below 100 Gbit/s, with 25 us of software a hop, and RDMA from there."""
    link = rated_link(text)
    assert link is not None
    assert link.name == text
    assert (link.bytes_per_s, link.latency_s) == pytest.approx(
        (mbit * 1e6 / 8 * part, latency_us * 1e-6)
    )


def test_a_rate_by_itself_is_the_network_of_that_name() -> None:
    for name in ("1gbit", "10gbit", "100gbit", "3200gbit"):
        link = rated_link(name)
        assert link is not None
        assert (link.bytes_per_s, link.latency_s) == pytest.approx(
            (NETWORKS[name].bytes_per_s, NETWORKS[name].latency_s)
        )
    link = rated_link("60mbit,0.2ms")
    assert link is not None
    assert link.source == (
        "nominal 60 Mbit/s a node, 94% of it with TCP; 25 us a hop assumed beside 0.20 ms of the network"
    )


@pytest.mark.parametrize(
    "text",
    ["60", "60mb", "0mbit", "60mbit,", "60mbit,2", "-1mbit", "60mbit,0.2ms,1", "9" * 400 + "gbit"],
)
def test_what_is_no_rate_is_none(text: str) -> None:
    assert rated_link(text) is None
