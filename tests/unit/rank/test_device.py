"""Which GPU a rank takes; torch's answers are simulated, as there are no GPUs here."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from drumline.base.errors import PreflightError
from drumline.base.rank_environment import Topology
from drumline.rank.group import nccl_gpu
from drumline.rank.rendezvous.rank_rendezvous import StartOptions, join_rendezvous
from drumline.rank.sealed_store import SealedStore
from drumline.training.manager import choose_device


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 2)
    assert [choose_device("auto", local_rank=rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(
        PreflightError, match="local rank 2 has no GPU of its own: torch sees 2 on this"
    ):
        choose_device("auto", local_rank=2)
    with_gpus(monkeypatch, 1)
    assert choose_device("auto", local_rank=3).index == 0


def meet(gpus: Sequence[str | None]) -> list[str]:
    """The error of each rank at the rendezvous; empty when there is none."""
    store = SealedStore(dist.HashStore(), None)

    def rank(number: int) -> str:
        topology = Topology(
            rank=number, world_size=len(gpus), local_rank=number, local_world_size=len(gpus)
        )
        try:
            join_rendezvous(store, topology, StartOptions(timeout_s=20), gpu=gpus[number])
        except PreflightError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(rank, range(len(gpus))))


def test_ranks_that_would_share_a_gpu_are_refused_on_all() -> None:
    assert meet(["x", "y", None, None]) == ["", "", "", ""]
    refusals = set(meet(["x", "y", "x"]))
    (text,) = refusals
    assert text.startswith(
        f"ranks 0 and 2 on {socket.gethostname()} would compute on one GPU, x\n  try: start at most"
    )
    assert "--gpus-per-task=1" in text


def test_ranks_may_share_a_gpu_with_an_nccl_hostid_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    gpu = torch.device("cuda", 0)
    assert nccl_gpu(gpu, {}) == "GPU-1"
    hosts = [nccl_gpu(gpu, {"NCCL_HOSTID": name}) for name in ("a", "b", "b")]
    assert meet(hosts[:2]) == ["", ""]
    assert "ranks 1 and 2" in meet(hosts)[0]
