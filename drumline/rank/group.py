"""The process group of a rank, from the rendezvous of ranks to the exit of the process.

There are two timeouts. The start may take as long as the slowest node needs; a collective in
training may not take much longer than a step. So the group is created with the start timeout, and
then gets the train timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from drumline.base.errors import PreflightError, log
from drumline.base.rank_environment import Topology
from drumline.rank.rendezvous.live_nodes import JOIN_S, LiveNodes
from drumline.rank.rendezvous.rank_rendezvous import Rendezvous, StartOptions, join_rendezvous
from drumline.rank.rendezvous.rank_store import open_store
from drumline.rank.rendezvous.reachability import check_reachability
from drumline.rank.sealed_store import SealedStore
from drumline.rank.torch_internals import process_groups, set_group_timeout

QUIET_S = 0.02
LEAVE_S = 30.0
RELEASE_S = 2.0

# NCCL would register the buffers of a collective in a CUDA graph, which all ranks must do for the
# same collective; but a new batch shape, or a failed capture, may happen on one rank only.
NO_REGISTRATION = ("NCCL_GRAPH_REGISTER", "0")
CLOCK_MONOTONIC = 1
SIGEV_THREAD = 2
_left_groups: list[dist.ProcessGroup] = []


def nccl_gpu(device: torch.device, environment: Mapping[str, str]) -> str:
    """NCCL's identity of a rank, which must be unique: the GPU's UUID, and the host that
    NCCL_HOSTID names. Ranks with different host names may share a GPU, as in tests on one GPU."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    host = environment.get("NCCL_HOSTID")
    return uuid if host is None else f"{uuid} (NCCL_HOSTID {host})"


def join_group(
    topology: Topology,
    options: StartOptions,
    *,
    backend: str,
    device: torch.device,
    train_timeout_s: float,
    live: LiveNodes | None = None,
) -> Rendezvous:
    """Collective: join all other ranks. The returned store still works when the group is broken.

    `live`: the nodes, where those that are left continue without a lost one; then raises Redirected
    if they train already.
    """
    if live is not None:
        live.facts = options.facts
        if live.latest.members:
            options = replace(options, timeout_s=JOIN_S)

    store = _store_of(topology, options, live)
    is_nccl = backend == "nccl"
    try:
        rendezvous = join_rendezvous(
            store,
            topology,
            options,
            gpu=nccl_gpu(device, options.environment) if is_nccl else None,
            check=lambda store: None if live is None else live.check_start(store),
        )
        if len(rendezvous.nodes) > 1:
            rendezvous = check_reachability(rendezvous, topology, options, backend=backend)
    except dist.DistError as error:
        raise PreflightError(
            f"not all of the {topology.world_size} ranks continued the start within {options.timeout_s:g} s, or "
            "rank 0, which runs the store, exited",
            next_step="read the other ranks' output",
        ) from error

    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", rendezvous.store.raw),
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=options.timeout_s),
        device_id=device if is_nccl else None,
    )

    # The first collective makes the connections, so it is part of the start.
    dist.all_reduce(torch.zeros(1, device=device if is_nccl else "cpu"))
    set_group_timeout(train_timeout_s)
    if live is not None:
        live.begin(rendezvous)

    return rendezvous


def _store_of(topology: Topology, options: StartOptions, live: LiveNodes | None) -> SealedStore:
    """The store in which this group joins; each of several has a part of it."""
    if live is None:
        return open_store(topology, timeout_s=options.timeout_s)

    store = open_store(topology, timeout_s=options.timeout_s, check=live.check_finished)
    if live.latest.members:
        return store.under(f"group-{live.latest.generation}")
    return store


def make_group(ranks: Sequence[int], *, timeout_s: float) -> dist.ProcessGroup | None:
    """Collective over all ranks: a group of these, until `leave_group`; None on the others."""
    group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
    return group if dist.get_rank() in ranks else None


def leave_group(*, broken: bool = False) -> bool:
    """Destroy the group. A broken one is aborted: waiting for peers that have exited would hang.
    False: it takes longer than `LEAVE_S`, as it does while a CUDA graph with a collective exists.
    An error of torch is raised; for a broken group it is logged."""
    if not dist.is_initialized():
        return True

    groups = process_groups()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    errors: list[Exception] = []

    def destroy() -> None:
        try:
            if gpu is not None:
                torch.cuda.set_device(gpu)
            for group in groups if broken else ():
                with contextlib.suppress(RuntimeError):
                    group.abort()
            dist.destroy_process_group()
        except Exception as error:
            errors.append(error)

    destroying = threading.Thread(target=destroy, name="drumline-leave", daemon=True)
    destroying.start()
    destroying.join(LEAVE_S)

    # gloo's destructor waits for its threads, and may hold the GIL. A thread that has just finished
    # a collective needs the GIL to release a tensor: a deadlock (seen with torch 2.13). So the
    # objects are kept; where groups break and the process continues, until the next one is left,
    # when nothing happens in them any more.
    time.sleep(QUIET_S)
    if broken and _left_groups:
        _release_left_groups()

    _left_groups.extend(groups)
    for error in errors:
        if not broken:
            raise error
        log.warning(f"the broken process group was not destroyed: {type(error).__name__}: {error}")

    return not destroying.is_alive()


def _release_left_groups() -> None:
    """In a thread: each is 3 threads and 5 descriptors. Models that refer to themselves hold them,
    too."""
    groups = list(_left_groups)
    _left_groups.clear()

    def release() -> None:
        gc.collect()
        groups.clear()

    releasing = threading.Thread(target=release, name="drumline-release", daemon=True)
    releasing.start()
    releasing.join(RELEASE_S)


# The exit of the process


def limit_exit(limit_s: float, *, failed: bool) -> None:
    """Limit Python's exit to `limit_s` seconds. After that the process ends with code 1 if `failed`
    or if an exception ended the script, otherwise with 0; a process that exits in time keeps its
    own code."""
    atexit.register(_start_timer, limit_s, failed, os.getpid())


def _start_timer(limit_s: float, failed: bool, pid: int) -> None:
    """Called when Python exits, in the process that asked for it only."""
    if os.getpid() != pid:
        return

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()

    code = int(failed or getattr(sys, "last_value", None) is not None)

    # A timer of the C library, which calls _exit(code) on its own thread: a Python thread would not
    # get the GIL again.
    libc = ctypes.CDLL(None)
    function = ctypes.cast(libc._exit, ctypes.c_void_p).value

    # `struct sigevent` of Linux on 64 bits.
    event = struct.pack("NiiN40x", code, 0, SIGEV_THREAD, function)
    timer = ctypes.c_void_p()

    seconds = int(limit_s)
    if libc.timer_create(CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0:
        once = (ctypes.c_long * 4)(0, 0, seconds, int((limit_s - seconds) * 1e9))
        libc.timer_settime(timer, 0, ctypes.byref(once), None)
