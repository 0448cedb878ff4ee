"""By which address a host is reached."""

from __future__ import annotations

import pytest

from drumline.doctor.pairs.addresses import choose_addresses, other_addresses, targets_of
from drumline.doctor.pairs.survey import HostSeen, Survey

LO, ETH0, DOCKER0, IB0 = (
    {"name": name, "address": address, "mtu": 1500, "is_up": True}
    for name, address in (
        ("lo", "127.0.0.1"),
        ("eth0", "10.0.0.2"),
        ("docker0", "172.17.0.1"),
        ("ib0", "10.1.0.2"),
    )
)


def survey(*leads_to: str, reached_at: str | None = None, names_matter: bool = True) -> Survey:
    """Two hosts, of which the first looks for the second, which has four networks."""
    host = HostSeen("b", "b", address=reached_at, interfaces=[LO, DOCKER0, ETH0, IB0], gloo=DOCKER0, nccl=IB0)
    seen = Survey([HostSeen("a", "a", interfaces=[LO]), host], 29500, names_matter=names_matter)
    seen.edge(0, 1).addresses = list(leads_to)
    return seen


@pytest.mark.parametrize(
    ("seen", "address"),
    [
        (survey("10.0.0.2", reached_at="10.1.0.2"), "10.0.0.2"),
        (survey("54.1.2.3", reached_at="10.0.0.2"), "10.0.0.2"),
        (survey("127.0.1.1"), "10.1.0.2"),
        (survey("10.0.0.2", reached_at="10.1.0.2", names_matter=False), "10.1.0.2"),
        (survey(reached_at="127.0.0.1", names_matter=False), "127.0.0.1"),
    ],
    ids=["its name", "ssh", "NCCL's choice", "by hand", "all on one machine"],
)
def test_the_address_that_others_use(seen: Survey, address: str) -> None:
    choose_addresses(seen)
    assert seen.hosts[1].address == address
    assert seen.hosts[0].address == "127.0.0.1", "all that it has"


def test_every_network_that_may_be_chosen_is_tried() -> None:
    seen = survey("10.0.0.2")
    choose_addresses(seen)
    assert other_addresses(seen, 1) == ["172.17.0.1", "10.1.0.2"], (
        "those that gloo and NCCL would take come first"
    )
    opened = {"data": [40000, 40001], "others": {"172.17.0.1": 40002}}
    tried = list(targets_of(seen, 0, {0: {"data": [1], "others": {}, "meeting_port": 29500}, 1: opened}))
    assert [(kind, target["port"], target.get("large")) for kind, target in tried] == [
        ("data", 40000, True),
        ("data", 40001, False),
        ("172.17.0.1", 40002, None),
    ]
    (back, meeting) = targets_of(seen, 1, {0: {"data": [1], "others": {}, "meeting_port": 29500}})
    assert (back[0], meeting[0], meeting[1]["port"]) == ("data", "meeting", 29500)
