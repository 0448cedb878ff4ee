"""What is wrong with an interface, on a network of its own that the test takes apart."""

from __future__ import annotations

import subprocess
import sys

import pytest

from drumline.watch.sidecar.system_evidence import link_problem
from tests.multinode.needs import missing, tool

# A pair of interfaces, one of which stands for the switch: without it the other has no carrier.
SCRIPT = """
import subprocess, sys, time
from drumline.watch.sidecar.system_evidence import link_problem

def ip(line):
    subprocess.run([sys.argv[1], *line.split()], check=True)

ip("link add eth7 type veth peer name switch")
ip("address add 10.78.0.1/24 dev eth7")
ip("address add 10.78.0.9/24 dev eth7")
for change, expected in (
    ("address show", "eth7 is down"),
    ("link set eth7 up", "eth7 has no carrier"),
    ("link set switch up", ""),
    ("link set switch down", "eth7 has no carrier"),
    ("link delete eth7", "no interface has the address 10.78.0.1 any more"),
):
    ip(change)
    end = time.monotonic() + 20
    while link_problem("10.78.0.1") != expected:  # the kernel takes up to a second to notice
        assert time.monotonic() < end, (change, link_problem("10.78.0.1"))
        time.sleep(0.02)
    assert change != "link set switch up" or link_problem("10.78.0.9") == "", "a second address"
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_an_interface_that_is_down_has_no_carrier_or_is_gone() -> None:
    subprocess.run([tool("unshare"), "--net", sys.executable, "-c", SCRIPT, tool("ip")], check=True)


def test_nothing_is_wrong_with_what_works() -> None:
    assert [link_problem(address) for address in ("127.0.0.1", "::1")] == ["", ""]
