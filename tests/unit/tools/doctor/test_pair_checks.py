"""Findings about pairs of hosts: every text, with the right host or pair, and one per cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from drumline.base.text import join_names
from drumline.net.dial import Reason
from drumline.tools.doctor import cluster
from drumline.tools.doctor.finding import Finding
from drumline.tools.doctor.pairs.pair_checks import pair_findings
from drumline.tools.doctor.pairs.survey import Edge, HostRecord, Survey
from tests.unit.tools.doctor import machines

GOOD = Edge(data="open", received=65536, latency_s=5e-5, bytes_per_s=1e9)


def healthy(*names: str) -> Survey:
    """Hosts between which everything is well."""
    hosts = []
    for number, name in enumerate(names, start=1):
        eth0 = {"name": "eth0", "address": f"10.0.0.{number}", "mtu": 1500, "is_up": True}
        networks = [{**eth0, "name": "lo", "address": "127.0.0.1"}, eth0]
        host = HostRecord(
            name,
            name,
            hostname=name,
            address=eth0["address"],
            interfaces=networks,
            gloo=eth0,
            nccl=eth0,
        )
        host.clock_s = 0.01
        hosts.append(host)
    survey = Survey(hosts, 29500)
    for source, target in list(survey.pairs()):
        rendezvous: Any = "open" if target == 0 else None
        survey.edges[source, target] = replace(
            GOOD, addresses=[hosts[target].address or ""], rendezvous=rendezvous
        )
    return survey


def change(survey: Survey, ways: str, **changes: Any) -> Survey:
    """Of edges like `ab cb`, by the hosts' names."""
    names = [host.name for host in survey.hosts]
    for source, target in ways.split():
        way = (names.index(source), names.index(target))
        survey.edges[way] = replace(survey.edges[way], **changes)
    return survey


def the_only(survey: Survey) -> Finding:
    (finding,) = pair_findings(survey)
    assert finding.level != "problem" or finding.fix
    return finding


def test_of_healthy_hosts_there_is_nothing_to_say() -> None:
    assert pair_findings(healthy("a", "b", "c")) == []
    assert pair_findings(healthy("a")) == []


def test_an_absent_host() -> None:
    survey = healthy("a", "b")
    survey.hosts[1].absent = "it is down"
    survey.hosts[1].absent_fix = "start b"
    survey.edges.clear()
    assert the_only(survey).line() == "problem: b: it is down"


def test_what_a_host_could_not_do() -> None:
    survey = healthy("a", "b")
    survey.hosts[1].errors.append("facts: OSError: no")
    assert the_only(survey).line() == "problem: b: a check failed there: facts: OSError: no"


@pytest.mark.parametrize(
    ("names", "closed", "where", "words"),
    [
        (
            "a b",
            "ab",
            "a -> b",
            "data ports closed from a (no answer: packets are dropped, as a security group",
        ),
        ("a b", "ab", "a -> b", "; the other direction is open"),
        ("a b", "ab ba", "a <-> b", "data ports closed both ways"),
        ("a b c", "ab cb", "b", "data ports closed from every other host"),
        ("a b c", "ab cb", "b", "; the other direction is open"),
        ("a b c", "ab cb ba", "b", "; the other direction is closed to a"),
        ("a b c", "ab cb ba bc", "b", "; so is the other direction"),
        ("a b c", "ba bc", "b", "data ports closed to every other host"),
        ("a b c d", "ab", "a -> b", "data ports closed from a"),
        ("a b c d", "ab cb", "a and c -> b", "data ports closed from a and c"),
        ("a b c", "ab ac ba bc ca cb", "every host", "data ports closed between all of them"),
    ],
)
def test_data_ports(names: str, closed: str, where: str, words: str) -> None:
    findings = [
        finding
        for finding in pair_findings(change(healthy(*names.split()), closed, data=Reason.NO_ANSWER))
        if finding.check == "data ports"
    ]
    assert [finding.where for finding in findings][:1] == [where]
    assert words in findings[0].what
    assert findings[0].fix.startswith("open TCP 1024-65535 ")
    assert [finding.where for finding in findings][1:] == (
        ["b -> a"] if closed == "ab cb ba" else []
    )


