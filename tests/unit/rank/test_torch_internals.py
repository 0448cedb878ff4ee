"""Every private name of torch that Drumline uses exists, and does what it is used for."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from drumline.rank.torch_internals import (
    DispatchMode,
    LoaderIterator,
    abandon_workers,
    add_to_each,
    awaited_workers,
    broadcast_of_ddp,
    clear_cublas_workspaces,
    compilations,
    compile_backward_early,
    compiler_callbacks,
    compiler_counters,
    compiler_error,
    copy_to_each,
    current_dispatch_mode,
    ddp_measurements,
    efficient_attention,
    end_workers,
    fake_tensors,
    flash_attention,
    flash_attention_backward,
    forget_persistent_workers,
    is_batchnorm,
    is_terminating_handler,
    live_buffers,
    live_parameters,
    load_compiler,
    measure_ddp_every,
    names_ignored_by_ddp,
    norm_of_each,
    parameters_in_reduction,
    pytree,
    raise_group_timeouts,
    recorded_collectives,
    scale_each,
    sequence_number_of,
    set_group_timeout,
    sharding_spec,
    shared_storage,
    shut_down_workers,
    start_workers,
    uncompiled,
    uses_gloo,
    worker_processes,
)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def loader() -> Iterator[DataLoader[int]]:
    made: DataLoader[int] = DataLoader(
        [1, 2, 3, 4],  # type: ignore[arg-type]
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    yield made
    forget_persistent_workers(made)


def test_the_timeout_of_a_group_changes(group: dist.ProcessGroup) -> None:
    set_group_timeout(77)
    backend: Any = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=77)


def test_short_timeouts_are_raised(group: dist.ProcessGroup) -> None:
    backend: Any = group._get_backend(torch.device("cpu"))
    raise_group_timeouts(timedelta(hours=5))
    assert backend.options._timeout == timedelta(hours=5)
    raise_group_timeouts(timedelta(seconds=1))
    assert backend.options._timeout == timedelta(hours=5)


def test_a_group_of_gloo_is_found(group: dist.ProcessGroup) -> None:
    assert uses_gloo()


def test_collectives_are_recorded(group: dist.ProcessGroup) -> None:
    dist.all_reduce(torch.zeros(3))
    assert recorded_collectives()[-1]["input_sizes"] == [[3]]


def test_every_collective_is_counted(group: dist.ProcessGroup) -> None:
    count = sequence_number_of(group)
    before = count()
    dist.all_reduce(torch.zeros(1))
    assert count() == before + 1


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm3d(2), True),
        (nn.SyncBatchNorm(2), True),
        (nn.InstanceNorm2d(2), False),
        (nn.LayerNorm(2), False),
    ],
)
def test_batchnorm_is_known_by_its_base_class(module: nn.Module, expected: bool) -> None:
    assert is_batchnorm(module) is expected


def test_a_replaced_parameter_is_seen() -> None:
    module = nn.Linear(1, 1)
    parameters = live_parameters(module)
    module.weight = nn.Parameter(torch.ones(1, 1))
    assert parameters["weight"] is module.weight


def test_a_replaced_buffer_is_seen() -> None:
    module = nn.BatchNorm1d(2)
    buffers = live_buffers(module)
    module.running_mean = torch.tensor([3.0, 4.0])
    assert buffers["running_mean"] is module.running_mean


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_model_has_its_model_inside() -> None:
    model = nn.Linear(1, 1)
    assert uncompiled(model) is model
    compiled = torch.compile(model)
    assert compiled is not model
    assert uncompiled(compiled) is model


def test_tensors_in_a_nested_batch_are_found_and_replaced() -> None:
    batch = {"pair": (torch.ones(1), [torch.ones(2)]), "name": "text"}
    assert [type(leaf) for leaf in pytree.tree_leaves(batch)] == [torch.Tensor, torch.Tensor, str]
    sizes = pytree.tree_map_only(torch.Tensor, torch.Tensor.numel, batch)
    assert sizes == {"pair": (1, [2]), "name": "text"}


def test_ddp_measures_its_steps(group: dist.ProcessGroup) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    measure_ddp_every(model, 1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2))
    measured = ddp_measurements(model)
    assert measured["bucket_cap_bytes"] > 0
    assert measured["forward_compute_time"] > 0


def test_names_that_ddp_ignores_are_those_it_was_told() -> None:
    model = nn.BatchNorm1d(2)
    assert names_ignored_by_ddp(model) == set()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, ["running_mean"]
    )
    assert names_ignored_by_ddp(model) == {"running_mean"}


def test_functions_of_many_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    assert [norm.item() for norm in norm_of_each(tensors)] == [5.0, 1.0]
    assert [norm.item() for norm in norm_of_each(tensors, float("inf"))] == [4.0, 1.0]
    add_to_each(tensors, [torch.ones(2), torch.ones(1)])
    scale_each(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[8.0, 10.0], [4.0]]
    copy_to_each(tensors, [torch.zeros(2), torch.zeros(1)])
    assert [tensor.tolist() for tensor in tensors] == [[0.0, 0.0], [0.0]]


def test_attention_has_the_kernels_that_a_plan_counts() -> None:
    with fake_tensors().FakeTensorMode():
        inputs = [torch.empty(1, 2, 16, 8, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        outputs = [flash_attention(*inputs, 0.0, False, False, scale=None)[0]]
        outputs.append(efficient_attention(*inputs, None, True, 0.0, False, scale=None)[0])
    assert [tuple(output.shape) for output in outputs] == [(1, 2, 16, 8)] * 2
    assert flash_attention_backward.overloadpacket is not flash_attention


class RecordingReduceScatter:
    """Records what `parameters_in_reduction` returns when torch reduces gradients."""

    def __init__(self) -> None:
        self.names: list[set[str] | None] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.names.append(parameters_in_reduction())
        output_tensor.zero_()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two; torch's fake collectives send nothing. A sharded model with one
    rank reduces nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_sharded_model() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Linear(2, 3)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    spec = sharding_spec(model.weight)
    assert spec.tensor_meta.shape == (3, 2)
    assert spec.placements == model.weight.placements
    recorder = RecordingReduceScatter()
    model.set_custom_reduce_scatter(recorder)
    model(torch.ones(1, 2)).sum().backward()
    assert recorder.names == [{"weight", "bias"}]


def test_outside_of_a_reduction_no_parameters_are_known() -> None:
    assert parameters_in_reduction() == set()


def test_a_mode_that_sees_each_operation_is_known() -> None:
    assert current_dispatch_mode() is None
    with DispatchMode() as mode:
        assert current_dispatch_mode() is mode


def test_fake_tensors_have_no_memory() -> None:
    fake = fake_tensors()
    with fake.FakeTensorMode():
        tensor = torch.empty(10**12)
    assert isinstance(tensor, fake.FakeTensor)
    assert issubclass(fake.DataDependentOutputException, RuntimeError)
    assert issubclass(fake.DynamicOutputShapeException, RuntimeError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_compiler_calls_back() -> None:
    load_compiler()
    handler = compiler_callbacks()
    assert handler.start_callbacks == handler.end_callbacks == []


def test_the_handlers_of_torchruns_agent_are_known() -> None:
    from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

    assert is_terminating_handler(_terminate_process_handler)
    assert not is_terminating_handler(signal.SIG_IGN)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_compiler_counts_and_fails_in_its_own_way() -> None:
    """`eager`: graphs are found, and not compiled to machine code."""
    graphs = compiler_counters()["stats"]["unique_graphs"]
    torch.compile(lambda number: number + 1, backend="eager")(torch.ones(3))
    assert compiler_counters()["stats"]["unique_graphs"] == graphs + 1
    newest = compilations()[-1]
    assert (newest.co_name, newest.recompile_reason) == ("<lambda>", None)
    assert newest.guard_count > 0
    assert newest.compile_id is not None

    def breaks_the_graph(number: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return number + 2

    with pytest.raises(compiler_error()):
        torch.compile(breaks_the_graph, backend="eager", fullgraph=True)(torch.ones(3))
    breaks = compiler_counters()["graph_break"].total()
    torch.compile(breaks_the_graph, backend="eager")(torch.ones(3))
    assert compiler_counters()["graph_break"].total() == breaks + 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_backward_pass_can_be_compiled_early(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch import config

    monkeypatch.setattr(config, "force_non_lazy_backward_lowering", False)
    compile_backward_early()
    assert config.force_non_lazy_backward_lowering is True


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_functions_for_cuda_graphs() -> None:
    clear_cublas_workspaces()
    # tests/gpu calls it after a capture that failed.
    assert callable(torch._C._cuda_endAllocateToPool)


def test_shared_storage_is_shared() -> None:
    storage = shared_storage(16)
    assert storage.nbytes() == 16
    assert storage.is_shared()


def test_the_workers_that_are_waited_for(loader: DataLoader[int]) -> None:
    iterator = iter(loader)
    assert isinstance(iterator, LoaderIterator)
    pids = [process.pid for process in worker_processes(iterator)]
    seen: list[list[tuple[int, int]]] = []

    def receive(data: Any, *_: Any) -> Any:
        frame = sys._getframe()
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        seen.append(awaited_workers(frames))
        return data

    iterator._process_data = receive  # called inside `next`
    next(iterator)
    assert seen == [list(enumerate(pids))]
    assert awaited_workers([sys._getframe()]) == []
    del iterator._process_data
    shut_down_workers(iterator)


def test_ddp_broadcasts_its_buffers_in_a_function_of_python() -> None:
    assert broadcast_of_ddp().__code__.co_filename == nn.parallel.distributed.__file__


def test_a_loader_starts_and_ends_its_workers_in_these_functions(loader: DataLoader[int]) -> None:
    iterator = iter(loader)
    kind = type(iterator)
    assert kind.__init__.__code__ is start_workers.__code__
    assert kind._shutdown_workers.__code__ is end_workers.__code__
    shut_down_workers(iterator)


def test_workers_are_shut_down(loader: DataLoader[int]) -> None:
    iterator = iter(loader)
    processes = worker_processes(iterator)
    assert [process.is_alive() for process in processes] == [True, True]
    shut_down_workers(iterator)
    assert [process.is_alive() for process in processes] == [False, False]


def test_abandoned_workers_are_not_shut_down(loader: DataLoader[int]) -> None:
    iterator = iter(loader)
    processes = worker_processes(iterator)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    abandon_workers(iterator)
    for process in processes:
        process.join()
    # what the garbage collection does: nothing, and no error
    shut_down_workers(iterator)


def test_a_loader_forgets_its_workers(loader: DataLoader[int]) -> None:
    first = iter(loader)
    assert iter(loader) is first
    shut_down_workers(first)
    forget_persistent_workers(loader)
    second = iter(loader)
    assert second is not first
    assert [int(batch) for batch in second] == [1, 2, 3, 4]
