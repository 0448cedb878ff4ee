"""How ranks join, communicate and compare, on real groups."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drumline.base.errors import PreflightError
from drumline.base.rank_environment import Topology, topology_from
from drumline.rank import collectives, determinism, group
from drumline.rank.rendezvous.rank_rendezvous import StartOptions
from tests.ports import listening_addresses
from tests.ranks import RanksFailed, free_port, run_ranks

CPU = torch.device("cpu")


def join() -> Topology:
    topology = topology_from(os.environ)
    assert topology is not None
    start = StartOptions(timeout_s=30)
    group.join_group(topology, start, backend="gloo", device=CPU, train_timeout_s=20)
    return topology


def talk() -> tuple[object, ...]:
    topology = join()
    rank = topology.rank
    count = collectives.collective_counter()
    before = count()
    values = collectives.gather_json({"rank": rank, "text": "é" * rank})
    chosen = collectives.broadcast_json(["from", rank])
    sent = {
        "a": torch.tensor(2.5),
        "b": torch.arange(4).bool(),
        "c": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    got = collectives.broadcast_tensors(sent if rank == 0 else None)
    same = all(
        torch.equal(got[name], sent[name]) and got[name].dtype == sent[name].dtype for name in sent
    )
    total = collectives.all_sum(torch.tensor([rank + 1.0]))
    has_sent = count() > before
    timeout = dist.distributed_c10d._get_default_group()._get_backend(CPU).options._timeout
    group.leave_group()
    return values, chosen, same, list(got), float(total), has_sent, timeout


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_talk_without_pickle(world_size: int) -> None:
    for values, chosen, same, names, total, has_sent, timeout in run_ranks(world_size, talk):
        assert values == [{"rank": rank, "text": "é" * rank} for rank in range(world_size)]
        assert chosen == ["from", 0]
        assert same
        assert names == ["a", "b", "c"]
        assert total == sum(range(1, world_size + 1))
        assert has_sent == (world_size > 1), "a group of one has nobody to send to"
        assert timeout == timedelta(seconds=20), "training runs under its own timeout"


def gather_unequal() -> tuple[list[list[int]], int]:
    """What rank 0 gathers from ranks with 5, 0 and 12 bytes, in pieces of 4; and how many bytes
    this rank has sent."""
    topology = join()
    collectives.PIECE_BYTES = 4
    sent = 0
    send = dist.all_to_all_single

    def counted(output: torch.Tensor, input: torch.Tensor, *splits: list[int]) -> object:
        nonlocal sent
        sent += input.nbytes
        return send(output, input, *splits)

    dist.all_to_all_single = counted
    sizes = [5, 0, 12]
    content = torch.arange(sizes[topology.rank], dtype=torch.uint8) + 100 * topology.rank
    gathered = collectives.gather_on_main(content, sizes)
    group.leave_group()
    return [one.tolist() for one in gathered], sent


def test_a_rank_sends_rank_0_what_it_has_and_no_padding() -> None:
    (gathered, first), (nothing, second), (_, third) = run_ranks(3, gather_unequal)
    assert gathered == [list(range(5)), [], [200 + number for number in range(12)]]
    assert (nothing, [first, second, third]) == ([], [5, 0, 12])


def change_groups() -> list[list[int]]:
    """The threads and descriptors of this rank after each of some groups, as when nodes are lost
    and join again."""
    topology = topology_from(os.environ)
    counts = []
    assert topology is not None
    store = group.open_store(topology, timeout_s=30)
    for number in range(6):
        prefix = dist.PrefixStore(str(number), store.raw)
        dist.init_process_group(
            "gloo", store=prefix, rank=topology.rank, world_size=2, timeout=timedelta(seconds=30)
        )
        other = group.make_group([0, 1], timeout_s=30)
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3), process_group=other)
        model(torch.ones(2, 3)).sum().backward()
        store.set(f"{number}/{topology.rank}", "done")
        store.wait([f"{number}/{rank}" for rank in range(2)])
        group.leave_group(broken=True)
        counts.append([len([*Path(f"/proc/self/{what}").iterdir()]) for what in ("task", "fd")])
    return counts


def test_groups_that_were_left_are_released() -> None:
    for counts in run_ranks(2, change_groups):
        grown = [last - early for last, early in zip(counts[-1], counts[1], strict=True)]
        # two groups have 6 threads and 10 descriptors, and four pairs of them were left
        assert max(grown) < 15, counts


def leave_two_groups() -> int:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group.leave_group()
    return len(group._left_groups)


def test_groups_that_end_well_are_kept() -> None:
    """Their release would collect all garbage."""
    assert run_ranks(1, leave_two_groups) == [2]


def test_with_no_group_collectives_act_on_one_rank() -> None:
    assert collectives.gather_json(5) == [5]
    assert collectives.broadcast_json("x") == "x"
    assert collectives.broadcast_tensors({"a": torch.ones(1)}) == {"a": torch.ones(1)}
    assert collectives.all_sum(torch.tensor(3.0)) == 3.0


def differ() -> str:
    topology = join()
    try:
        collectives.check_same(
            {"torch": 1, "config": {"lr": 0.1 * (topology.rank == 1)}}, host="h", next_step="look"
        )
    except PreflightError as error:
        return str(error)
    return "no error"


def test_a_difference_lists_the_value_per_rank() -> None:
    for message in run_ranks(3, differ):
        assert (
            message
            == "ranks differ in config: ranks 0, 2 (h): {'lr': 0.0}; rank 1 (h): {'lr': 0.1}\n  try: look"
        )


def weights_differ(where: str) -> str:
    topology = join()
    determinism.seed_shared(7)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        if where == "bit" and topology.rank == 2:
            model[0].bias.view(torch.int32)[1] ^= 1
        if where == "buffer" and topology.rank == 1:
            model[1].running_var.mul_(2)
    if where == "shape" and topology.rank == 1:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    try:
        collectives.check_same_weights(model, host=f"node-{topology.rank}", device=CPU)
    except PreflightError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("nowhere", "no error"),
        ("bit", "first difference in 0.bias: ranks 0, 1 (node-0 and node-1): "),
        ("buffer", "first difference in 1.running_var: ranks 0, 2 (node-0 and node-2): "),
        ("shape", "first difference in 0.weight: ranks 0, 2 (node-0 and node-2): [3, 3] "),
    ],
)
def test_different_initial_weights_are_found_and_named(where: str, expected: str) -> None:
    for message in run_ranks(3, weights_differ, where):
        assert expected in message


def draw() -> tuple[float, float, float]:
    rank = int(os.environ["RANK"])
    determinism.seed_shared(11)
    shared = float(torch.rand(()))
    determinism.seed_rank(11, rank)
    own = float(torch.rand(()))
    determinism.seed_rank(11, rank)
    return shared, own, float(torch.rand(()))


def test_one_seed_is_shared_first_and_each_ranks_own_after() -> None:
    shared, own, again = zip(*run_ranks(3, draw), strict=True)
    assert len(set(shared)) == 1
    assert len(set(own)) == 3
    assert own == again


def come_late() -> str:
    topology = topology_from(os.environ)
    assert topology is not None
    if topology.rank == 2:
        return "never"
    start = StartOptions(timeout_s=1 + 2 * topology.rank)
    with pytest.raises(PreflightError) as caught:
        group.join_group(topology, start, backend="gloo", device=CPU, train_timeout_s=5)
    return str(caught.value)


def test_ranks_that_never_start_are_named_on_every_rank() -> None:
    first, second, _ = run_ranks(3, come_late)
    assert "1 of 3 ranks did not start within 1 s: missing rank 2; here: 0, 1 on " in first
    assert "raise --dist.start_timeout_s if they are only slow" in first
    assert second == first


def lose_rank_0() -> str:
    topology = topology_from(os.environ)
    assert topology is not None
    store = group.open_store(topology, timeout_s=20)
    if topology.rank == 0:
        store.wait(["connected"], timedelta(seconds=20))
        return "gone"
    store.set("connected", "")
    pytest.MonkeyPatch().setattr(group, "open_store", lambda *_, **__: store)
    start = StartOptions(timeout_s=20)
    with pytest.raises(PreflightError) as caught:
        group.join_group(topology, start, backend="gloo", device=CPU, train_timeout_s=5)
    return str(caught.value)


def test_a_store_that_goes_away_is_named() -> None:
    assert run_ranks(2, lose_rank_0)[1] == (
        "not all of the 2 ranks continued the start within 20 s, or rank 0, which runs the store, exited\n"
        "  try: read the other ranks' output"
    )


def test_a_store_that_nobody_runs_is_named() -> None:
    port = free_port()
    topology = Topology(rank=1, world_size=2, master_addr="127.0.0.1", master_port=port)
    with pytest.raises(
        PreflightError,
        match=rf"rank 1 on .* could not reach rank 0's store 127.0.0.1:{port} within 1 s: connection refused",
    ):
        group.open_store(topology, timeout_s=1)


def test_a_store_that_is_taken_is_named() -> None:
    with (
        dist_listener() as port,
        pytest.raises(PreflightError, match=rf"could not open its store 127.0.0.1:{port}"),
    ):
        group.open_store(
            Topology(world_size=2, master_addr="127.0.0.1", master_port=port), timeout_s=1
        )


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_store_on_the_loopback_is_not_open_to_the_network(address: str) -> None:
    port = free_port()
    store = group.open_store(
        Topology(world_size=2, master_addr=address, master_port=port), timeout_s=5
    )
    store.set("word", "heard")
    assert listening_addresses(port) == {"127.0.0.1"}
    other = group.open_store(
        Topology(rank=1, world_size=2, master_addr=address, master_port=port), timeout_s=5
    )
    assert other.get("word") == b"heard"


def dist_listener():  # type: ignore[no-untyped-def]
    import contextlib
    import socket

    @contextlib.contextmanager
    def listen():  # type: ignore[no-untyped-def]
        with socket.socket(socket.AF_INET6) as taken:
            taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            taken.bind(("::", 0))
            taken.listen()
            yield taken.getsockname()[1]

    return listen()


def fail_on_one_rank() -> None:
    topology = join()
    if topology.rank == 1:
        raise ValueError("boom")
    dist.barrier()


def test_the_harness_reports_ranks_that_raise() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, fail_on_one_rank)
    assert "ValueError: boom" in caught.value.errors[1]
