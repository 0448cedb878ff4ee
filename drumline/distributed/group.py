"""How ranks meet and part: the store, a roll call by name, the ways between hosts, the process group, and its end.

Two waits are kept apart. Meeting may take as long as the slowest node needs to start; a collective in training may
not take much longer than a step. So the group is made under the start timeout and then put on the train timeout.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from drumline.distributed.device import nccl_gpu
from drumline.distributed.start.meeting import open_store
from drumline.distributed.start.reach import check_ways
from drumline.distributed.start.roll import call_roll
from drumline.errors import PreflightError
from drumline.launch.node.sealed_store import SealedStore
from drumline.launch.topology import Topology
from drumline.log import log

QUIET_S = 0.02
LEAVE_S = 30.0
# NCCL would register the buffers of a collective in a CUDA graph, which all ranks must then do in the same one; but
# batches of another shape, or a capture that fails, are one rank's own affair.
NO_REGISTRATION = ("NCCL_GRAPH_REGISTER", "0")
_parted: list[dist.ProcessGroup] = []


def join_group(
    topology: Topology,
    *,
    backend: str,
    device: torch.device,
    start_timeout_s: float,
    train_timeout_s: float,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> SealedStore:
    """Collective: meet all other ranks. Returns the store, for what must outlive a broken group.

    `facts`: what all ranks must have in common (`rank_facts`). `environment`: what tells the backend which network to
    take; without it the ways between hosts are not tried.
    """
    deadline = time.monotonic() + start_timeout_s
    store = open_store(topology, timeout_s=start_timeout_s)
    with _explained(topology, start_timeout_s):
        meeting = call_roll(
            store,
            topology,
            deadline=deadline,
            timeout_s=start_timeout_s,
            facts=facts,
            gpu=nccl_gpu(device, environment or {}) if backend == "nccl" else None,
        )
        if environment is not None and len(meeting.hosts) > 1:
            check_ways(meeting, topology, environment, backend=backend, deadline=deadline)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", meeting.store.raw),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=start_timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    # The first collective makes the connections, so it still belongs to the start.
    dist.all_reduce(torch.zeros(1, device=device if backend == "nccl" else "cpu"))
    # Public from torch 2.15 on, where the private name prints a warning.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=train_timeout_s))
    return meeting.store


def leave_group(*, broken: bool = False) -> bool:
    """Destroy the group. A broken one is aborted: waiting for peers that have exited would be a hang of our own. False:
    that takes longer than `LEAVE_S`, as it does while a CUDA graph with a collective in it exists. An error of torch is
    raised; of a broken group it is logged."""
    if not dist.is_initialized():
        return True
    group = dist.distributed_c10d._get_default_group()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    errors: list[Exception] = []

    def destroy() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            if broken:
                with contextlib.suppress(RuntimeError):
                    group.abort()
            dist.destroy_process_group()
        except Exception as error:
            errors.append(error)

    destroying = threading.Thread(target=destroy, name="drumline-leave", daemon=True)
    destroying.start()
    destroying.join(LEAVE_S)
    # gloo's destructor waits for its threads while it holds Python's lock. A thread that has just finished the last
    # collective needs that lock to let go of a tensor, and then neither ends (seen with torch 2.13). So the threads get
    # a moment, and the group outlives everything that could still be in the way.
    time.sleep(QUIET_S)
    _parted.append(group)
    for error in errors:
        if not broken:
            raise error
        log.warning(f"the broken process group was not destroyed: {type(error).__name__}: {error}")
    return not destroying.is_alive()


def collective_counter() -> Callable[[], int]:
    """What tells how many collectives this rank has begun in the group of all ranks; without a group, 0. It is private
    to torch, and kept behind this function; to be asked for once, since to find it takes longer than to call it."""
    count: Callable[[], int] = lambda: 0  # noqa: E731
    if dist.is_initialized():
        count = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group  # type: ignore[attr-defined]
    return count


@contextlib.contextmanager
def _explained(topology: Topology, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except dist.DistStoreError as error:
        what = f"not all of the {topology.world_size} ranks went on with the start within {timeout_s:g} s"
        raise PreflightError(what, next_step="look at the other ranks' own output") from error
    except dist.DistError as error:
        what = (
            f"rank 0, which runs the meeting point, ended before all {topology.world_size} ranks were there"
        )
        raise PreflightError(what, next_step="look at rank 0's own output") from error
