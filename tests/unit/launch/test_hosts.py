from __future__ import annotations

from pathlib import Path

import pytest

from drumline.base.errors import UsageError
from drumline.launch.hosts import (
    Host,
    hosts_from_file,
    hosts_from_flag,
    least_nodes,
    read_counts,
    with_addresses,
    wrong_counts,
)


def test_hosts_may_have_slots_and_users() -> None:
    hosts = hosts_from_flag("a, me@b.example.org:4,10.0.0.3")
    assert hosts == [Host("a"), Host("me@b.example.org", 4), Host("10.0.0.3")]
    assert [host.address for host in hosts] == ["a", "b.example.org", "10.0.0.3"]


def test_a_hostfile_has_comments_bare_names_and_slots(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the rack\nnode-a slots=4\n\nnode-b   # bare\nme@node-c slots = 2\n")
    assert hosts_from_file(file) == [Host("node-a", 4), Host("node-b"), Host("me@node-c", 2)]


def test_a_host_may_differ_from_the_others(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "gpu1 address=10.0.0.1 slots=2\n"
        "gpu2 user=me python=/opt/python folder=/data/code  # another image\n"
        "fd00::1 address = [::1]\n"
    )
    with pytest.raises(UsageError, match=r"hosts:3: '\[::1\]' is not a host's name"):
        hosts_from_file(file)
    file.write_text(file.read_text().replace("[::1]", "fd00::2"))
    assert hosts_from_file(file) == [
        Host("gpu1", 2, "10.0.0.1"),
        Host("me@gpu2", None, "", "/opt/python", "/data/code"),
        Host("fd00::1", None, "fd00::2"),
    ]
    assert [host.network_address for host in hosts_from_file(file)] == [
        "10.0.0.1",
        "gpu2",
        "fd00::2",
    ]


def test_ipv6_addresses_are_in_brackets() -> None:
    hosts = hosts_from_flag("[fd00::1]:4,me@[fd00::2],b:2")
    assert hosts == [Host("fd00::1", 4), Host("me@fd00::2"), Host("b", 2)]
    assert hosts[1].address == "fd00::2"
    for text in ("fd00::1", "[fd00::1", "[x]", "[fe80::1%eth0]", "me;x@[fd00::1]"):
        with pytest.raises(UsageError):
            hosts_from_flag(text)


def test_addresses_for_the_network_of_the_hosts() -> None:
    hosts = hosts_from_flag("gpu1:4,gpu2")
    assert with_addresses(hosts, "10.0.0.1, [fd00::2]") == [
        Host("gpu1", 4, "10.0.0.1"),
        Host("gpu2", None, "fd00::2"),
    ]
    for text, message in (
        ("10.0.0.1", "--addresses: it has 1, and there are 2 hosts"),
        ("10.0.0.1,-x", "--addresses: '-x': a host's name does not start with a dash"),
    ):
        with pytest.raises(UsageError) as caught:
            with_addresses(hosts, text)
        assert message in caught.value.what
        assert caught.value.next_step == "give one for each host, in order"


def test_all_mistakes_of_a_hostfile_are_named_with_their_lines_in_order(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a\n-oProxyCommand=x\nb slots=none\nc d e\nA\nf;reboot\nb slots=0\n")
    with pytest.raises(UsageError) as caught:
        hosts_from_file(file)
    assert str(caught.value).splitlines() == [
        "7 problems in the list of hosts:",
        f"  - {file}:4: 'c d e' is not understood; a line is `host` or `host slots=N`, and may have "
        "address=, user=, python= and folder=",
        f"  - {file}:2: '-oProxyCommand=x': a host's name does not start with a dash; ssh would read it as a flag",
        f"  - {file}:3: b has 'none' slots; a whole number from 1 up is needed",
        f"  - {file}:5: a is listed twice; list it once, with all its slots",
        f"  - {file}:6: 'f;reboot' is not a host's name; a host is `name`, `user@name` or an address, IPv6 as "
        "[fd00::1]: letters, digits, dots, dashes and underscores",
        f"  - {file}:7: b has '0' slots; a whole number from 1 up is needed",
        f"  - {file}:7: b is listed twice; list it once, with all its slots",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,,b", "--hosts: a host's name is missing"),
        ("a,b:", "--hosts: b has '' slots; a whole number from 1 up is needed"),
        ("a,me@a", "--hosts: a is listed twice; list it once, with all its slots"),
        ("me@-x", "'me@-x' is not a host's name"),
        ("a b", "'a b' is not a host's name"),
        ("$(id)", "is not a host's name"),
    ],
)
def test_wrong_hosts_are_rejected(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        hosts_from_flag(text)
    assert message in str(caught.value)


def test_a_hostfile_that_is_missing_or_empty(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"the hostfile .*none cannot be read: No such file"
    ) as caught:
        hosts_from_file(tmp_path / "none")
    assert caught.value.next_step == "check the path of --hostfile"
    empty = tmp_path / "empty"
    empty.write_text("# nobody\n")
    with pytest.raises(UsageError, match="no host is in it; a line is `host` or `host slots=N`"):
        hosts_from_file(empty)
    empty.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read: it is not text"):
        hosts_from_file(empty)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("3", (None, 3)),
        ("2:3", (2, 3)),
        ("2:", (2, None)),
        ("3:3", (3, 3)),
        *((text, None) for text in ("", ":", "0", "0:3", "4:3", "a", "1:2:3", "-1", ":3")),
    ],
)
def test_what_a_user_may_write(text: str, counts: tuple[int | None, int | None] | None) -> None:
    assert read_counts(text) == counts
    assert (wrong_counts(text) is None) == (counts is not None)


def test_the_least_of_a_known_number() -> None:
    assert least_nodes(None, 3, known_from="x") is None
    assert least_nodes("3", 3, known_from="x") is None
    assert least_nodes("1:", 3, known_from="x") == 1
    assert least_nodes("2:3", 3, known_from="x") == 2
    for text in ("2:4", "2", "4:"):
        with pytest.raises(UsageError) as caught:
            least_nodes(text, 3, known_from="the list of hosts")
        assert caught.value.what == f"--nnodes is {text}, but there are 3 in the list of hosts"
        assert caught.value.next_step == "give `--nnodes MIN:`, with a MIN from 1 to 3"
