from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from drumline.errors import PreflightError
from drumline.launch.addresses import own_address, wait_for_port
from drumline.launch.rendezvous import FixedRanks
from tests.ranks import free_port


class Met:
    """A rendezvous that is over: node `rank` of `world_size`, by c10d's count."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.info = RendezvousInfo(store, rank, world_size, RendezvousStoreInfo("elsewhere", 1))

    def next_rendezvous(self) -> RendezvousInfo:
        return self.info


def meet(node_ranks: list[int]) -> list[Any]:
    """What each node gets, or what it raised; the order is c10d's."""
    store = dist.HashStore()

    def one(number: int) -> Any:
        inner: Any = Met(store, number, len(node_ranks))
        try:
            return FixedRanks(inner, node_ranks[number], f"host-{number}").next_rendezvous()
        except PreflightError as error:
            return error

    with ThreadPoolExecutor(len(node_ranks)) as pool:
        return list(pool.map(one, range(len(node_ranks))))


def test_nodes_keep_the_ranks_they_were_given_and_rank_0_says_where_it_is() -> None:
    infos = meet([2, 0, 1])
    assert [info.rank for info in infos] == [2, 0, 1]
    assert {info.bootstrap_store_info.master_addr for info in infos} == {"host-1"}
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1


def test_two_nodes_with_one_rank_are_refused_on_both() -> None:
    host = socket.gethostname()
    for error in meet([0, 0]):
        assert error.what == f"the 2 nodes have NODE_RANK 0 on {host}, 0 on {host}"
        assert error.next_step == "give each node a NODE_RANK of its own, from 0 to 1"


def test_the_address_that_leads_to_the_others() -> None:
    assert own_address("127.0.0.1:29500") == "127.0.0.1"
    with pytest.raises(
        PreflightError, match=r"MASTER_ADDR is 'nowhere\.invalid', to which no way leads from"
    ):
        own_address("nowhere.invalid:29500")


def test_a_first_node_that_never_comes_is_named_by_its_address() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(PreflightError) as caught:
        wait_for_port(endpoint, timeout_s=0)
    assert caught.value.what == f"nobody answers at {endpoint}, where the nodes meet: Connection refused"
    assert caught.value.next_step == (
        "start the node with NODE_RANK 0 there, and open that port to this machine"
    )


def test_a_first_node_that_is_there_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for_port(f"127.0.0.1:{server.getsockname()[1]}", timeout_s=0)
