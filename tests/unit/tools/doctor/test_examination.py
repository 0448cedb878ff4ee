"""The examination: by which address a host is reached, and in which rounds pairs are measured."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.tools.doctor.pairs.examination import (
    choose_addresses,
    other_addresses,
    rounds,
    targets_of,
)
from drumline.tools.doctor.pairs.node_server import OpenPorts
from drumline.tools.doctor.pairs.survey import HostRecord, Survey

LO, ETH0, DOCKER0, IB0 = (
    {"name": name, "address": address, "mtu": 1500, "is_up": True}
    for name, address in (
        ("lo", "127.0.0.1"),
        ("eth0", "10.0.0.2"),
        ("docker0", "172.17.0.1"),
        ("ib0", "10.1.0.2"),
    )
)


def survey(*leads_to: str, reached_at: str | None = None, by_ssh: bool = True) -> Survey:
    """Two hosts, of which the first looks for the second, which has four networks."""
    host = HostRecord(
        "b", "b", address=reached_at, interfaces=[LO, DOCKER0, ETH0, IB0], gloo=DOCKER0, nccl=IB0
    )
    result = Survey([HostRecord("a", "a", interfaces=[LO]), host], 29500, by_ssh=by_ssh)
    result.edge(0, 1).addresses = list(leads_to)
    return result


@pytest.mark.parametrize(
    ("result", "address"),
    [
        (survey("10.0.0.2", reached_at="10.1.0.2"), "10.0.0.2"),
        (survey("54.1.2.3", reached_at="10.0.0.2"), "10.0.0.2"),
        (survey("127.0.1.1"), "10.1.0.2"),
        (survey("10.0.0.2", reached_at="10.1.0.2", by_ssh=False), "10.1.0.2"),
        (survey(reached_at="127.0.0.1", by_ssh=False), "127.0.0.1"),
    ],
    ids=["its name", "ssh", "NCCL's choice", "by hand", "all on one machine"],
)
def test_the_address_that_others_use(result: Survey, address: str) -> None:
    choose_addresses(result)
    assert result.hosts[1].address == address
    assert result.hosts[0].address == "127.0.0.1", "all that it has"


def test_every_network_that_may_be_chosen_is_tried() -> None:
    result = survey("10.0.0.2")
    choose_addresses(result)
    assert other_addresses(result, 1) == ["172.17.0.1", "10.1.0.2"], (
        "those that gloo and NCCL would take come first"
    )
    first = OpenPorts([1], {}, rendezvous_port=29500)
    second = OpenPorts([40000, 40001], {"172.17.0.1": 40002})
    tried = list(targets_of(result, 0, {0: first, 1: second}))
    assert [(kind, target.port, target.large) for kind, target in tried] == [
        ("data", 40000, True),
        ("data", 40001, False),
        ("172.17.0.1", 40002, False),
    ]
    (back, rendezvous) = targets_of(result, 1, {0: first})
    assert (back[0], rendezvous[0], rendezvous[1].port) == ("data", "rendezvous", 29500)


@given(st.integers(min_value=0, max_value=65))
def test_every_pair_meets_once_and_each_host_is_in_one_pair_a_round(count: int) -> None:
    planned = rounds(count, combinations(range(count), 2))
    met = Counter(pair for pairs in planned for pair in pairs)
    assert met == Counter(combinations(range(count), 2))
    for pairs in planned:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    if count > 1:
        assert len(planned) == count - 1 + count % 2


@given(st.integers(2, 20), st.data())
def test_of_some_pairs_only_those_are_left_in_rounds_that_have_any(
    count: int, data: st.DataObject
) -> None:
    every = list(combinations(range(count), 2))
    links = data.draw(st.lists(st.sampled_from(every), unique=True))
    # The way back is the same pair.
    planned = rounds(count, [pair[::-1] for pair in links])
    assert sorted(pair for pairs in planned for pair in pairs) == sorted(links)
    assert all(planned)
