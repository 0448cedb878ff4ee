"""Advice: each kind of bottleneck is named first by its numbers, with a change and what it should
bring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from drumline.report.profile.advice import advise
from drumline.report.profile.bottleneck import Advice, advice_lines, flags_of
from drumline.report.profile.bucket_plan import (
    FIRST_BYTES,
    ReadyGradients,
    ReduceCost,
    backward_gradients,
    exposed_by_cap,
    exposed_s,
    filled,
    fit_costs,
    planned,
)
from drumline.runs.profile_files import BUFFERS
from drumline.runs.profile_result import (
    PARTS,
    Bucket,
    GradientTensor,
    HostSync,
    Kernel,
    LineCost,
    ProfileResult,
    RankSteps,
    bus_bytes_per_s,
    read_profile,
)

STEP_S = 0.1
MIB = 1 << 20


def profile(critical: tuple[int, ...] = (5, 5), **changes: Any) -> ProfileResult:
    """A profile of two ranks that computes most of its 100 ms; `parts` of both ranks, or of
    each."""
    by_rank = changes.pop("by_rank", None) or [changes.pop("parts", {})] * len(critical)
    ranks = []
    for rank, parts in enumerate(by_rank):
        filled = dict.fromkeys(PARTS, 0.0) | parts
        filled["compute"] = STEP_S - sum(
            seconds for part, seconds in filled.items() if part != "compute"
        )
        steps = RankSteps(
            rank=rank,
            host=f"node-{rank}",
            step_s=(STEP_S,) * 10,
            compute_s=(filled["compute"],) * 10,
            parts_s=filled,
            hidden_communication_s=0.0,
            critical_steps=critical[rank],
        )
        ranks.append(steps)
    common: dict[str, Any] = {
        "task": "digits",
        "world_size": len(ranks),
        "num_nodes": 1,
        "device": "cpu",
        "backend": "gloo",
        "first_step": 10,
        "num_steps": 10,
        "batch_size": 64,
        "accumulate": 1,
        "precision": "fp32",
        "bucket_cap_mb": 25.0,
        "settings": {"data.workers": "0", "train.batch_size": "64", "train.step": "eager"},
        "step_s": STEP_S,
        "parts_s": {part: sum(rank.parts_s[part] for rank in ranks) / len(ranks) for part in PARTS},
        "hidden_communication_s": 0.0,
        "ranks": tuple(ranks),
        "buckets": (),
        "other_collectives_s": 0.0,
        "other_collectives": 0.0,
        "kernels": (),
        "syncs": (),
        "network_bytes_per_s": None,
        "cores_per_rank": 4.0,
        "loading_cores": 0.05,
    }
    return ProfileResult(**common | changes)


def bucket(num_bytes: int, ready_s: float, reduce_s: float) -> Bucket:
    return Bucket(num_bytes=num_bytes, ready_s=ready_s, backward_s=ready_s, reduce_s=reduce_s)


def first(result: ProfileResult) -> Advice:
    return advise(result)[0]


def as_script(result: ProfileResult) -> ProfileResult:
    return replace(result, batch_size=None, settings={}, precision=None)


def test_collectives_that_torch_checks_are_half_as_long_without() -> None:
    result = profile(parts={"exposed_communication": 0.04}, checks_collectives=True)
    advice = first(result)
    assert (advice.bottleneck, advice.predicted_step_s) == ("debug_level", pytest.approx(0.08))
    assert advice.text.startswith(
        "TORCH_DISTRIBUTED_DEBUG is DETAIL: ranks compare each collective before they begin it, and 40 ms of each"
    )


def test_gradients_that_every_micro_batch_reduces_are_reduced_once() -> None:
    buckets = (bucket(1 << 20, 0.04, 0.01),) * 4
    result = profile(parts={"exposed_communication": 0.04}, buckets=buckets, reductions=4)
    (advice,) = advise(as_script(result))
    assert (advice.bottleneck, advice.changes_training) == ("micro_batches", False)
    assert advice.text.startswith("gradients are reduced 4 times in each step")
    assert "no_sync()" in advice.remedy
    assert advice.predicted_step_s == pytest.approx(STEP_S - 0.03)


def test_a_step_that_computes_gets_no_advice() -> None:
    assert advise(profile(parts={"data": 0.002, "gaps": 0.08, "waiting_for_rank": 0.004})) == ()


def test_slow_data_gets_as_many_workers_as_hide_it() -> None:
    advice = first(profile(parts={"data": 0.06}))
    assert (advice.bottleneck, advice.settings) == ("data", {"data.workers": "2"})
    assert advice.predicted_step_s == pytest.approx(0.04), "the rest of the step remains"
    assert advice.band[0] < 0.04 < advice.band[1] < STEP_S
    three = profile(parts={"data": 0.06}, settings={"data.workers": "3"})
    assert first(three).settings == {"data.workers": "9"}, (
        "3 workers take 3 steps of 100 ms for a batch"
    )
    assert first(as_script(three)).settings is None
    assert first(as_script(three)).remedy.startswith("num_workers=")


def test_workers_that_have_no_core_are_not_proposed() -> None:
    """What loading computes, it takes from the training on the same core."""
    advice = first(profile(parts={"data": 0.06}, cores_per_rank=1.0, loading_cores=1.0))
    assert (advice.bottleneck, advice.settings) == ("data", None)
    assert advice.remedy.startswith("more workers bring nothing on 1 core a rank")
    shared = first(profile(parts={"data": 0.06}, cores_per_rank=0.5, loading_cores=1.0))
    assert shared.remedy.startswith("more workers bring nothing on 0.5 cores a rank")
    halved = first(profile(parts={"data": 0.06}, cores_per_rank=1.5, loading_cores=1.0))
    assert halved.settings == {"data.workers": "1"}
    assert halved.predicted_step_s == pytest.approx(0.1 / 1.5)


def test_loading_of_unknown_cost_has_a_wide_band() -> None:
    known, unknown = (
        profile(parts={"data": 0.06}, cores_per_rank=1.25, loading_cores=load)
        for load in (1.0, None)
    )
    low, high = first(unknown).band
    assert low == pytest.approx(0.06), "if it computes nothing, one worker loads a batch in 60 ms"
    assert high - low > first(known).band[1] - first(known).band[0]


def test_tiny_buckets_become_larger_ones() -> None:
    buckets = [bucket(size, 0.001 * number, 0.001) for number, size in enumerate([4096, 128] * 30)]
    result = profile(
        parts={"exposed_communication": 0.03}, buckets=tuple(buckets), bucket_cap_mb=0.01
    )
    advice = first(result)
    assert (advice.bottleneck, advice.settings) == ("bucket_size", {"dist.bucket_cap_mb": "25"})
    assert advice.predicted_step_s == pytest.approx(0.071, abs=0.0011), (
        "one all-reduce of 1 ms is left"
    )
    assert "60 buckets of 2.11 kB" in advice.text
    assert "1.0 ms of each latency" in advice.derivation
    assert "bucket_cap_mb=25" in first(as_script(result)).remedy
    assert first(replace(result, cores_per_rank=1.0)).band[0] < advice.band[0], (
        "gloo's threads need the same core"
    )
    waiting = {"exposed_communication": 0.03, "waiting_for_rank": 0.02}
    in_turn = first(profile(parts=waiting, buckets=tuple(buckets), bucket_cap_mb=0.01))
    assert in_turn.saved_s.most > advice.saved_s.most + 0.015, (
        "ranks wait for each other in fewer all-reduces"
    )


def test_a_slow_link_gets_fewer_bytes_and_fewer_all_reduces() -> None:
    buckets = (bucket(MIB, 0.001, 0.006), bucket(8 * MIB, 0.003, 0.048))
    result = profile(parts={"exposed_communication": 0.05}, buckets=buckets, num_nodes=2)
    rounded, larger = advise(result)
    assert [rounded.bottleneck, larger.bottleneck] == ["network", "network"]
    assert rounded.settings == {"dist.comm": "bf16"}
    assert rounded.predicted_step_s == pytest.approx(STEP_S - 0.8 * 0.054 / 2), (
        "0.054 s are all bytes"
    )
    assert "9.44 MB of gradients at 1.4 Gbit/s" in rounded.text
    assert larger.settings == {"train.batch_size": "512", "train.accumulate": "8"}
    assert larger.samples_factor == 8
    assert larger.predicted_step_s == pytest.approx(STEP_S - 0.05 * 7 / 8)
    assert "drumline doctor --hosts measures the link" in larger.remedy
    throttled = advise(replace(result, network_bytes_per_s=1.25e9))[-1]
    assert "doctor measured 10 Gbit/s: look for what else uses the link" in throttled.remedy
    (in_words,) = advise(as_script(result))
    assert in_words.settings is None
    assert "bf16_compress_hook" in in_words.remedy
    per_rank = {
        "train.batch_size_per_rank": "32",
        "train.micro_batch_size": "8",
        "dist.comm": "bf16",
    }
    assert first(replace(result, settings=per_rank)).settings == {
        "train.batch_size_per_rank": "256"
    }


def test_smaller_buckets_that_begin_earlier_are_a_remedy_for_a_slow_link() -> None:
    buckets = (bucket(MIB, 0.003, 0.006), bucket(8 * MIB, 0.03, 0.048))
    tensors = tuple(
        GradientTensor(num_bytes=MIB, ready_s=ready_s, backward_s=ready_s, host_s=0.0)
        for ready_s in (0.003 * number for number in range(1, 10))
    )
    result = profile(parts={"exposed_communication": 0.05}, buckets=buckets, tensors=tensors)
    advice = advise(result)
    assert {entry.bottleneck for entry in advice} == {"network"}
    assert {"dist.bucket_cap_mb": "1"} in [entry.settings for entry in advice]
    one_tensor = replace(result, tensors=())
    assert {"dist.bucket_cap_mb": "1"} not in [entry.settings for entry in advise(one_tensor)], (
        "of unknown tensors it is not known that DDP can split the bucket"
    )


def test_a_slow_rank_is_named_with_what_it_does() -> None:
    fast = {"waiting_for_rank": 0.04}
    slow = {"gaps": 0.001}
    advice = first(profile(critical=(0, 10), by_rank=[fast, slow]))
    assert (advice.bottleneck, advice.settings) == ("slow_rank", None)
    assert advice.text.startswith(
        "rank 1 on node-1 computes 99 ms a step, the others 60 ms: they wait 40 ms"
    )
    assert advice.predicted_step_s == pytest.approx(0.06)
    in_data = first(profile(critical=(0, 10), by_rank=[fast, {"data": 0.041}]))
    assert in_data.bottleneck == "slow_rank"
    assert "rank 1 on node-1 waits for data 41 ms a step, the others 0 us" in in_data.text


def test_a_rank_that_stalls_in_some_steps_is_slow_by_the_time_that_others_wait() -> None:
    fast = {"waiting_for_rank": 0.04}
    result = profile(critical=(7, 3), by_rank=[fast, {"gaps": 0.041}])
    waited_for_s = ((0.002,) * 7 + (0.0,) * 3, (0.0,) * 7 + (0.13,) * 3)
    ranks = [
        replace(rank, waited_for_s=waited)
        for rank, waited in zip(result.ranks, waited_for_s, strict=True)
    ]
    stalling = replace(result, ranks=tuple(ranks))
    assert first(stalling).text.startswith("rank 1 on node-1 runs Python, or waits, 41 ms a step")
    assert first(stalling).derivation.endswith("they wait for it in 3 of 10 steps")
    once = replace(ranks[1], waited_for_s=(0.0,) * 9 + (0.4,))
    assert first(replace(result, ranks=(ranks[0], once))).bottleneck == "uneven_ranks", (
        "anything may happen in a single step"
    )


def test_a_wait_for_a_core_of_a_shared_host_is_no_slow_rank() -> None:
    fast = {"waiting_for_rank": 0.04}
    result = profile(critical=(0, 10), by_rank=[fast, {"gaps": 0.001}])
    crowded = tuple(replace(rank, cpu_wait_s=0.04 * rank.rank) for rank in result.ranks)
    assert advise(replace(result, ranks=crowded)) == ()
    on_two_hosts = replace(result, ranks=crowded, num_nodes=2)
    assert first(on_two_hosts).bottleneck == "slow_rank", "its host has other jobs"


def test_a_rank_with_more_work_is_slow_also_where_it_waits_longer_for_cores() -> None:
    fast = {"waiting_for_rank": 0.06}
    result = profile(critical=(0, 10), by_rank=[fast, {"gaps": 0.001}])
    quick, slow = (
        replace(rank, cpu_wait_s=wait_s, cpu_run_s=0.02)
        for rank, wait_s in zip(result.ranks, (0.04, 0.1), strict=True)
    )
    assert advise(replace(result, ranks=(quick, slow))) == (), "its work takes no longer"
    working = replace(slow, cpu_run_s=0.05)
    assert first(replace(result, ranks=(quick, working))).bottleneck == "slow_rank"


def test_what_changes_the_training_is_last_and_says_so() -> None:
    parts = {"data": 0.05, "exposed_communication": 0.03}
    advice = advise(profile(parts=parts, buckets=(bucket(8 * MIB, 0.001, 0.038),)))
    assert [entry.changes_training for entry in advice] == [False, True, True]
    assert advice[0].bottleneck == "data"
    assert "this changes what is trained" in "".join(advice_lines(advice[1:]))
    few = profile(
        parts={"exposed_communication": 0.1 * STEP_S}, buckets=(bucket(MIB, 0.001, 0.01),)
    )
    assert not [entry for entry in advise(few) if entry.changes_training], "it is not worth that"


def test_ranks_that_are_late_in_turn_are_not_one_slow_rank() -> None:
    advice = first(profile(critical=(5, 5), parts={"waiting_for_rank": 0.03}))
    assert (advice.bottleneck, advice.band) == ("uneven_ranks", (pytest.approx(0.07), STEP_S))


def test_sync_batchnorm_is_told_from_gradients() -> None:
    parts = {"exposed_communication": 0.04, "waiting_for_rank": 0.02}
    others = {
        "other_collectives_s": 0.06,
        "other_collectives": 60.0,
        "buckets": (bucket(MIB, 0.03, 0.001),),
    }
    result = profile(parts=parts, settings={"dist.sync_batchnorm": "true"}, **others)
    advice = first(result)
    assert (advice.bottleneck, advice.settings) == (
        "other_collectives",
        {"dist.sync_batchnorm": "false"},
    )
    assert "60 collectives besides the all-reduces of gradients (SyncBatchNorm)" in advice.text
    assert flags_of(advice.settings or {}) == "--no-dist.sync_batchnorm"
    named = {entry.bottleneck for entry in advise(as_script(result))}
    assert "other_collectives" not in named, "no line of the user's called them"


def broadcasting(*, lines: tuple[LineCost, ...] = (), **changes: Any) -> ProfileResult:
    """A job whose ranks are in the broadcast of buffers for 40 of 100 ms, and in another one for
    20."""
    lines = lines or tuple(
        LineCost(
            phase=phase,
            source=f"train.py:{number}",
            function="main",
            seconds=seconds,
            own_s=0.0,
            cpu_s=0.0,
        )
        for phase, number, seconds in ((BUFFERS, 7, 0.04), ("rest", 9, 0.02))
    )
    return profile(
        parts={"exposed_communication": 0.06},
        buckets=(bucket(MIB, 0.03, 0.0),),
        other_collectives_s=0.06,
        other_collectives=3.0,
        other_kinds={"allgather": 1.0, "broadcast": 2.0},
        communication_phases_s={BUFFERS: 0.04, "rest": 0.02},
        collective_lines=lines,
        **changes,
    )


def test_the_broadcast_of_buffers_is_told_from_other_collectives() -> None:
    buffers, others = advise(as_script(broadcasting()))
    assert (buffers.bottleneck, buffers.cost_s) == ("buffers", pytest.approx(0.04))
    assert buffers.remedy.startswith("pass broadcast_buffers=False to DistributedDataParallel")
    assert (others.bottleneck, others.cost_s) == ("other_collectives", pytest.approx(0.02))
    assert (
        "3 collectives besides the all-reduces of gradients (2 broadcast, 1 allgather)"
        in others.text
    )
    assert "train.py:9" in others.text
    short = tuple(
        replace(line, seconds=line.seconds / 2) for line in broadcasting().collective_lines
    )
    [only] = advise(as_script(broadcasting(lines=short)))
    assert only.bottleneck == "buffers", "a small one may be needed"


@pytest.mark.parametrize(("exact", "is_proposed"), [("world", True), ("elastic", False)])
def test_the_broadcast_of_a_tasks_buffers_is_a_setting(exact: str, is_proposed: bool) -> None:
    advice = advise(broadcasting(settings={"train.exact": exact}))
    settings = [item.settings for item in advice if item.bottleneck == "buffers"]
    assert settings == ([{"dist.broadcast_buffers": "false"}] if is_proposed else [])


def test_an_item_call_is_named_by_its_line() -> None:
    syncs = (HostSync(source="train.py:7", call="cudaStreamSynchronize", seconds=0.05, calls=24.0),)
    result = profile(parts={"gaps": 0.03, "host_sync": 0.01}, device="NVIDIA H200", syncs=syncs)
    advice = first(result)
    assert (advice.bottleneck, advice.settings) == ("host_sync", None)
    assert "at train.py:7 (cudaStreamSynchronize, 24 times)" in advice.text
    assert advice.predicted_step_s == pytest.approx(0.06), (
        "the device is busy for 60 ms, the host for 50"
    )
    of_torch = replace(syncs[0], source="unknown", call="cudaEventSynchronize")
    assert first(replace(result, syncs=(of_torch,))).bottleneck == "launches", (
        "DDP's timers are not the user's"
    )
    host_bound = replace(result, syncs=(replace(syncs[0], seconds=0.02),))
    assert first(host_bound).predicted_step_s == pytest.approx(0.08), "the host alone takes 80 ms"


def test_kernels_that_cudnn_tries_in_each_step_are_named_with_the_switch() -> None:
    search = HostSync(source="unknown", call="cudaDeviceSynchronize", seconds=0.05, calls=86.0)
    result = profile(
        parts={"gaps": 0.03, "host_sync": 0.04},
        device="NVIDIA H200",
        syncs=(search,),
        searches_kernels=True,
    )
    advice = first(result)
    assert (advice.bottleneck, advice.settings) == (
        "kernel_search",
        {"train.cudnn_benchmark": "false"},
    )
    assert advice.text == (
        "cuDNN tries its kernels 50 ms of each 100 ms step, as it does for each new shape: "
        "torch.backends.cudnn.benchmark is on, and 86 calls of no line of yours wait for the device"
    )
    assert first(as_script(result)).remedy.startswith("pad to a few fixed shapes")
    assert first(replace(result, searches_kernels=False)).bottleneck == "host_sync"
    once = replace(result, syncs=(replace(search, calls=1.0),))
    assert first(once).bottleneck == "host_sync", "a synchronize of another library's"

    others = [advice.bottleneck for advice in advise(result)]
    assert "launches" not in others, "a captured step has fixed shapes"

    item = HostSync(source="train.py:7", call="cudaStreamSynchronize", seconds=0.03, calls=24.0)
    beside = replace(result, syncs=(replace(search, seconds=0.01), item))
    assert [advice.bottleneck for advice in advise(beside)][:2] == ["host_sync", "kernel_search"]


def test_gaps_without_syncs_are_captured_in_a_graph() -> None:
    result = profile(parts={"gaps": 0.04}, device="NVIDIA H200")
    assert (first(result).bottleneck, first(result).settings) == (
        "launches",
        {"train.step": "graph"},
    )
    assert "torch.compile" in first(as_script(result)).remedy
    assert advise(replace(result, settings={"train.step": "graph"})) == ()
    assert advise(replace(result, settings={"dist.mode": "fsdp"})) == (), (
        "a sharded model cannot be captured"
    )
    assert advise(replace(result, device="cpu")) == ()


def test_a_graph_has_no_gaps_of_other_phases() -> None:
    """Numpy in on_device(): it cannot be captured, and the device waits for it."""
    result = profile(
        parts={"gaps": 0.08},
        device="NVIDIA H200",
        phases_s={"on_device": 0.075, "forward": 0.02, "backward": 0.005},
    )
    (advice,) = (item for item in advise(result) if item.bottleneck == "launches")
    assert advice.cost_s == pytest.approx(0.02), "a quarter of the host's time"
    hooked = replace(result, phases_s={"hook Average": 0.075, "forward": 0.025})
    assert cost_of_launches(hooked) == pytest.approx(0.02)


def cost_of_launches(result: ProfileResult) -> float:
    return sum(item.cost_s for item in advise(result) if item.bottleneck == "launches")


def test_gaps_beside_communication_are_all_a_graphs() -> None:
    result = profile(
        parts={"gaps": 0.04, "exposed_communication": 0.05},
        device="NVIDIA H200",
        phases_s={"forward": 0.02, "backward": 0.03, "communication, exposed": 0.05},
    )
    assert cost_of_launches(result) == pytest.approx(0.04)


def test_a_graph_has_no_waits_and_no_python_of_the_user() -> None:
    """A captured step would not run them at all."""
    sleeping = LineCost(phase="forward", source="t.py:3", function="loss", seconds=0.07, own_s=0.07)
    result = profile(
        parts={"gaps": 0.08},
        device="NVIDIA H200",
        phases_s={"forward": 0.08, "backward": 0.02},
        lines=(sleeping,),
    )
    assert advise(result)[0].bottleneck == "python"
    assert cost_of_launches(result) == pytest.approx(0.024)
    calling = replace(sleeping, operations=1000.0)
    assert cost_of_launches(replace(result, lines=(calling,))) == pytest.approx(0.08)


def test_memory_that_is_returned_in_each_step_is_not_read_by_the_host() -> None:
    syncs = (
        HostSync(source="unknown", call="cudaMalloc", seconds=0.03, calls=190.0),
        HostSync(source="unknown", call="cudaFree", seconds=0.02, calls=190.0),
    )
    emptied = LineCost(
        phase="rest",
        source="train.py:45",
        function="main",
        text="torch.cuda.empty_cache()",
        seconds=0.02,
    )
    result = profile(
        parts={"gaps": 0.01, "host_sync": 0.05},
        device="NVIDIA H200",
        syncs=syncs,
        lines=(emptied,),
    )
    advice = first(result)
    assert advice.text == (
        "the device is idle 60 ms of each 100 ms step, and the host takes memory from CUDA and returns it: cudaMalloc "
        "(190 times) and cudaFree (190 times), mostly at train.py:45, in main: torch.cuda.empty_cache()"
    )
    assert advice.remedy.startswith("leave torch.cuda.empty_cache() out of the step")
    item = HostSync(source="train.py:7", call="cudaStreamSynchronize", seconds=0.03, calls=9.0)
    taken = first(replace(result, syncs=(syncs[0], item)))
    assert taken.text.endswith(
        "the host waits for it at train.py:7 (cudaStreamSynchronize, 9 times)"
    )


def test_gaps_of_the_profiler_are_not_those_of_the_job() -> None:
    """An eager GPT on an H200, in milliseconds: compute 15.6, data 1.3 and gaps 26.8 of 43.7, but
    21.7 unprofiled."""
    parts = {"gaps": 0.0613, "data": 0.003}
    result = profile(device="NVIDIA H200", backend="nccl", parts=parts, unprofiled_step_s=0.05)
    (advice,) = (advice for advice in advise(result) if advice.bottleneck == "launches")
    assert advice.text == "the device waits 11 ms of each 50 ms step for the host to launch kernels"
    assert advice.band == (pytest.approx(0.0387), pytest.approx(0.0444, abs=1e-3))


def test_fp32_on_a_gpu_is_the_last_advice() -> None:
    kernels = (Kernel(name="sm80_xmma_gemm_f32f32", seconds=0.06, calls=3.0),)
    result = profile(parts={"gaps": 0.02}, device="NVIDIA H200", kernels=kernels)
    assert [advice.bottleneck for advice in advise(result)] == ["launches", "fp32"]
    assert advise(result)[-1].settings == {"train.precision": "bf16"}
    assert [advice.bottleneck for advice in advise(replace(result, precision="bf16"))] == [
        "launches"
    ]
    assert [advice.bottleneck for advice in advise(as_script(result))] == ["launches", "fp32"]


@pytest.mark.parametrize(
    "name",
    [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
        "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn",
        "ampere_h16816gemm_128x64_ldg8_stages_64x3_tn",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, __half>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, gemm>",
    ],
)
def test_a_script_under_autocast_is_not_told_to_use_it(name: str) -> None:
    kernels = (Kernel(name=name, seconds=0.06, calls=3.0),)
    assert advise(as_script(profile(device="NVIDIA H200", kernels=kernels))) == ()


def test_the_most_expensive_bottleneck_is_first() -> None:
    parts = {"data": 0.02, "exposed_communication": 0.04}
    advice = advise(profile(parts=parts, buckets=(bucket(8 * MIB, 0.001, 0.048),)))
    assert [entry.bottleneck for entry in advice] == ["network", "network", "data"]


def test_the_advice_in_lines() -> None:
    assert list(advice_lines(advise(profile(parts={"data": 0.06})))) == [
        "1. data: a rank waits 60 ms of each 100 ms step for its batch",
        "   try --data.workers 2",
        (
            "   should bring 40 ms a step (36 ms to 52 ms): a batch takes 60 ms to load; workers load 2 at once; the "
            "rest takes 40 ms"
        ),
    ]


def test_small_buckets_say_little_of_the_bandwidth() -> None:
    """Larger ones may take longer by chance: with 6 kB in 10 ms a MB would take seconds."""
    buckets = [bucket(600, 0.0, 0.001)] * 10 + [bucket(6000, 0.0, 0.01)] * 10
    (fitted,) = fit_costs(buckets, network_bytes_per_s=None, world_size=2)
    assert fitted(MIB) < 0.1
    assert fitted.latency_s > 0.004


def test_latency_and_bandwidth_are_told_apart_by_buckets_of_different_size() -> None:
    cost = ReduceCost(latency_s=0.002, s_per_byte=1e-9)
    sizes = (1 << 10, 1 << 16, 1 << 20, 25 << 20)
    buckets = [bucket(size, 0.0, cost(size)) for size in sizes]
    (fitted,) = fit_costs(buckets, network_bytes_per_s=None, world_size=2)
    assert fitted.latency_s == pytest.approx(0.002)
    assert fitted.s_per_byte == pytest.approx(1e-9)


def test_buckets_of_one_size_leave_it_open_unless_doctor_has_measured() -> None:
    buckets = [bucket(10_000, 0.0, 0.004)] * 3
    fastest, slowest = fit_costs(buckets, network_bytes_per_s=None, world_size=2)
    assert (fastest.latency_s, fastest.s_per_byte) == (pytest.approx(0.004), 0.0)
    assert slowest.latency_s == pytest.approx(0.0032), "10 kB at 100 Mbit/s take 0.8 ms"
    assert slowest(10_000) == pytest.approx(0.004)
    (known,) = fit_costs(buckets, network_bytes_per_s=1e7, world_size=2)
    assert known.latency_s == pytest.approx(0.003)


def test_large_buckets_of_one_size_are_mostly_bytes() -> None:
    likely, least = fit_costs([bucket(8 * MIB, 0.0, 0.04)], network_bytes_per_s=None, world_size=2)
    assert (likely.latency_s, least.latency_s) == (pytest.approx(0.0), pytest.approx(0.02))


def test_the_bus_bandwidth_of_buckets_together_is_that_of_their_bytes() -> None:
    small = bucket(1_000, 0.0, 0.001)
    large = bucket(8_000, 0.0, 0.002)
    assert bus_bytes_per_s([small, large], 4) == pytest.approx(1.5 * 9_000 / 0.003)
    assert bus_bytes_per_s([bucket(1_000, 0.0, 0.0)], 4) == 0.0, "not known"


@given(
    sizes=st.lists(st.integers(1, 4 * MIB // 4), min_size=1, max_size=60),
    cap_bytes=st.integers(1, 16 * MIB),
    first_bytes=st.one_of(st.none(), st.just(FIRST_BYTES)),
)
def test_planned_buckets_are_those_of_ddp(
    sizes: list[int], cap_bytes: int, first_bytes: int | None
) -> None:
    """Whole tensors, by torch's own function."""
    gradients = [torch.empty(size, device="meta") for size in sizes]
    limits = [cap_bytes] if first_bytes is None else [first_bytes, cap_bytes]
    assigned, _ = dist._compute_bucket_assignment_by_size(gradients, limits)
    plan = filled([4 * size for size in sizes], cap_bytes, first_bytes=first_bytes)
    assert [list(bucket) for bucket in plan] == assigned


