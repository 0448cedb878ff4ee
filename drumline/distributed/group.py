"""How ranks meet and part: the store, a roll call by name, the process group, and its end.

Two waits are kept apart. Meeting may take as long as the slowest node needs to start; a collective in training may
not take much longer than a step. So the group is made under the start timeout and then put on the train timeout.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from drumline.distributed.device import gpu_uuid
from drumline.errors import PreflightError
from drumline.launch.addresses import LOOPBACK
from drumline.launch.sockets import listen_on_loopback
from drumline.launch.topology import Topology

POLL_S = 0.05
QUIET_S = 0.02
_parted: list[dist.ProcessGroup] = []


def join_group(
    topology: Topology, *, backend: str, device: torch.device, start_timeout_s: float, train_timeout_s: float
) -> dist.Store:
    """Collective: meet all other ranks. Returns the store, for what must outlive a broken group."""
    deadline = time.monotonic() + start_timeout_s
    store = open_store(topology, timeout_s=start_timeout_s)
    claim_gpu(store, topology, gpu_uuid(device))
    call_roll(store, topology, deadline=deadline, timeout_s=start_timeout_s)
    refuse_shared_gpu(store)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=start_timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    # The first collective makes the connections, so it still belongs to the start.
    dist.all_reduce(torch.zeros(1, device=device if backend == "nccl" else "cpu"))
    _set_pg_timeout(timedelta(seconds=train_timeout_s))
    return store


def leave_group(*, broken: bool = False) -> None:
    """End the group. A broken one is aborted: waiting for peers that are gone would be a hang of our own."""
    if not dist.is_initialized():
        return
    group = dist.distributed_c10d._get_default_group()
    if broken:
        with contextlib.suppress(RuntimeError):
            group.abort()
    dist.destroy_process_group()
    # gloo's destructor waits for its threads while it holds Python's lock. A thread that has just finished the last
    # collective needs that lock to let go of a tensor, and then neither ends (seen with torch 2.13). So the threads get
    # a moment, and the group outlives everything that could still be in the way.
    time.sleep(QUIET_S)
    _parted.append(group)


def open_store(topology: Topology, *, timeout_s: float) -> dist.Store:
    """Connect to the store that torchrun's agent or rank 0 runs."""
    hosts_store = topology.rank == 0 and not topology.agent_hosts_store
    address = f"{topology.master_addr}:{topology.master_port}"
    try:
        store = dist.TCPStore(
            topology.master_addr,
            topology.master_port,
            is_master=hosts_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=_own_listener(topology) if hosts_store else None,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        if hosts_store:
            what = f"rank 0 could not open its meeting point {address}: {_first_line(error)}"
            next_step = "choose another MASTER_PORT, and a MASTER_ADDR that is this host"
        else:
            what = f"rank {topology.rank} could not reach rank 0's meeting point {address} within {timeout_s:g} s"
            next_step = (
                "check that rank 0 runs, that MASTER_ADDR is its host, and that no firewall closes the port"
            )
        raise PreflightError(what, next_step=next_step) from error
    return dist.PrefixStore(f"drumline/{topology.attempt}", store)


def _own_listener(topology: Topology) -> int | None:
    """Ranks that meet on the loopback are all on this machine: the store need not be open to others, as it would be."""
    if topology.master_addr not in (LOOPBACK, "localhost"):
        return None
    return listen_on_loopback(topology.master_port)[0]


def call_roll(store: dist.Store, topology: Topology, *, deadline: float, timeout_s: float) -> None:
    """Collective: wait until every rank has said its name, and name the ones that have not."""
    store.set(f"roll/{topology.rank}", topology.host)
    missing = [rank for rank in range(topology.world_size) if rank != topology.rank]
    with _explained(
        f"rank 0, which runs the meeting point, ended before all {topology.world_size} ranks were there"
    ):
        while missing := [rank for rank in missing if not store.check([f"roll/{rank}"])]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        if not missing:
            return
        hosts = {
            rank: store.get(f"roll/{rank}").decode()
            for rank in range(topology.world_size)
            if rank not in missing
        }
    raise PreflightError(
        f"{len(missing)} of {topology.world_size} ranks did not start within {timeout_s:g} s: "
        f"missing {', '.join(map(str, missing))}; here: {', '.join(f'{rank} on {hosts[rank]}' for rank in hosts)}",
        next_step="look at the missing ranks' own output; raise --dist.start_timeout_s if they are only slow",
    )


def claim_gpu(store: dist.Store, topology: Topology, uuid: str | None) -> None:
    """Before the roll call: whoever comes second to a GPU leaves word of it, so that all know once all were called."""
    if uuid is not None and topology.local_world_size > 1 and store.add(f"gpu/{uuid}", 1) > 1:
        store.set("shared-gpu", f"{uuid} of {topology.host}")


def refuse_shared_gpu(store: dist.Store) -> None:
    """Collective, after the roll call: two ranks on one GPU would wait for each other in NCCL."""
    if store.check(["shared-gpu"]):
        raise PreflightError(
            f"two ranks or more would compute on one GPU: {store.get('shared-gpu').decode()}",
            next_step="start at most as many ranks on a host as it has GPUs; with srun, give each task its own "
            "(--gpus-per-task=1) or all of them (--gpus-per-node); or use --dist.device cpu",
        )


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise PreflightError(what, next_step="look at rank 0's own output") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