def test_where_data_ports_are_to_be_opened() -> None:
    closed = {"data": Reason.REFUSED}
    assert "on b for" in the_only(change(healthy("a", "b", "c"), "ab cb", **closed)).fix
    assert "out of b for" in the_only(change(healthy("a", "b", "c"), "ba bc", **closed)).fix
    assert "on a and b for" in the_only(change(healthy("a", "b"), "ab ba", **closed)).fix
    assert (
        "AWS: all traffic from the security group itself"
        in the_only(change(healthy("a", "b"), "ab", **closed)).fix
    )


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (Reason.REFUSED, "refused, though a process listens there: a firewall rejects it"),
        (Reason.NO_ROUTE, "no route to host, or a firewall rejects it"),
        (Reason.WRONG_HOST, "another host or program answers there"),
    ],
)
def test_how_a_port_is_closed(outcome: str, words: str) -> None:
    assert words in the_only(change(healthy("a", "b"), "ab", data=outcome)).what


def test_the_rendezvous_port() -> None:
    finding = the_only(change(healthy("a", "b", "c"), "ba ca", rendezvous=Reason.NO_ANSWER))
    assert finding.line().startswith(
        "problem: a: the rendezvous port 29500 is closed from every other host (no answer"
    )
    assert finding.fix == "open TCP 29500 on a to the job's hosts"
    assert (
        the_only(change(healthy("a", "b", "c"), "ca", rendezvous=Reason.REFUSED)).where == "c -> a"
    )


def test_a_rendezvous_port_that_is_taken() -> None:
    survey = healthy("a", "b")
    survey.hosts[0].rendezvous_error = "Address already in use"
    finding = the_only(change(survey, "ba", rendezvous=None))
    assert (
        finding.line()
        == "problem: a: nothing can listen on the rendezvous port 29500: Address already in use"
    )
    assert "ss -ltnp 'sport = :29500' on a" in finding.fix


def test_a_name_that_does_not_resolve() -> None:
    unknown = {"addresses": [], "name_error": "Name or service not known"}
    finding = the_only(change(healthy("a", "b", "c"), "ac", **unknown))
    assert finding.line() == "problem: a -> c: c does not resolve on a (Name or service not known)"
    assert (
        finding.fix == "add `10.0.0.3 c` to /etc/hosts on a or to DNS, or give --hosts by address"
    )
    assert the_only(change(healthy("a", "b", "c"), "ac bc", **unknown)).where == "c"
    finding = the_only(change(healthy("a", "b", "c"), "ba bc", **unknown))
    assert finding.line().startswith("problem: b: a and c do not resolve on b")
    by_hand = healthy("a", "b")
    by_hand.by_ssh = False
    assert the_only(change(by_hand, "ab", **unknown)).level == "note"


def test_a_name_that_leads_elsewhere() -> None:
    survey = change(healthy("a", "b", "c"), "ab", addresses=["10.9.9.9"])
    finding = the_only(survey)
    assert (
        finding.line()
        == "problem: a -> b: b resolves to 10.9.9.9 on a, which is not an address of b"
    )
    assert finding.fix == "map b to 10.0.0.2 in /etc/hosts on a or in DNS"
    # What is closed at the wrong address is not told of the right host.
    assert (
        the_only(
            change(healthy("a", "b"), "ba", addresses=["10.9.9.9"], rendezvous=Reason.NO_ANSWER)
        ).check
        == "name"
    )
    # An address that is translated on the way is as good.
    assert (
        pair_findings(change(healthy("a", "b"), "ba", addresses=["54.1.2.3"], rendezvous="open"))
        == []
    )


def docker0(survey: Survey, number: int) -> dict[str, Any]:
    bridge = {"name": "docker0", "address": "172.17.0.1", "mtu": 1500, "is_up": True}
    survey.hosts[number].interfaces.append(bridge)
    return bridge


def test_an_interface_that_nobody_reaches() -> None:
    survey = healthy("a", "b", "c")
    survey.hosts[1].gloo = docker0(survey, 1)
    change(survey, "ab cb", others={"172.17.0.1": Reason.NO_ROUTE})
    finding = the_only(survey)
    assert finding.line() == (
        "problem: b: gloo uses docker0 (172.17.0.1), which no other host reaches; eth0 (10.0.0.2) works"
    )
    assert finding.fix == "export GLOO_SOCKET_IFNAME=eth0 on b"
    survey.hosts[1].variables = {"GLOO_SOCKET_IFNAME": "docker0"}
    assert "(172.17.0.1, set by GLOO_SOCKET_IFNAME=docker0), which" in the_only(survey).what
    assert pair_findings(change(survey, "ab", others={"172.17.0.1": "open"})) == [], (
        "a second network that works"
    )


def test_the_loopback_is_never_reached_and_nccl_counts_where_there_are_gpus() -> None:
    survey = healthy("a", "b")
    survey.hosts[0].nccl = survey.hosts[0].interfaces[0]
    assert pair_findings(survey) == []
    survey.hosts[0].facts = {"gpus": ["one"]}
    finding = the_only(survey)
    assert "NCCL uses lo (127.0.0.1)" in finding.what
    assert finding.fix == "export NCCL_SOCKET_IFNAME=eth0 on a"


