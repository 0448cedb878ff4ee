"""Ranks as sidecars observe them: by default eight on two nodes, at step 812."""

from __future__ import annotations

from typing import Any

from drumline.watch.cluster_state import (
    ClusterState,
    Collective,
    LostNode,
    NodeState,
    RankState,
    WorkerState,
)
from drumline.watch.heartbeat import Phase

TORCH = "/venv/lib/python3.11/site-packages/torch"
IN_BACKWARD = (
    f"{TORCH}/autograd/graph.py:865 in _engine_run_backward",
    f"{TORCH}/autograd/__init__.py:354 in backward",
    "/venv/lib/python3.11/site-packages/drumline/training/steps/eager.py:88 in _backward",
    "/home/me/job/train.py:12 in main",
)
IN_ALL_REDUCE = (
    f"{TORCH}/distributed/distributed_c10d.py:2991 in all_reduce",
    f"{TORCH}/distributed/c10d_logger.py:83 in wrapper",
    "/home/me/job/train.py:31 in training_step",
)
IN_QUEUE = (
    "/usr/lib/python3.11/selectors.py:415 in select",
    "/usr/lib/python3.11/multiprocessing/connection.py:930 in wait",
    f"{TORCH}/utils/data/dataloader.py:1284 in _try_get_data",
    "/venv/lib/python3.11/site-packages/drumline/training/loop.py:70 in train",
)
WORKER_IDLE = (
    "/usr/lib/python3.11/multiprocessing/connection.py:930 in wait",
    "/usr/lib/python3.11/multiprocessing/queues.py:113 in get",
    f"{TORCH}/utils/data/_utils/worker.py:275 in _worker_loop",
    "/usr/lib/python3.11/multiprocessing/process.py:108 in run",
    "/home/me/job/train.py:50 in <module>",
)
WORKER_IN_SAMPLE = (
    "/usr/lib/python3.11/socket.py:706 in readinto",
    "/home/me/job/data/images.py:31 in __getitem__",
    f"{TORCH}/utils/data/_utils/fetch.py:54 in fetch",
    *WORKER_IDLE[2:],
)
CLOSED = "RuntimeError: [/pytorch/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4391"


def reduced(
    number: int = 4410, size: int = 77290, *, is_done: bool = False, op: str = "all_reduce"
) -> Collective:
    return Collective(group="default_pg", number=number, op=op, sizes=((size,),), is_done=is_done)


def recorded(last: int, *, waits: bool, size: int = 77290) -> tuple[Collective, ...]:
    """A flight recorder: a bucket and a loss in turn up to `last`, which it is in still, or not."""
    numbers = range(last - 5, last + 1)
    return tuple(
        reduced(number, size if number % 2 == 0 else 1, is_done=number < last or not waits)
        for number in numbers
    )


def blocked_rank(rank: int, *, on: int = 4410, **changes: Any) -> RankState:
    """A rank that waits in its backward pass."""
    usual: dict[str, Any] = {
        "phase": Phase.BACKWARD,
        "stack": IN_BACKWARD,
        "collectives": recorded(on, waits=True),
        "answers": True,
    }
    return rank_state(rank, **{**usual, **changes})


def late_rank(rank: int, phase: Phase, **changes: Any) -> RankState:
    """A rank that did not enter the collective that the others are blocked in."""
    usual: dict[str, Any] = {
        "phase": phase,
        "collectives": recorded(4409, waits=False),
        "answers": True,
    }
    return rank_state(rank, **{**usual, **changes})


def rank_state(rank: int, **changes: Any) -> RankState:
    usual: dict[str, Any] = {
        "rank": rank,
        "host": "node-a" if rank < 4 else "node-b",
        "pid": 4700 + rank,
        "step": 812,
        "micro": 1
        if changes.get("phase") in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
        else 0,
        "num_marks": 4000,
        "age_s": 4.0,
        "state_s": 4.0,
    }
    return RankState(**{**usual, **changes})


def worker(
    number: int, state: str = "S", stack: tuple[str, ...] = WORKER_IDLE, **changes: Any
) -> WorkerState:
    return WorkerState(number=number, pid=5000 + number, state=state, stack=stack, **changes)


def cluster(
    *odd: RankState, world_size: int = 8, lost: tuple[LostNode, ...] = (), **nodes: Any
) -> ClusterState:
    """The run with these ranks, and all others waiting. `nodes`: changes of node_0, node_1, ...
    ."""
    ranks = {rank: blocked_rank(rank) for rank in range(world_size)} | {
        rank.rank: rank for rank in odd
    }
    away = {number for host in lost for number in host.ranks}
    hosts: dict[str, list[RankState]] = {}
    for number, rank in sorted(ranks.items()):
        if number not in away:
            hosts.setdefault(rank.host, []).append(rank)
    found = [
        NodeState(node="abcdef".index(host[-1]), host=host, ranks=tuple(there))
        for host, there in hosts.items()
    ]
    changed = (NodeState(**{**vars(node), **nodes.get(f"node_{node.node}", {})}) for node in found)
    return ClusterState(me=0, nodes=tuple(changed), lost=lost)
