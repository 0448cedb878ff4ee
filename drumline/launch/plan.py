"""From what the user said about *where* to the nodes of a job, each with what its ranks run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from drumline.launch.env_file import NodeSettings
from drumline.launch.hosts import Host
from drumline.launch.torchrun import Node, Program

TASK_RESTARTS = 3
SCRIPT_RESTARTS = 0


def default_restarts(*, is_task: bool, may_shrink: bool = False) -> int:
    """A task goes on from its newest checkpoint; whether a script can do that is not known here, and one that cannot
    would train anew each time, over what it had written. Who lets a job go on with fewer nodes says that it can."""
    return TASK_RESTARTS if is_task or may_shrink else SCRIPT_RESTARTS


def node_from_settings(
    settings: NodeSettings, *, max_restarts: int, min_nodes: int | None = None, address: str | None = None
) -> Node:
    """This machine, as its .env file or the flags describe it."""
    return Node(
        min_nodes=min_nodes or settings.min_nodes,
        num_nodes=settings.num_nodes,
        node_rank=settings.node_rank,
        num_procs=settings.num_procs,
        endpoint=f"{settings.master_addr}:{settings.master_port}",
        # The others reach the first node by this name; what it calls itself may lead back to its own loopback.
        address=address or (settings.master_addr if settings.node_rank == 0 else None),
        max_restarts=max_restarts,
    )


def nodes_of_hosts(
    hosts: Sequence[Host],
    *,
    num_procs: int | None,
    port: int,
    max_restarts: int,
    min_nodes: int | None = None,
    job: str = "",
) -> list[Node]:
    """A node for each host; they meet at the first."""
    return [
        Node(
            num_nodes=len(hosts),
            node_rank=rank,
            num_procs=host.slots or num_procs,
            endpoint=f"{hosts[0].address}:{port}",
            address=host.address,
            max_restarts=max_restarts,
            min_nodes=min_nodes,
            peers=tuple(one.address for one in hosts),
            job=job,
        )
        for rank, host in enumerate(hosts)
    ]


def task_program(task: str, arguments: Sequence[str], *defaults: tuple[str, str | None]) -> Program:
    """`drumline train TASK`, with each default (a flag and its value) that the user did not give otherwise."""
    added = []
    for flag, value in defaults:
        given = any(word == flag or word.startswith(f"{flag}=") for word in arguments)
        if value is not None and not given:
            added += [flag, value]
    return Program(("train", task, *arguments, *added), is_task=True)


def settings_defaults(settings: NodeSettings, run_name: str) -> list[tuple[str, str | None]]:
    """What a .env file says, as flags of `drumline train`."""
    timeout, output = settings.timeout_s, settings.output_dir
    return [
        ("--dist.train_timeout_s", None if timeout is None else str(timeout)),
        ("--data.dir", settings.dataset_dir),
        ("--run", None if output is None else str(PurePosixPath(output) / run_name)),
    ]
