"""A job of one machine: nobody to meet, and a store that nobody else can reach."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo

from drumline.launch.node.open_rendezvous import SingleNodeRendezvous, address_of, open_rendezvous
from drumline.launch.node_plan import NodePlan
from tests.ports import listening_addresses


def test_every_attempt_has_a_store_of_its_own_on_the_loopback() -> None:
    handler = open_rendezvous(NodePlan(num_procs=2), None)
    assert isinstance(handler, SingleNodeRendezvous)
    assert handler.use_agent_store
    first = handler.next_rendezvous()
    first.store.set("address", "of an attempt that is over")
    assert listening_addresses(_port(first)) == {"127.0.0.1"}
    second = handler.next_rendezvous()
    assert not second.store.check(["address"])
    client = dist.TCPStore("127.0.0.1", _port(second), is_master=False, wait_for_workers=False)
    client.set("word", "heard")
    assert handler.store is not None
    assert handler.store.get("word") == b"heard"
    assert (second.rank, second.world_size) == (0, 1)
    assert (handler.num_nodes_waiting(), handler.is_closed(), handler.shutdown()) == (0, False, True)


def _port(info: RendezvousInfo) -> int:
    return info.bootstrap_store_info.master_port


def test_one_machine_calls_itself_by_the_loopback() -> None:
    assert address_of(NodePlan()) == "127.0.0.1"
    assert address_of(NodePlan(num_nodes=2, endpoint="127.0.0.1:1", address="node-a")) == "node-a"
