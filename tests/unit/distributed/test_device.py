"""Which GPU a rank takes, on machines with some: what torch says of them is given, as there are none here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from drumline.distributed.device import choose_device
from drumline.distributed.group import claim_gpu, refuse_shared_gpu
from drumline.errors import PreflightError
from drumline.launch.topology import Topology


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    assert [choose_device("auto", local_rank=rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(PreflightError, match="local rank 2 has no GPU of its own: this host has 2"):
        choose_device("auto", local_rank=2)
    with_gpus(monkeypatch, 1)
    assert choose_device("auto", local_rank=3).index == 0


def meet(uuids: list[str | None], *, local_world_size: int = 2) -> dist.Store:
    store = dist.HashStore()
    for rank, uuid in enumerate(uuids):
        claim_gpu(store, Topology(rank=rank, world_size=2, local_world_size=local_world_size), uuid)
    return store


def test_ranks_that_would_share_a_gpu_are_refused_on_all() -> None:
    for uuids in (["x", "y"], [None, None]):
        refuse_shared_gpu(meet(uuids))
    refuse_shared_gpu(meet(["x", "x"], local_world_size=1))  # two jobs of one rank that try out two nodes
    with pytest.raises(PreflightError) as caught:
        refuse_shared_gpu(meet(["x", "x"]))
    assert caught.value.what.startswith("two ranks or more would compute on one GPU: x of ")
    assert "--gpus-per-task=1" in str(caught.value.next_step)
