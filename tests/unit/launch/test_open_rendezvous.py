"""How a node opens its rendezvous: alone, or by waiting for the first node."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo

from drumline.base.errors import PreflightError
from drumline.launch.node.node_rendezvous import (
    AgentRendezvous,
    address_of,
    open_rendezvous,
    wait_for_first_node,
)
from drumline.launch.node_plan import NodePlan
from drumline.net.dial import Reason
from tests.ports import listening_addresses
from tests.ranks import free_port

REFUSED = "connection refused (nothing listens there yet)"

LIMITS = [
    {**dict.fromkeys(Reason, 0.0), Reason.REFUSED: 0.5},
    {**dict.fromkeys(Reason, 0.5), Reason.REFUSED: 0.0},
]


def test_a_first_node_that_never_joins_is_named_by_its_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(PreflightError) as caught:
        wait_for_first_node(endpoint, timeout_s=0.3)
    assert caught.value.what == (
        f"the first node did not answer at {endpoint} within 0.3 s: {REFUSED}"
    )
    assert caught.value.next_step == (
        "start the node with NODE_RANK 0 there, and open that port to this machine"
    )
    assert capsys.readouterr().err == (
        f"drumline: waiting for the first node at {endpoint}: {REFUSED} (0 s of 0.3 s)\n"
    )


def test_a_rendezvous_port_without_an_answer_between_hosts_that_are_up_is_closed() -> None:
    # A queue that is full drops what comes, as a firewall does.
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for caller in (first, second):
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        with pytest.raises(PreflightError) as caught:
            wait_for_first_node(
                f"127.0.0.1:{port}", timeout_s=0.2, hosts=("b", "a"), limits=LIMITS[0]
            )
        assert str(caught.value) == (
            f"the rendezvous port {port} is closed from b to a (no answer: packets are dropped, as a security group or "
            f"firewall does it)\n  try: open TCP {port} on a to the job's hosts"
        )
        with pytest.raises(
            PreflightError, match=r"within 0.2 s: no answer \(a firewall drops the packets, or"
        ):
            wait_for_first_node(f"127.0.0.1:{port}", timeout_s=0.2)


def test_between_hosts_that_are_up_a_refused_port_and_an_unknown_name_end_the_wait_each_in_its_own_words() -> (
    None
):
    port = free_port()
    for limits in LIMITS:
        with pytest.raises(PreflightError) as caught:
            wait_for_first_node(f"127.0.0.1:{port}", timeout_s=60, hosts=("b", "a"), limits=limits)
        assert str(caught.value) == (
            f"the rendezvous port {port} is closed from b to a (refused, though a process listens there: a firewall "
            f"rejects it)\n  try: open TCP {port} on a to the job's hosts"
        )
    with pytest.raises(PreflightError) as caught:
        wait_for_first_node(
            f"nowhere.invalid:{port}", timeout_s=60, hosts=("b", "a"), limits=LIMITS[0]
        )
    assert str(caught.value) == (
        "the name nowhere.invalid of the first host does not resolve on b\n"
        "  try: add nowhere.invalid to DNS, or to /etc/hosts on b; or give an address in --hosts"
    )


def test_a_first_node_that_is_there_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for_first_node(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0)


def test_every_attempt_has_a_store_of_its_own_on_the_loopback() -> None:
    handler = open_rendezvous(NodePlan(num_procs=2), None)
    assert isinstance(handler, AgentRendezvous)
    assert handler.use_agent_store
    first = handler.next_rendezvous()
    first.store.set("address", "of an attempt that is over")
    assert listening_addresses(_port(first)) == {"127.0.0.1"}
    second = handler.next_rendezvous()
    assert not second.store.check(["address"])
    client = dist.TCPStore("127.0.0.1", _port(second), is_master=False, wait_for_workers=False)
    client.set("word", "heard")
    peer = dist.TCPStore("127.0.0.1", _port(second), is_master=False, wait_for_workers=False)
    assert peer.get("word") == b"heard"
    assert (second.rank, second.world_size) == (0, 1)
    assert (handler.num_nodes_waiting(), handler.is_closed(), handler.shutdown()) == (
        0,
        False,
        True,
    )


def _port(info: RendezvousInfo) -> int:
    return info.bootstrap_store_info.master_port


def test_one_machine_calls_itself_by_the_loopback() -> None:
    assert address_of(NodePlan()) == "127.0.0.1"
    assert address_of(NodePlan(num_nodes=2, endpoint="127.0.0.1:1", address="node-a")) == "node-a"