def test_where_the_main_address_is_closed_the_one_that_works_is_named() -> None:
    survey = healthy("a", "b")
    second = {"name": "ib0", "address": "10.1.0.2", "mtu": 4096, "is_up": True}
    survey.hosts[1].interfaces.append(second)
    change(
        survey,
        "ab",
        data=Reason.NO_ANSWER,
        others={"10.1.0.2": "open", "10.0.0.2": Reason.NO_ANSWER},
    )
    assert "export GLOO_SOCKET_IFNAME=ib0 on b" in [
        finding.fix for finding in pair_findings(survey)
    ]


def test_a_black_hole() -> None:
    finding = the_only(change(healthy("a", "b", "c"), "ab cb", received=0, passes=1400))
    assert finding.where == "b"
    assert (
        "large messages from every other host never arrive, though small ones do: an MTU black hole"
        in finding.what
    )
    assert "(nothing of 64 KiB arrived; packets of 1400 bytes pass)" in finding.what
    assert finding.fix.startswith("sudo ip link set dev eth0 mtu 1400 on b")
    finding = the_only(change(healthy("a", "b", "c"), "ab", received=0))
    assert finding.where == "a -> b"
    assert "(nothing of 64 KiB arrived)" in finding.what
    assert "mtu 1400" in finding.fix


def test_a_large_message_that_came_in_part_is_slow_and_no_black_hole() -> None:
    assert pair_findings(change(healthy("a", "b"), "ab", received=10_000)) == []


def test_slow_lines() -> None:
    finding = the_only(change(healthy("a", "b", "c"), "ab ba cb bc", bytes_per_s=1e8))
    assert (
        finding.line()
        == "problem: b: links from every other host carry 800 Mbit/s; others carry 8.0 Gbit/s"
    )
    assert finding.fix.startswith("ethtool eth0; tc qdisc show dev eth0 on b")
    assert the_only(change(healthy("a", "b", "c"), "ba bc", bytes_per_s=1e8)).what.startswith(
        "links to every other host carry"
    )
    assert the_only(change(healthy("a", "b", "c"), "ab cb", bytes_per_s=1e8)).what.startswith(
        "links from every other host carry"
    )
    finding = the_only(change(healthy("a", "b", "c"), "ac", bytes_per_s=1e8))
    assert (
        finding.line() == "problem: a -> c: links from a carry 800 Mbit/s; others carry 8.0 Gbit/s"
    )
    assert the_only(change(healthy("a", "b"), "ab", bytes_per_s=1e8)).where == "a -> b"
    assert pair_findings(change(healthy("a", "b", "c"), "ac", bytes_per_s=4e8)) == [], (
        "a neighbour takes as much"
    )
    half = change(healthy("a", "b", "c"), "ab cb ba", bytes_per_s=1e8)
    assert the_only(change(half, "bc", bytes_per_s=None)).where == "b"


def test_a_line_that_could_not_be_measured() -> None:
    finding = the_only(change(healthy("a", "b"), "ab", bytes_per_s=None, error="timed out"))
    assert finding.line() == "problem: a -> b: it opened, but could not be measured: timed out"


def clocks(*ahead: float) -> list[Finding]:
    survey = healthy(*"abcd"[: len(ahead)])
    for host, seconds in zip(survey.hosts, ahead, strict=True):
        host.clock_s = seconds
    return pair_findings(survey)


def test_clocks() -> None:
    (finding,) = clocks(5.0, 0.0, 0.0)
    assert finding.line() == "warning: a: its clock is 5.0 s ahead of the other hosts'"
    assert finding.fix.startswith("sudo chronyc makestep on a")
    (finding,) = clocks(0.0, -3600.0)
    assert finding.line() == "problem: b: its clock is 3,600.0 s behind a's"
    assert clocks(0.0, 0.9) == []


def test_lists_of_names() -> None:
    assert [join_names("abcdefg"[:count]) for count in (1, 2, 5, 7)] == [
        "a",
        "a and b",
        "a, b, c, d and e",
        "a, b, c, d and 3 more",
    ]


def test_a_host_whose_facts_have_another_form_is_reported_and_the_rest_is_judged() -> None:
    survey = Survey(
        [HostRecord("a", "a", facts=machines.healthy()), HostRecord("b", "b", facts={"host": 3})],
        29500,
    )
    findings = cluster.check_facts(survey)
    (finding,) = [candidate for candidate in findings if candidate.where == "b"]
    assert finding.line().startswith("problem: b: its facts cannot be read (KeyError(")
    assert finding.fix == "install the same drumline on all hosts"
