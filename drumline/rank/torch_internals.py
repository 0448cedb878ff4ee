"""The private names of torch that Drumline uses, one function for each.

A new version of torch may change them without notice. Each function says why the public interface
is not enough and what breaks without the name; tests/unit/rank/test_torch_internals.py fails when
one of them is gone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.data import dataloader

# Process groups


def set_group_timeout(timeout_s: float, group: dist.ProcessGroup | None = None) -> None:
    """How long a collective of this group, by default that of all ranks, may take. Public from
    torch 2.15 on, where the private name prints a warning. Without it collectives in training would
    have the longer timeout of the start."""
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=timeout_s), group)


def sequence_number_of(group: dist.ProcessGroup) -> Callable[[], int]:
    """A function that counts the collectives of a group; torch shows this number nowhere else.
    Without it a diagnosis cannot say which collective a rank is blocked in."""
    count: Callable[[], int] = group._get_sequence_number_for_group  # type: ignore[attr-defined]
    return count


def raise_group_timeouts(timeout: timedelta) -> None:
    """Let no collective of any group that begins from now on time out earlier: a script makes
    groups of its own, and torch lists them nowhere else. Without it torch ends a script before the
    watchdog names the rank that it waits for."""
    for group in process_groups():
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend.options._timeout < timeout:
                backend._set_default_timeout(timeout)


def uses_gloo() -> bool:
    """Whether any group does, also one of a script's. Without it the end of a profile cannot know
    whether threads of gloo still write into its memory."""
    return any("gloo" in dist.get_backend_config(group) for group in process_groups())


def process_groups() -> list[Any]:
    """All that this rank is in, also those of a mesh. Without it the threads of a broken group
    keep a rank from leaving it."""
    return list(dist.distributed_c10d._world.pg_map)


def recorded_collectives() -> list[dict[str, Any]]:
    """The latest collectives, oldest first: NCCL has a recorder of its own, the other one has
    gloo's. Without them a diagnosis does not say which collective each rank is in."""
    functions: Any = torch._C._distributed_c10d
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    recorders = [getattr(functions, name) for name in names if hasattr(functions, name)]
    dumps = [json.loads(dump(True, False)) for dump in recorders]

    return [entry for dump in dumps for entry in dump.get("entries", [])]


# Models


def is_batchnorm(module: nn.Module) -> bool:
    """The base class of all BatchNorm layers, also of those in other packages, has no public name.
    Without it there is no warning about small batches."""
    return isinstance(module, _BatchNorm)


def live_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The module's own buffers, not a copy: reading an attribute of a module takes several times
    longer, and these are read in every step. Without it buffers are not sent to other ranks."""
    return module._buffers


def live_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """As `live_buffers`. Without it averages of the weights are not kept."""
    return module._parameters


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile` returned, else the model itself. Without it names in
    checkpoints of compiled models begin with `_orig_mod.`."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def names_ignored_by_ddp(model: nn.Module) -> set[str]:
    """Parameters and buffers that are meant to differ across ranks; DDP reads them from this
    attribute of the model. Without it they are compared and synchronized as all others."""
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


pytree = _pytree
"""Nested tuples, lists and dicts of tensors. Public in no version of torch that is supported, and
torch's own code reads every batch with it. Without it a step with such a batch fails."""


def ddp_measurements(model: nn.parallel.DistributedDataParallel) -> dict[str, Any]:
    """The sizes of DDP's buckets, and how long the parts of a measured step took. Without it a
    profile has no buckets, and ranks are not balanced."""
    return dict(model._get_ddp_logging_data())  # type: ignore[no-untyped-call]


def broadcast_of_ddp() -> Callable[..., None]:
    """Where DDP broadcasts the buffers of its model. Without it a profile has that time, and does
    not say what it is for."""
    return nn.parallel.DistributedDataParallel._sync_buffers


def measure_ddp_every(model: nn.parallel.DistributedDataParallel, steps: int) -> None:
    """How often DDP measures a step. Without it the times are those of an earlier step."""
    model._set_ddp_runtime_logging_sample_rate(steps)  # type: ignore[no-untyped-call]


# Many tensors in one call. torch's optimizers use these; the public functions take one tensor, and
# launch a kernel for each. Without them a step fails with an AttributeError.


def add_to_each(tensors: list[Tensor], terms: list[Tensor]) -> None:
    torch._foreach_add_(tensors, terms)


def copy_to_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_(targets, sources)


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    torch._foreach_mul_(tensors, factor)


def norm_of_each(tensors: list[Tensor], order: float = 2) -> list[Tensor]:
    return list(torch._foreach_norm(tensors, order))


# Sharded models


def sharding_spec(tensor: Tensor) -> Any:
    """How a DTensor is sharded, to make another one like it: `DTensor.from_local` would move the
    data to the GPU. Without it the checkpoint of a sharded model cannot be loaded."""
    return tensor._spec  # type: ignore[attr-defined]


