"""Traces with known answers: parts that overlap, nest and wait, clocks that differ, files that are
damaged."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.base.errors import UsageError
from drumline.report.profile.advice import advise
from drumline.report.profile.profile_words import words_of
from drumline.runs.profile_files import (
    JobFacts,
    RankFacts,
    SampledLine,
    StackSample,
    StackSamples,
    trace_path,
)
from drumline.runs.profile_result import ProfileResult, read_profile
from drumline.tools.profile.breakdown import divide_steps, divided, matched
from drumline.tools.profile.intervals import clipped, difference, intersection, length, union
from drumline.tools.profile.profile_analysis import analyse, reductions_of
from drumline.tools.profile.rank_trace import RankTrace, from_events
from drumline.tools.profile.trace_file import TracePart, columns_of, read_parts, unpacked
from tests.unit.tools.scale.profiles import (
    AUTOGRAD,
    Entry,
    entry,
    gloo_step,
    mark,
    nccl_ranks,
    two_ranks,
    write_rank,
)


def read_trace(path: Path) -> RankTrace:
    return from_events(columns_of(read_parts(path)))


def test_the_parts_of_a_step_are_known(tmp_path: Path) -> None:
    """Nested operations count once, those that make a batch are data, gloo's own thread does not
    compute."""
    result = two_ranks(tmp_path)
    assert result == read_profile(tmp_path)
    fast, slow = result.ranks
    expected = {
        "compute": 25,
        "waiting_for_rank": 30,
        "exposed_communication": 20,
        "data": 10,
        "host_sync": 0,
    }
    assert {name: fast.parts_s[name] * 1000 for name in expected} == pytest.approx(expected)
    assert fast.parts_s["gaps"] * 1000 == pytest.approx(15)
    assert slow.parts_s["waiting_for_rank"] == 0
    assert slow.parts_s["exposed_communication"] * 1000 == pytest.approx(20)
    assert [rank.critical_steps for rank in result.ranks] == [0, 2]
    assert sum(result.parts_s.values()) == pytest.approx(result.step_s) == 0.1
    [bucket] = result.buckets
    assert (bucket.num_bytes, bucket.ready_s, bucket.backward_s) == (
        1_000_000,
        pytest.approx(0.02),
        pytest.approx(0.01),
    )
    assert bucket.reduce_s == pytest.approx(0.019)
    assert result.made_at == 1e9, "when the first step began"
    assert result.other_collectives == 0


ACCUMULATES = f"{AUTOGRAD}torch::autograd::AccumulateGrad"


def two_buckets(run: Path, **facts: Any) -> ProfileResult:
    """A step of 100 ms: 10 of Python, 10 of compute, then a backward pass with three gradients.
    While the all-reduce of the first bucket runs, the host waits in Python for 20 ms; the rank
    waits for both from 60 to 90 only."""
    entries = [
        mark("drumline.step#2", 0, 100),
        mark("drumline.end", 100, 100),
        entry("aten::mm", 10, 20),
        entry(f"{AUTOGRAD}MmBackward0", 20, 30),
        entry("MmBackward0", 20, 30),
        entry(ACCUMULATES, 30, 31),
        entry("c10d::allreduce_", 30.2, 30.8),
        entry("MmBackward0", 50, 54),
        entry(ACCUMULATES, 54, 55),
        entry("MmBackward0", 55, 59),
        entry(ACCUMULATES, 59, 60),
        entry("c10d::allreduce_", 59.2, 60),
        entry("gloo:all_reduce", 31, 70, "user_annotation", thread=9),
        entry("gloo:all_reduce", 60, 90, "user_annotation", thread=8),
        entry("aten::_fused_sgd_", 92, 95),
    ]
    known = {"bucket_bytes": (800, 400), "tensor_bytes": (800, 300, 100)}
    job = JobFacts(task="digits", bucket_cap_mb=400 / (1 << 20))
    write_rank(run, 0, entries, world_size=1, job=job, **{**known, **facts})
    return analyse(run)


def test_python_beside_an_all_reduce_that_nobody_waits_for_is_the_hosts(tmp_path: Path) -> None:
    result = two_buckets(tmp_path)
    assert result.parts_s["gaps"] * 1000 == pytest.approx(10 + 0.2 + 2 + 5), "as it is shown"
    [rank] = result.ranks
    # Python, the gradients' own nodes, the wait beside the first bucket; then around the optimizer.
    assert [seconds * 1000 for seconds in rank.host_s] == pytest.approx([10 + 20 + 1 + 0.2 + 2 + 5])
    first, second = result.buckets
    assert (first.ready_s * 1000, second.ready_s * 1000) == pytest.approx((20, 28))
    assert first.host_s is not None
    assert second.host_s is not None
    assert (first.host_s * 1000, second.host_s * 1000) == pytest.approx((10.2, 10 + 20 + 1 + 0.2))


def test_gradients_are_ready_when_they_were(tmp_path: Path) -> None:
    result = two_buckets(tmp_path)
    assert [tensor.num_bytes for tensor in result.tensors] == [800, 300, 100]
    ready = [tensor.ready_s * 1000 for tensor in result.tensors]
    assert ready == pytest.approx([20, 24, 28])
    assert [tensor.backward_s * 1000 for tensor in result.tensors] == pytest.approx([10, 14, 18])
    assert result.tensors[1].host_s * 1000 == pytest.approx(10 + 20 + 1)


def test_gradients_that_do_not_fill_the_buckets_of_ddp_are_not_known(tmp_path: Path) -> None:
    """As those of several types, of which DDP fills buckets side by side."""
    assert two_buckets(tmp_path / "a", tensor_bytes=(300, 800, 100)).tensors == ()
    assert two_buckets(tmp_path / "b", tensor_bytes=()).tensors == ()


def test_gradients_that_were_not_timed_are_ready_between_their_buckets(tmp_path: Path) -> None:
    """A trace without a node for each of them, as of one that was compiled."""
    sizes = (800, 100, 100, 100, 100)
    result = two_buckets(tmp_path, tensor_bytes=sizes)
    ready = [tensor.ready_s * 1000 for tensor in result.tensors]
    assert ready == pytest.approx([20, 22, 24, 26, 28])


def test_clocks_of_two_hosts_are_compared_by_what_they_leave_together(tmp_path: Path) -> None:
    expected = two_ranks(tmp_path / "same")
    later = two_ranks(tmp_path / "later", later_ms=5000, host="b")
    assert later.num_nodes == 2
    assert later.parts_s == pytest.approx(expected.parts_s)
    assert [rank.critical_steps for rank in later.ranks] == [0, 2]


def test_communication_beside_compute_is_hidden(tmp_path: Path) -> None:
    entries = [
        mark("drumline.step#2", 0, 50),
        mark("drumline.end", 50, 50),
        entry("aten::mm", 0, 30),
        entry("gloo:all_reduce", 10, 40, "user_annotation", thread=9),
        entry("gloo:all_reduce", 20, 45, "user_annotation", thread=8),
    ]
    write_rank(tmp_path, 0, entries, world_size=1)
    result = analyse(tmp_path)
    assert result.hidden_communication_s == pytest.approx(0.02)
    assert result.parts_s["exposed_communication"] == pytest.approx(0.015)
    assert (result.other_collectives, result.buckets) == (2, ())


def test_what_a_rank_sends_on_its_own_thread_is_communication(tmp_path: Path) -> None:
    sends = [entry(name, 86, 88) for name in ("c10d::send", "gloo:send")]
    before = one_rank(tmp_path, [])
    after = one_rank(tmp_path, sends)
    assert after.parts_s["compute"] == before.parts_s["compute"] > 0
    added_s = after.parts_s["exposed_communication"] - before.parts_s["exposed_communication"]
    assert added_s == pytest.approx(0.002)


def one_rank(run: Path, more: list[dict[str, Any]]) -> ProfileResult:
    step = gloo_step(2, 0, bucket_at=30, reduced_at=80)
    write_rank(run, 0, [*step, *more, mark("drumline.end", 100, 100)], world_size=1)
    return analyse(run)


def test_a_python_function_that_waits_does_not_compute(tmp_path: Path) -> None:
    """SyncBatchNorm waits for its collective inside an operation of its own."""
    entries = [
        mark("drumline.step#2", 0, 20),
        mark("drumline.end", 20, 20),
        entry("SyncBatchNorm", 0, 10),
        entry("aten::mul", 0, 1),
        entry("c10d::allreduce_", 1, 2),
        entry("gloo:all_reduce", 2, 9, "user_annotation", thread=9),
        entry(f"{AUTOGRAD}SyncBatchNormBackward", 10, 15),
        entry("SyncBatchNormBackward", 10, 15),
    ]
    write_rank(tmp_path, 0, entries, world_size=1)
    result = analyse(tmp_path)
    assert result.parts_s["compute"] == pytest.approx(0.001)
    assert result.parts_s["exposed_communication"] == pytest.approx(0.008)


def gpu_entries() -> list[Entry]:
    """The host is done after 5 ms; the GPU computes from 2 to 30 and 34 to 60, and reduces from 20
    to 50."""
    return [
        mark("drumline.step#2", 0, 4),
        mark("drumline.step#3", 4, 5),
        mark("drumline.end", 5, 62),
        entry("drumline.step#2", 2, 30, "gpu_user_annotation", 20),
        entry("drumline.step#3", 34, 60, "gpu_user_annotation", 20),
        entry("cudaLaunchKernel", 1, 1.1, "cuda_runtime", correlation=1),
        entry(f"{AUTOGRAD}torch::autograd::AccumulateGrad", 2, 3),
        entry("c10d::allreduce_", 2, 2.5),
        entry("cudaLaunchKernel", 4, 4.1, "cuda_runtime", correlation=2),
        entry("sgemm", 2, 30, "kernel", 20, correlation=1),
        entry(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
            20,
            50,
            "kernel",
            21,
            **{"In msg nelems": 10, "dtype": "Float"},
        ),
        entry("sgemm", 34, 60, "kernel", 20, correlation=2),
        entry("aten::item", 50, 61),
        entry("cudaStreamSynchronize", 60, 61, "cuda_runtime"),
        entry("cudaDeviceSynchronize", 5, 61.5, "cuda_runtime"),
    ]


def test_on_a_gpu_kernels_count_and_steps_are_those_of_the_device(tmp_path: Path) -> None:
    write_rank(
        tmp_path,
        0,
        gpu_entries(),
        world_size=1,
        bucket_bytes=(),
        sync_lines=((10**18 + 61_100_000, "a.py:7"),),
    )
    result = analyse(tmp_path)
    [rank] = result.ranks
    assert rank.step_s == pytest.approx((0.032, 0.028))
    assert result.parts_s["compute"] * 2 == pytest.approx(0.054)
    assert result.parts_s["exposed_communication"] * 2 == pytest.approx(0.004)
    assert result.hidden_communication_s * 2 == pytest.approx(0.026)
    assert (result.kernels[0].name, result.kernels[0].calls) == ("sgemm", 1)


def test_on_a_gpu_communication_belongs_to_the_phase_that_called_it(tmp_path: Path) -> None:
    """The host waits in a log line until the GPU has reduced the gradients."""
    samples = tuple(
        StackSample(10**18 + ms * 10**6, 0, phase, 0) for phase, ms in enumerate((5, 62))
    )
    stacks = StackSamples(
        began_ns=10**18,
        phases=("backward", "log"),
        lines=(SampledLine(file="", line=0, function=""),),
        samples=samples,
    )
    write_rank(tmp_path, 0, gpu_entries(), world_size=1, bucket_bytes=(), stacks=stacks)
    result = analyse(tmp_path)
    assert result.communication_phases_s == {"backward": pytest.approx(0.002)}, "30 to 34, 2 steps"


def test_ranks_on_a_gpu_with_a_slow_one(tmp_path: Path) -> None:
    result = nccl_ranks(tmp_path, "slow")
    fast, slow = result.ranks
    assert sum(result.parts_s.values()) == pytest.approx(result.step_s)
    assert fast.parts_s["waiting_for_rank"] > 0.045 > slow.parts_s["gaps"] - 0.01
    assert slow.parts_s["waiting_for_rank"] < 0.001
    assert [rank.critical_steps for rank in result.ranks] == [0, 2]
    [bucket] = result.buckets
    assert bucket.num_bytes == 3_370_280
    assert 0.0005 < bucket.ready_s - bucket.backward_s < bucket.ready_s < 0.003


def test_small_buckets_on_a_gpu(tmp_path: Path) -> None:
    """The first holds the last layer: it is ready after the forward pass and a little of the
    backward pass."""
    result = nccl_ranks(tmp_path, "tiny")
    assert result.buckets[0].num_bytes == 2_621_480
    assert len(result.buckets) == 7
    assert result.parts_s["exposed_communication"] > result.step_s / 2
    ready = [bucket.ready_s for bucket in result.buckets]
    assert ready == sorted(ready)
    assert ready[0] > 0.0006


def test_a_host_that_reads_the_loss_in_each_step(tmp_path: Path) -> None:
    result = nccl_ranks(tmp_path, "item")
    reads = [sync for sync in result.syncs if sync.call == "cudaStreamSynchronize"]
    assert [sync.calls for sync in reads] == [1]


def test_the_source_line_of_a_host_sync_is_reported_after_it(tmp_path: Path) -> None:
    entries = [
        *gpu_entries()[:2],
        mark("drumline.end", 61.2, 70),
        *gpu_entries()[3:14],
        entry("cudaStreamSynchronize", 3.5, 3.9, "cuda_runtime"),
    ]
    at_ms = {"a.py:1": 3.0, "a.py:7": 4.0, "a.py:9": 61.5}
    lines = tuple((10**18 + int(ms * 1e6), place) for place, ms in at_ms.items())
    write_rank(tmp_path, 0, entries, world_size=1, bucket_bytes=(), sync_lines=lines)
    assert {sync.source: round(sync.seconds * 2e3, 3) for sync in analyse(tmp_path).syncs} == {
        "a.py:7": 0.4,
        "a.py:9": 1,
    }


def syncs_of(run: Path, entries: list[Entry], **at_ms: float) -> dict[tuple[str, str], float]:
    """The calls of each host sync by its source line and name; `at_ms`: when lines were
    reported."""
    lines = tuple((10**18 + int(ms * 1e6), place) for place, ms in at_ms.items())
    frame = [*gpu_entries()[:2], mark("drumline.end", 61.2, 70), *gpu_entries()[3:12]]
    write_rank(run, 0, [*frame, *entries], world_size=1, bucket_bytes=(), sync_lines=lines)
    return {(sync.source, sync.call): sync.calls * 2 for sync in analyse(run).syncs}


def test_a_sync_without_a_line_does_not_get_that_of_the_next(tmp_path: Path) -> None:
    """DDP waits for events of its own, which torch does not report."""
    entries = [
        entry("cudaEventSynchronize", 3.0, 3.1, "cuda_runtime"),
        entry("cudaStreamSynchronize", 3.5, 3.9, "cuda_runtime"),
        entry("cudaEventSynchronize", 4.2, 4.3, "cuda_runtime"),
    ]
    assert syncs_of(tmp_path, entries, here=4.0) == {
        ("here", "cudaStreamSynchronize"): 1,
        ("unknown", "cudaEventSynchronize"): 2,
    }


def test_a_copy_and_its_wait_are_of_one_line(tmp_path: Path) -> None:
    entries = [
        entry("cudaMemcpyAsync", 1.0, 1.2, "cuda_runtime"),  # not of the line: much earlier
        entry("cudaMemcpyAsync", 3.0, 3.2, "cuda_runtime"),
        entry("cudaStreamSynchronize", 3.21, 3.5, "cuda_runtime"),
    ]
    assert syncs_of(tmp_path, entries, here=3.6) == {
        ("here", "cudaMemcpyAsync"): 1,
        ("here", "cudaStreamSynchronize"): 1,
        ("unknown", "cudaMemcpyAsync"): 1,
    }


def test_memory_that_cuda_gives_has_no_line_of_a_wait(tmp_path: Path) -> None:
    entries = [
        entry("cudaStreamSynchronize", 3.0, 3.2, "cuda_runtime"),
        entry("cudaMalloc", 3.3, 3.4, "cuda_runtime"),
    ]
    assert syncs_of(tmp_path, entries, here=3.5) == {
        ("here", "cudaStreamSynchronize"): 1,
        ("unknown", "cudaMalloc"): 1,
    }


def test_a_rank_without_a_trace_is_named_and_the_others_count(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    trace_path(tmp_path / "profile", 1).write_bytes(b"\x1f\x8b no gzip")
    result = analyse(tmp_path)
    assert [rank.rank for rank in result.ranks] == [0]
    assert list(result.missing_ranks) == ["1"]
    assert all(advice.bottleneck not in ("slow_rank", "uneven_ranks") for advice in advise(result))
    assert "no trace of rank 1 " in words_of(result)[1]
    trace_path(tmp_path / "profile", 0).unlink()
    with pytest.raises(UsageError, match="has no trace that can be read") as caught:
        analyse(tmp_path)
    assert caught.value.next_step == "profile the job again"


DAMAGED = {
    "no list": b'{"traceEvents": 3}',
    "no object": b"[]",
    "a base that is no time": b'{"traceEvents": [], "baseTimeNanoseconds": "now"}',
    "deep": b'{"traceEvents": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
    "no JSON": b"{",
    "no steps": b'{"traceEvents": []}',
    "a name that is no text": b'{"traceEvents": [{"ph": "X", "name": 3, "ts": 1, "dur": 1}]}',
    "arguments that are no object": b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1, "args": []}]}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_rank_with_a_damaged_trace_is_missing(tmp_path: Path, content: bytes) -> None:
    two_ranks(tmp_path)
    trace_path(tmp_path / "profile", 1).write_bytes(gzip.compress(content))
    assert list(analyse(tmp_path).missing_ranks) == ["1"]


def test_a_trace_that_unpacks_to_too_much_or_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    packed = gzip.compress(b" " * 5_000_000)
    path.write_bytes(packed)
    with pytest.raises(ValueError, match="it has more than 1,000 bytes"):
        list(unpacked(path, most=1000))
    path.write_bytes(packed[:-100])
    with pytest.raises(ValueError, match="it is incomplete"):
        list(unpacked(path))


def test_a_trace_is_read_in_parts(tmp_path: Path) -> None:
    """Torch writes an entry in many lines."""
    rows = [entry(f"aten::mm{number}", number, number + 1) for number in range(12_000)]
    texts = [json.dumps(row, indent=4).replace("\n}", "\n  }") for row in rows]
    head = '{"baseTimeNanoseconds": 5, "traceEvents": [\n  '
    path = tmp_path / "trace.json.gz"
    content = (head + ",\n  ".join(texts) + '\n  ],"traceName": "a"}').encode()
    path.write_bytes(gzip.compress(content, 1))
    assert len(list(unpacked(path))) > 1
    columns = columns_of(read_parts(path))
    assert columns.base_ns == 5
    assert [event.name for event in columns.events()] == [row["name"] for row in rows]


# Any intervals

times = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def instants(pairs: list[tuple[int, int]]) -> set[int]:
    """Unit intervals, by their starts."""
    return {place for low, high in pairs for place in range(low, high)}


@given(times, times, st.integers(0, 20), st.integers(20, 40))
def test_sets_of_instants(
    left_pairs: list[tuple[int, int]], right_pairs: list[tuple[int, int]], low: int, high: int
) -> None:
    left = union(left_pairs)
    right = union(right_pairs)
    assert all(end < start for (_, end), (start, _) in pairwise(left))
    assert length(left) == len(instants(left_pairs))
    assert length(intersection(left, right)) == len(instants(left_pairs) & instants(right_pairs))
    assert length(difference(left, right)) == len(instants(left_pairs) - instants(right_pairs))
    assert length(clipped(left, low, high)) == len(instants(left_pairs) & set(range(low, high)))


operations = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 20)))


@given(operations)
def test_operations_inside_others_count_once(rows: list[tuple[int, int, int]]) -> None:
    """The outer operation is the last one of the thread that began before and has not ended."""
    rows = sorted(set(rows), key=lambda row: (row[1], -row[2]))
    self_ms = [lasts for _, _, lasts in rows]
    for number, (thread, start, lasts) in enumerate(rows):
        outer = [
            place
            for place, (of_thread, began, before) in enumerate(rows[:number])
            if of_thread == thread and began + before > start
        ]
        if outer:
            self_ms[outer[-1]] -= lasts
    entries = [
        entry(f"aten::{number}", start, start + lasts, thread=thread)
        for number, (thread, start, lasts) in enumerate(rows)
    ]
    trace = trace_of([mark("drumline.step#2", 0, 100), *entries])
    seconds = {operation.name: operation.seconds for operation in trace.operations}
    expected = {f"aten::{number}": lasts / 1e3 for number, lasts in enumerate(self_ms)}
    assert seconds == pytest.approx(expected)


@given(st.lists(times, min_size=4, max_size=4))
def test_parts_are_disjoint_and_add_up_to_the_step(claims: list[list[tuple[int, int]]]) -> None:
    named = {str(number): union(pairs) for number, pairs in enumerate(claims)}
    parts = {name: length(part) for name, part in divided(union([(5, 35)]), named, "rest").items()}
    left = set(range(5, 35))
    for number, pairs in enumerate(claims):
        assert parts[str(number)] == len(left & instants(pairs))
        left -= instants(pairs)
    assert parts["rest"] == len(left)
    assert sum(parts.values()) == pytest.approx(30)


def test_ranks_with_different_numbers_of_collectives_do_not_wait(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    traces = {rank: read_trace(trace_path(tmp_path / "profile", rank)) for rank in (0, 1)}
    traces[1] = replace(traces[1], collectives=traces[1].collectives[:1])
    collectives = matched(traces)
    assert [len(collective.by_rank) for collective in collectives] == [1, 1, 1]
    assert all(not any(step.waited_s.values()) for step in divide_steps(0, traces[0], collectives))


def reduced(times: list[tuple[float, float]]) -> RankTrace:
    """A rank whose all-reduces are called and end at these times, in ms."""
    works = [
        entry("gloo:all_reduce", call, end, "user_annotation", thread=9) for call, end in times
    ]
    return trace_of([mark("drumline.step#2", 0, 100), *works])


def trace_of(entries: list[Entry]) -> RankTrace:
    document = {"traceEvents": [*entries, mark("drumline.end", 100, 100)]}
    return from_events(columns_of([msgspec.json.decode(json.dumps(document), type=TracePart)]))


def test_groups_of_ranks_with_equal_counts_are_not_one_collective() -> None:
    """Ranks 0 and 1 reduce among themselves first, ranks 2 and 3 later, then all four together.
    gloo's trace does not name the groups, but nobody leaves an all-reduce before the last rank has
    joined."""
    early = (0.0, 5.0)
    late = (20.0, 25.0)
    together = (40.0, 50.0)
    traces = {rank: reduced([early if rank < 2 else late, together]) for rank in range(4)}
    assert [len(collective.by_rank) for collective in matched(traces, clock_error_s=0.001)] == [
        1,
        1,
        1,
        1,
        4,
    ]


def test_how_often_a_step_reduces_all_gradients() -> None:
    facts = RankFacts(
        rank=0,
        world_size=2,
        host="vm",
        device="cpu",
        backend="gloo",
        first_step=2,
        num_steps=2,
        bucket_bytes=(10, 20),
        num_optimizers=1,
        job=JobFacts(task="train.py"),
    )
    assert [reductions_of(facts, num_calls) for num_calls in (0, 2, 3, 12)] == [1, 1, 1, 6]
    assert reductions_of(replace(facts, num_models=2), 12) == 1, "the other one may have as many"
    assert reductions_of(replace(facts, num_passes=6), 12) == 6
    assert reductions_of(replace(facts, num_passes=1), 4) == 1, "which parameters were used"
    for num_optimizers in (2, None):
        facts = replace(facts, num_optimizers=num_optimizers)
        assert reductions_of(facts, 12) == 1, "each optimizer may have its own backward pass"


def test_the_reduction_of_which_parameters_were_used_is_no_bucket(tmp_path: Path) -> None:
    """DDP makes it with find_unused_parameters=True."""
    steps = [gloo_step(n, (n - 2) * 100, bucket_at=30, reduced_at=60) for n in (2, 3)]
    entries = [*steps[0], *steps[1], mark("drumline.end", 200, 200)]
    for start in (0, 100):
        entries += [
            entry("c10d::allreduce_", start + 30.6, start + 30.9),
            entry(
                "gloo:all_reduce",
                start + 60,
                start + 61,
                "user_annotation",
                thread=9,
                **{"In msg nelems": 10, "dtype": "Int"},
            ),
        ]
    write_rank(tmp_path, 0, entries, world_size=1)
    result = analyse(tmp_path)
    assert (len(result.buckets), result.reductions, result.other_collectives) == (1, 1, 1)