def test_a_bucket_is_ready_with_the_last_of_its_tensors() -> None:
    """The second one is ready after the third, which DDP saw in another order at first."""
    tensors = [
        ReadyGradients(num_bytes=MIB, compute_s=compute_s, host_s=0.5)
        for compute_s in (0.1, 0.4, 0.3, 0.5)
    ]
    plan = planned(tensors, 3 * MIB)
    assert [(bucket.num_bytes, bucket.ready_s) for bucket in plan] == [(3 * MIB, 0.9), (MIB, 1.0)]


def test_buckets_of_half_the_bytes_are_twice_as_many_gradients() -> None:
    """The size of a bucket counts gradients, of which bf16 sends half."""
    buckets = [bucket(20 * MIB, 0.04, 0.02), bucket(20 * MIB, 0.08, 0.02)]
    tensors = [ReadyGradients(num_bytes=5 * MIB, compute_s=0.01 * number) for number in range(8)]
    plans = [
        {cap: total for cap, _, total in exposed_by_cap(tensors, part, lambda size: size / MIB)}
        for part in (1.0, 0.5)
    ]
    assert (plans[0][10.0], plans[1][10.0]) == (pytest.approx(40), pytest.approx(20))
    halved = profile(buckets=tuple(buckets))
    joined = backward_gradients(halved, 0.5)
    assert [gradients.num_bytes for gradients in joined] == [40 * MIB, 40 * MIB]
    settings = {"dist.comm": "powersgd", "train.batch_size": "64"}
    parts = {"exposed_communication": 0.05}
    (larger,) = advise(
        profile(parts=parts, settings=settings, buckets=tuple(buckets), bucket_cap_mb=0.01)
    )
    assert larger.samples_factor > 1, (
        "what PowerSGD sends is not in proportion to the size of its buckets"
    )
    unknown = [bucket(0, 0.04, 0.02)] * 2
    (larger,) = advise(profile(parts=parts, buckets=tuple(unknown)))
    assert larger.text == "50 ms of each 100 ms step is exposed communication"