def parameters_in_reduction() -> set[str]:
    """The parameters whose gradients FSDP is about to reduce, which only a local variable of its
    calling function holds. Without it an error about unused parameters names all of the block."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if "fsdp_params" in frame.f_locals:
            return {getattr(param, "_param_fqn", "") for param in frame.f_locals["fsdp_params"]}
        frame = frame.f_back

    return set()


# The kernels behind `scaled_dot_product_attention`, by which a plan of the memory counts what they
# keep on a GPU: on the machine that plans, torch would choose others. Without them `drumline plan`
# fails for models that call it.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention


# Operations, graphs and the compiler. Its modules take long to load, and few runs need them.


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base class of modes that see each operation; torch documents it, under a private name.
    Without it memory is not planned, and operations are not counted."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler to mark the subclass's method, for 2 s


def current_dispatch_mode() -> Any:
    """The mode that sees each operation, if one is active; only torch's own modes are public.
    Without it compiled code and hashes would be counted as operations of the model."""
    return _get_current_dispatch_mode()


def clear_cublas_workspaces() -> None:
    """So that a CUDA graph gets a workspace of its own: other code (Lightning, torch's compiler)
    may free the shared one, and the graph would still write to it. Without it captures fail with an
    AttributeError, and steps run without a graph."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocation_to_pool(device: torch.device, pool: Any) -> None:
    """What a capture that ended does, for one that failed. Without it torch never frees the memory
    that other streams have used."""
    torch._C._cuda_endAllocateToPool(device.index, pool)


def fake_tensors() -> Any:
    """The module of tensors that have a shape and a device, and no memory. Without it a step is
    not planned before it is taken."""
    from torch._subclasses import fake_tensor

    return fake_tensor


def compiler_callbacks() -> Any:
    """What calls back when a compilation begins and ends; None: the compiler is not loaded. Without
    it the watchdog takes a long compilation for a hang."""
    module = sys.modules.get("torch._dynamo.callback")
    return None if module is None else module.callback_handler


def load_compiler() -> None:
    """Before a phase that others wait in: DDP loads it at its first use, which takes seconds.
    Without it the doctor measures that, too."""
    import torch._dynamo  # noqa: F401


def compiler_counters() -> Any:
    """What torch's compiler has counted in this process: graphs, breaks, hits of its cache. Without
    it a run does not report them."""
    from torch._dynamo.utils import counters

    return counters


def compilations() -> list[Any]:
    """torch's records of each compilation, which its public interface only logs. Without it a run
    does not warn about functions that are compiled again and again."""
    from torch._dynamo.utils import get_compilation_metrics

    return list(get_compilation_metrics())


def compile_backward_early() -> None:
    """Let the compiler compile the backward pass with the forward pass: otherwise that happens in
    the first backward pass, too late to fall back. Without the option that is so again."""
    from torch._functorch import config

    option = "force_non_lazy_backward_lowering"
    if hasattr(config, option):
        setattr(config, option, True)


def is_terminating_handler(handler: Any) -> bool:
    """Whether torchrun's agent has set this handler of a signal. Without it a launcher cannot tell
    the signals that torch handles from those that are ignored."""
    from torch.distributed.elastic.multiprocessing import api

    return handler is api._terminate_process_handler


def compiler_error() -> type[Exception]:
    """The base class of all errors of the compiler. Without it a function that cannot be compiled
    ends the run."""
    error: type[Exception] = torch._dynamo.exc.TorchDynamoException
    return error


# DataLoader workers

LoaderIterator = dataloader._BaseDataLoaderIter
"""The base class of a DataLoader's iterators. Without it the time that a script waits for data is
not measured."""

start_workers = dataloader._MultiProcessingDataLoaderIter.__init__
end_workers = dataloader._MultiProcessingDataLoaderIter._shutdown_workers
"""Where worker processes start and end. Without them a profile does not report how long that
takes."""

next_index = dataloader._BaseDataLoaderIter._next_index
"""Where the sampler draws the samples of a batch. Without it that looks like loading them."""


def awaited_workers(frames: Iterable[FrameType]) -> list[tuple[int, int]]:
    """Number and pid of each worker that the iterator in these frames waits for, whoever made it; a
    worker whose part of the data is done may exit, and so may all of an iterator that is being
    closed. Without it a diagnosis does not say what a blocked worker does."""
    for frame in frames:
        if frame.f_code.co_filename != dataloader.__file__:
            continue

        iterator: Any = frame.f_locals.get("self")
        is_loading = isinstance(iterator, dataloader._MultiProcessingDataLoaderIter)
        if is_loading and not iterator._shutdown:
            # There is no such list before all of them are started.
            needed = getattr(iterator, "_workers_status", [True] * len(iterator._workers))

            # Workers may be added meanwhile.
            pairs = zip(list(iterator._workers), needed, strict=False)
            return [(n, worker.pid) for n, (worker, is_needed) in enumerate(pairs) if is_needed]
    return []


def shared_storage(num_bytes: int) -> torch.UntypedStorage:
    """Memory that a worker shares with the training process, as torch's `default_collate` makes it.
    Without it workers fail with an AttributeError when they make a batch for a GPU."""
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    return storage


def worker_processes(iterator: Any) -> list[Any]:
    """Those of a DataLoader's iterator, which has no public list of them. Without it a worker that
    died is not named."""
    workers: list[Any] = iterator._workers
    return workers


def shut_down_workers(iterator: Any) -> None:
    """What torch itself does when the iterator is garbage-collected, but now. Without it workers
    outlive their loader."""
    iterator._shutdown_workers()


def abandon_workers(iterator: Any) -> None:
    """Keep torch from shutting down these workers, now or when the iterator is garbage-collected:
    it would wait forever for a lock that a killed worker held. Without it the exit of a rank hangs
    after a worker was killed."""
    # A slow import that a rank without workers does not need.
    from torch.utils.data._utils import signal_handling

    iterator._shutdown = True

    # torch must not report their deaths
    signal_handling._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()

    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()


def forget_persistent_workers(loader: Any) -> None:
    """A DataLoader keeps its persistent workers here, and would use ended ones again. Without it a
    loader cannot be used after `close`."""
    loader._iterator = None


def has_compiled() -> bool:
    """Whether torch.compile has compiled anything. Without it a compiled step would be compiled
    again for the hooks that look at it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def is_in_backward() -> bool:
    """Whether the present thread runs a backward pass. Without it a profile does not report what
    activation checkpointing computes again."""
    return bool(torch._C._current_graph_task_id() != -1)
