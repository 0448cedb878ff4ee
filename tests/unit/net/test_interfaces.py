"""Which network gloo and NCCL would take, on machines of many kinds."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from drumline.net.interfaces import (
    Interface,
    gloo_interface,
    interface_towards,
    interfaces,
    nccl_interface,
)

LO = Interface("lo", "127.0.0.1", 65536, is_up=True, ipv6=("::1",))
ETH0 = Interface("eth0", "10.0.0.1", 1500, is_up=True, ipv6=("fd00::1",))
ETH1 = Interface("eth1", "10.1.0.1", 9000, is_up=True)
ETH10 = Interface("eth10", "10.10.0.1", 1500, is_up=True)
IB0 = Interface("ib0", "10.2.0.1", 2044, is_up=True)
DOCKER = Interface("docker0", "172.17.0.1", 1500, is_up=True)
VIRBR = Interface("virbr0", "192.168.122.1", 1500, is_up=True)
BARE = Interface("eth2", None, 1500, is_up=True)
SIX = Interface("net6", None, 1500, is_up=True, ipv6=("fd00::6",))


def name(interface: Interface | None) -> str | None:
    return None if interface is None else f"{interface.name} {interface.address}"


@pytest.mark.parametrize(
    ("variable", "host_addresses", "expected"),
    [
        ("", ["10.0.0.1"], "eth0 10.0.0.1"),
        ("", ["fd00::1", "10.0.0.1"], "eth0 fd00::1"),
        ("", ["127.0.1.1"], "lo 127.0.1.1"),
        ("", ["52.1.2.3", "10.1.0.1"], "eth1 10.1.0.1"),
        ("", ["52.1.2.3"], "lo 127.0.0.1"),
        ("", [], "lo 127.0.0.1"),
        ("eth1", ["10.0.0.1"], "eth1 10.1.0.1"),
        ("eth1,eth0", ["10.0.0.1"], "eth1 10.1.0.1"),
        ("net6", ["10.0.0.1"], "net6 fd00::6"),
        ("eth", ["10.0.0.1"], None),  # a whole name, no prefix
        ("eth2", ["10.0.0.1"], None),  # has no address
    ],
    ids=str,
)
def test_gloo_goes_by_its_variable_and_then_by_the_hosts_name(
    variable: str,
    host_addresses: list[str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drumline.net.interfaces._resolve", lambda host: host_addresses)
    candidates = [LO, ETH0, ETH1, BARE, SIX]
    environment = {"GLOO_SOCKET_IFNAME": variable} if variable else {}
    assert name(gloo_interface(candidates, environment)) == expected


@pytest.mark.parametrize(
    ("candidates", "environment", "expected"),
    [
        ([LO, DOCKER, ETH0, ETH1], {}, "eth0"),
        ([LO, DOCKER, ETH0, IB0], {}, "ib0"),
        ([LO, DOCKER, replace(ETH0, is_up=False), ETH1], {}, "eth1"),
        ([LO, VIRBR, DOCKER], {}, "docker0"),
        ([LO, VIRBR], {}, "lo"),
        ([BARE, replace(LO, is_up=False)], {}, None),
        ([], {}, None),
        ([LO, ETH0, ETH1], {"NCCL_SOCKET_IFNAME": "eth1"}, "eth1"),
        ([LO, ETH10, ETH1], {"NCCL_SOCKET_IFNAME": "eth1"}, "eth10"),
        ([LO, ETH10, ETH1], {"NCCL_SOCKET_IFNAME": "=eth1"}, "eth1"),
        ([LO, ETH10, ETH1], {"NCCL_SOCKET_IFNAME": "=eth1:29000"}, "eth1"),
        ([LO, ETH0, ETH1], {"NCCL_SOCKET_IFNAME": "^eth0,lo"}, "eth1"),
        ([LO, ETH0, ETH10, ETH1], {"NCCL_SOCKET_IFNAME": "^=eth0,lo,eth10"}, "eth1"),
        ([LO, DOCKER, ETH0], {"NCCL_SOCKET_IFNAME": "docker"}, "docker0"),
        ([LO, ETH0], {"NCCL_SOCKET_IFNAME": "bond"}, None),
        ([LO, ETH0], {"NCCL_SOCKET_IFNAME": "b"}, "eth0"),
        ([LO, SIX, ETH0], {}, "net6"),
        ([LO, SIX, ETH0], {"NCCL_SOCKET_FAMILY": "AF_INET"}, "eth0"),
        ([LO, ETH1, ETH0], {"NCCL_SOCKET_FAMILY": "AF_INET6"}, "eth0"),
    ],
    ids=str,
)
def test_nccl_goes_by_prefixes_and_an_order_of_its_own(
    candidates: list[Interface], environment: dict[str, str], expected: str | None
) -> None:
    chosen = nccl_interface(candidates, environment)
    assert (chosen and chosen.name) == expected
    if chosen and environment.get("NCCL_SOCKET_FAMILY") == "AF_INET6":
        assert chosen.address == "fd00::1"


def test_this_machines_own_networks_are_found() -> None:
    networks = interfaces()
    names = [interface.name for interface in networks]
    assert names == [name for _, name in socket.if_nameindex()]
    loopback = networks[names.index("lo")]
    assert (loopback.address, loopback.is_up, loopback.is_loopback) == ("127.0.0.1", True, True)
    assert loopback.mtu > 1000
    assert interface_towards(networks, "127.0.0.1") is None, "that way does not leave the host"
    assert interface_towards(networks, "no-such-host.invalid") is None
