"""What ranks compare before the first step, on real ranks: the value of each is in the error, on
all of them."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from drumline import DDPManager
from drumline.base.errors import PreflightError
from drumline.base.rank_environment import Topology, topology_from
from drumline.rank.rendezvous.rank_rendezvous import StartOptions, join_rendezvous
from drumline.rank.rendezvous.rank_store import open_store
from drumline.watch import watch_folder
from tests.ranks import free_port, run_ranks

HOST = socket.gethostname()


def on_rank_1(this: Any, that: Any) -> Any:
    return this if os.environ["RANK"] == "1" else that


def load_own_module(folder: Path, name: str, text: str) -> None:
    """As a user's code that lies in another place on each node."""
    place = folder / os.environ["RANK"]
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.py").write_text(text)
    sys.path.insert(0, str(place))
    importlib.import_module(name)


def refused(ddp: DDPManager, folder: Path) -> str:
    watch_folder.MEMORY = folder / "shm"
    with pytest.raises(PreflightError) as caught:
        ddp.setup()
    return str(caught.value)


def with_other_settings(folder: Path) -> str:
    settings = {
        "optim": {"lr": on_rank_1(0.2, 0.1)},
        "loss": nn.CrossEntropyLoss(),
        "where": object(),
    }
    return refused(DDPManager(settings=settings), folder)


def with_other_versions(folder: Path) -> str:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = on_rank_1("DETAIL", "OFF")
    torch.__version__ = on_rank_1("2.11.0", torch.__version__)
    return refused(DDPManager(seed=on_rank_1(8, 7)), folder)


def with_other_code(folder: Path) -> str:
    load_own_module(folder, "a_module_of_ours", f"size = {on_rank_1(2, 1)}")
    return refused(DDPManager(), folder)


def test_settings_versions_and_code_are_compared_with_the_value_of_each_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "shm").mkdir()
    texts = []
    for differ in (with_other_settings, with_other_versions, with_other_code):
        first, second = run_ranks(2, differ, tmp_path)
        assert first == second
        texts.append(first)
    settings, versions, code = texts
    assert settings == (
        f"ranks differ in the setting optim.lr: rank 0 ({HOST}): 0.1; rank 1 ({HOST}): 0.2\n"
        "  try: start every rank with the same command and settings"
    )
    lines = versions.splitlines()
    assert lines[0] == "ranks differ in 3 things:"
    assert lines[1].startswith(f"  - torch's version: rank 0 ({HOST}): ")
    assert lines[1].endswith(f"; rank 1 ({HOST}): 2.11.0")
    assert (
        lines[2]
        == f"  - the variable TORCH_DISTRIBUTED_DEBUG: rank 0 ({HOST}): OFF; rank 1 ({HOST}): DETAIL"
    )
    assert lines[3] == f"  - the seed: rank 0 ({HOST}): 7; rank 1 ({HOST}): 8"
    assert (
        "try: install the same versions on every node; set the same environment variables on"
        in lines[4]
    )
    assert code.startswith(f"ranks differ in the code of a_module_of_ours: rank 0 ({HOST}): ")
    assert "try: use the same code on every node: the same commit" in code
    assert list((tmp_path / "shm").iterdir()) == [], "the watch folder is removed"


def run_alike(folder: Path) -> list[str]:
    """What may differ: where the code lies, what rank 0 alone has loaded, a variable of no
    weight."""
    load_own_module(folder, "a_module_of_ours", "size = 1")
    if os.environ["RANK"] == "0":
        load_own_module(folder, "for_rank_0_alone", "size = 2")
    os.environ["NCCL_DEBUG"] = on_rank_1("INFO", "WARN")
    texts = []
    with DDPManager(device="cpu", settings={"lr": 0.1}) as ddp:
        lengths = 10 + ddp.rank
        for train in (True, False):
            with pytest.raises(PreflightError) as caught:
                ddp.loader(TensorDataset(torch.ones(lengths, 2)), batch_size=4, train=train)
            texts.append(str(caught.value))
        with pytest.raises(PreflightError) as caught:
            ddp.loader(TensorDataset(torch.full((10, 2), ddp.rank)), batch_size=4)
        texts.append(str(caught.value))
        ddp.loader(TensorDataset(torch.ones(lengths, 2)), batch_size=4, compare=False)
        ddp.loader(TensorDataset(torch.ones(10, 2)), batch_size=4)
    # once more, in the same process
    with DDPManager(device="cpu", settings={"limit": float("nan")}) as ddp:
        ddp.barrier()
    return texts


def test_a_dataset_that_differs_is_refused_and_what_may_differ_is_not(tmp_path: Path) -> None:
    first, second = run_ranks(2, run_alike, tmp_path)
    assert first == second
    training, evaluation, content = first
    assert training.startswith(f"ranks differ in the training data: rank 0 ({HOST}): 10 samples, ")
    assert f"; rank 1 ({HOST}): 11 samples, " in training
    assert (
        "try: give every rank the same dataset; if they are meant to differ, loader(..., compare=F"
        in training
    )
    assert evaluation.startswith("ranks differ in the evaluation data: ")
    assert content.count("10 samples") == 2


