"""The sidecars' network between real hosts: how each end reports a cut link, and that it
reconnects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multinode import firewall
from tests.multinode.hosts import Host, Testbed

# One sidecar's network with its pulses. It says when a node falls silent, how, and when it is heard
# again; each time with a number.
SIDECAR = """
import asyncio, socket, sys
from collections import Counter
from drumline.watch.sidecar.sidecar_network import SidecarNetwork
from drumline.watch.sidecar.sidecar_options import Peer

me = int(sys.argv[1])
peers = [Peer(node, host, f"10.77.0.{node + 1}", 7000) for node, host in enumerate("abc")]
silent, times = set(), Counter()

def look(network):
    for node, age in network.heartbeat_ages().items():
        if age < 1 and (node in silent or not times[node]):
            silent.discard(node)
            times[node] += 1
            print(f"{peers[node].host} is heard ({times[node]})", flush=True)
        if 3 < age and node not in silent and network.connect_result(node):
            silent.add(node)
            print(f"{peers[node].host} is silent ({times[node]}): {network.connect_result(node)}", flush=True)

async def main():
    listener = socket.create_server((peers[me].address, 7000))
    network = SidecarNetwork(
        me=me, peers=peers, secret=b"secret", on_message=lambda node, message: None, listener=listener
    )
    await network.start()
    while True:
        for peer in peers:
            network.send(peer.node, {"heartbeat_age_s": network.heartbeat_ages()})
        look(network)
        await asyncio.sleep(0.25)

asyncio.run(main())
"""


@pytest.mark.soak
def test_ends_say_how_the_other_is_unreachable_and_reconnect(
    make_testbed: Callable[..., Testbed],
) -> None:
    bed = make_testbed("a", "b", "c")
    a, b, c = bed.hosts
    jobs = {
        host.name: host.start(
            sys.executable, "-c", SIDECAR, str(number), env={"PYTHONPATH": str(Path.cwd())}
        )
        for number, host in enumerate(bed)
    }

    def all_say(times: int, *pairs: str, what: str = "is heard") -> None:
        for here, there in pairs:
            jobs[here].wait_for(f"{there} {what} ({times})")

    everyone = ("ab", "ac", "ba", "bc", "ca", "cb")
    all_say(1, *everyone)

    # What a sends to b is lost. TCP needs answers, so b's words do not come through for long
    # either; a new connection fails from both ends. The third host hears both, which tells this
    # from a host that is gone.
    firewall.drop_from(b, a)
    all_say(1, "ab", "ba", what="is silent")
    for here, there in ("ab", "ba"):
        assert f"{there} is silent (1): no answer" in jobs[here].text()
    assert not any("c is silent" in job.text() for job in jobs.values())
    assert "silent" not in jobs["c"].text()
    firewall.lift(b)
    all_say(2, "ab", "ba")

    b.cut()
    all_say(2, "ab", "ba", what="is silent")
    all_say(1, "cb", "bc", what="is silent")
    assert "c is silent" not in jobs["a"].text()
    b.restore()
    all_say(3, "ab", "ba")
    all_say(2, "cb", "bc")

    c.power_off()
    all_say(1, "ac", what="is silent")
    all_say(2, "bc", what="is silent")
    for here in "ab":
        last = jobs[here].text().splitlines()[-1]
        assert last.rpartition(": ")[2] in ("no answer", "no route to host"), (
            "its address is known, and nobody is there"
        )
    assert not any("Traceback" in job.text() or "Task" in job.text() for job in jobs.values())


# What each node says first of where it is, then where it listens once it knows what all have said.
WHERE = """
import sys
from drumline.net.interfaces import outward_address
from drumline.rank.watched.node_watch import listen_for_sidecars, sidecar_address
if sys.argv[1] == "out":
    print(outward_address({}, "a"))
else:
    print(listen_for_sidecars(sidecar_address(int(sys.argv[1]), [None, "10.77.0.2"])).getsockname()[0])
"""


def test_a_sidecar_listens_where_the_other_hosts_are(make_testbed: Callable[..., Testbed]) -> None:
    a, b = make_testbed("a", "b").hosts
    b.add_interface("docker0", "172.17.0.1/16")
    # as Debian's installer names a host to itself
    a.set_names({"a": "127.0.1.1", "b": b.address})
    env = {"PYTHONPATH": str(Path.cwd())}

    def says(host: Host, word: str) -> str:
        return host.run(sys.executable, "-c", WHERE, word, env=env).stdout.strip()

    assert says(a, "out") == "None", "the store is on this very host"
    assert says(b, "out") == b.address
    assert says(a, "0") == a.address, "not the loopback: the way to the other host"
    assert says(b, "1") == b.address