def test_what_is_reduced_after_the_last_gradient_is_exposed() -> None:
    assert exposed_s([(0.01, 0.0), (0.01, 0.03)]) == pytest.approx(0.01)
    assert exposed_s([(0.05, 0.0), (0.01, 0.03)]) == pytest.approx(0.03), (
        "the second waits for the first"
    )


@pytest.mark.parametrize(
    ("planted", "bottleneck", "settings"),
    [
        ("slow", "slow_rank", None),
        ("item", "host_sync", None),
        ("syncbn", "other_collectives", {"dist.sync_batchnorm": "false"}),
        ("tiny", "bucket_size", {"dist.bucket_cap_mb": "25"}),
    ],
)
def test_what_was_planted_on_a_gpu_is_named_first(
    planted: str, bottleneck: str, settings: dict[str, str] | None
) -> None:
    """Profiles of two NCCL ranks on an H200, of a small convolutional network; rank 1 slept in
    `slow`."""
    result = read_profile(Path(__file__).parents[2] / "data" / "profiles" / f"h200-{planted}.json")
    assert sum(result.parts_s.values()) == pytest.approx(result.step_s, rel=0.02)
    assert (first(result).bottleneck, first(result).settings) == (bottleneck, settings)


def test_waits_in_many_all_reduces_go_with_them() -> None:
    """60 tiny buckets on two NCCL ranks that share an H200: rank 1 joins each all-reduce late,
    though its own work is no longer. In buckets of 25 MB the step took 0.114 of the time, with
    eight times the samples 0.196."""
    advice = advise(
        read_profile(Path(__file__).parents[2] / "data" / "profiles" / "h200-late.json")
    )
    measured = {"dist.bucket_cap_mb": 0.114, "train.batch_size": 0.196}
    for entry in advice[:2]:
        low, high = entry.band
        assert low <= measured[next(iter(entry.settings or {}))] * entry.step_s <= high, entry
    assert "for rank 1 on gpu-1, whose own work takes no longer" in advice[2].text