def meet(topology: Topology, *, timeout_s: float = 20.0) -> Any:
    store = open_store(topology, timeout_s=timeout_s)
    return join_rendezvous(store, topology, StartOptions(timeout_s=timeout_s))


def meet_again(agent_port: int) -> str:
    """Three starts in the store of an agent that outlives them; in the last, rank 0 does not
    come."""
    environment = {
        **os.environ,
        "MASTER_PORT": str(agent_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # agents of one job count restarts apart
    environment["TORCHELASTIC_RESTART_COUNT"] = os.environ["RANK"]
    topology = topology_from(environment)
    assert topology is not None
    for start in range(2):
        if topology.rank == 0:
            # the other one is there first, and finds the meeting before
            time.sleep(0.5 * start)
        meeting = meet(topology)
        assert not meeting.store.check(["left behind"])
        meeting.store.add("done", 1)
        while meeting.store.add("done", 0) < 2:
            time.sleep(0.01)
        if topology.rank == 0:
            meeting.store.set("left behind", str(start))
    if topology.rank == 0:
        return ""
    with pytest.raises(PreflightError) as caught:
        meet(topology, timeout_s=1.0)
    return str(caught.value)


def test_a_start_never_takes_what_an_earlier_one_left_in_the_store() -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert run_ranks(2, meet_again, port)[1] == (
        f"there are two ranks 1: one on {HOST}, and this one on {HOST}\n"
        "  try: give every node its own --node-rank (NODE_RANK), and every rank its own RANK; stop what is left of an "
        "earlier start"
    )
    del agent


class Elsewhere(Topology):
    """The same machine under the name of another host."""

    @property
    def host(self) -> str:
        return "node-c"


def come_twice(agent_port: int) -> str:
    rank = int(os.environ["RANK"])
    shared = {
        "world_size": 2,
        "master_addr": "127.0.0.1",
        "master_port": agent_port,
        "agent_hosts_store": True,
    }
    others = {
        0: Topology(rank=0, **shared),
        1: Topology(rank=1, **shared),
        2: Elsewhere(rank=1, **shared),
    }
    if rank == 2:
        watch = open_store(others[2], timeout_s=20)
        while not watch.check(["rendezvous"]) or not watch.check(
            [f"{json.loads(watch.get('rendezvous'))['namespace']}/decision/joined"]
        ):
            time.sleep(0.01)
    if rank < 2:
        meet(others[rank])
        return ""
    with pytest.raises(PreflightError) as caught:
        meet(others[rank], timeout_s=1.0)
    return str(caught.value)


def test_a_first_rank_that_never_joins_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    place = {"master_addr": "127.0.0.1", "master_port": port, "agent_hosts_store": True}
    with pytest.raises(PreflightError) as caught:
        meet(Topology(rank=2, world_size=4, local_world_size=2, **place), timeout_s=0.5)
    assert str(caught.value) == (
        "rank 0 (node 0), which opens the rendezvous, did not start within 0.5 s\n"
        "  try: look at rank 0's own output; raise --dist.start_timeout_s if it is only slow"
    )
    assert (
        f"drumline: rank 2 on {HOST} waits for rank 0 (node 0) (0 s of 0.5 s)\n"
        in capfd.readouterr().err
    )
    del agent


def lead_twice(agent_port: int) -> str:
    """Two first ranks; each has a second that never comes, so both wait."""
    topology = Elsewhere if os.environ["RANK"] == "1" else Topology
    one = topology(
        world_size=2, master_addr="127.0.0.1", master_port=agent_port, agent_hosts_store=True
    )
    store = open_store(one, timeout_s=20)
    while os.environ["RANK"] == "1" and not store.check(["rendezvous"]):
        time.sleep(0.01)
    with pytest.raises(PreflightError) as caught:
        join_rendezvous(store, one, StartOptions(timeout_s=3))
    return str(caught.value)


def test_two_first_ranks_are_named() -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert (
        f"there are two ranks 0: one on node-c, and this one on {HOST}\n"
        in run_ranks(2, lead_twice, port)[0]
    )
    del agent


def meet_with_another_size() -> str:
    given = topology_from(os.environ)
    assert given is not None
    size = on_rank_1(3, 2)
    topology = Topology(
        rank=given.rank, world_size=size, master_addr="127.0.0.1", master_port=given.master_port
    )
    try:
        meeting = meet(topology)
    except PreflightError as error:
        store = open_store(topology, timeout_s=20)
        store.under(json.loads(store.get("rendezvous"))["namespace"]).raw.set("heard", "")
        return str(error)
    meeting.store.raw.wait(["heard"])  # rank 0 runs the store
    return ""


def test_a_rank_that_is_there_twice_or_counts_otherwise_is_named() -> None:
    port = free_port()
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert run_ranks(3, come_twice, port)[2] == (
        f"there are two ranks 1: one on {HOST}, and this one on node-c\n"
        "  try: give every node its own --node-rank (NODE_RANK), and every rank its own RANK; stop what is left of an "
        "earlier start"
    )
    del agent
    assert run_ranks(2, meet_with_another_size)[1] == (
        f"the world size differs across ranks: 2 on rank 0, 3 on rank 1 on {HOST}\n"
        "  try: start every node with the same number of nodes and ranks"
    )
