"""A step of DDP as events: known answers, and what must hold for any job."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.base.errors import UsageError
from drumline.runs.profile_result import Bucket
from drumline.tools.scale.network_model import Transfer
from drumline.tools.scale.scale_prediction import (
    AVERAGE,
    last_end,
    shape_of,
    slowest_pace,
    slowest_weights,
    step_s,
    typical_step_s,
)
from tests.unit.tools.scale.jobs_to_scale import MIB, make_network, make_profile


def transfers(*seconds: float) -> list[Transfer]:
    return [Transfer(alone_s=time_s, busy_s=time_s) for time_s in seconds]


def test_two_buckets_one_after_the_other() -> None:
    # Ready at 1 and 2: the second waits for the first.
    assert last_end([1.0, 2.0], transfers(3.0, 0.5), lanes=1) == pytest.approx(4.5)
    assert last_end([1.0, 2.0], transfers(0.25, 0.5), lanes=1) == pytest.approx(2.5)
    assert last_end([1.0, 2.0], transfers(0.0, 0.0), lanes=1) <= 2.0


def test_two_at_a_time_share_the_link() -> None:
    # Alone until 2 (1 s done); then each at half speed: the short one needs 1 s, then 1.5 s remain
    # for the first.
    assert last_end([1.0, 2.0], transfers(3.0, 0.5), lanes=2) == pytest.approx(4.5)
    # What waits for hops leaves the link to the other: both take as long as alone.
    waits = [Transfer(alone_s=2.0, busy_s=0.5), Transfer(alone_s=2.0, busy_s=0.5)]
    assert last_end([0.0, 0.0], waits, lanes=2) == pytest.approx(2.0)
    assert last_end([0.0, 0.0], waits, lanes=1) == pytest.approx(4.0)
    # A third starts when one of two ends.
    assert last_end([0.0, 0.0, 0.0], [*waits, waits[0]], lanes=2) == pytest.approx(4.0)


def test_a_step_of_two_buckets_has_its_known_length() -> None:
    # Ready at 0.5 and 0.9; two ranks move 1 MiB of each at 1 MiB/s. From 0.9 on each has half: the
    # first until 2.1, the second, then alone, until 2.5. The optimizer takes 0.1.
    shape = shape_of(make_profile())
    assert shape.tail_s(AVERAGE) == pytest.approx(0.1)
    assert step_s(shape, make_network(MIB), 2, 1) == pytest.approx(2.6)
    assert step_s(shape, make_network(MIB, backend="nccl"), 1, 1) == pytest.approx(1.0)
    # Hidden but for the last bucket.
    assert step_s(shape, make_network(100 * MIB), 2, 1) == pytest.approx(1.01)


def test_data_gaps_and_other_collectives_are_added() -> None:
    parts = {"data": 0.25, "gaps": 0.1, "host_sync": 0.1}
    shape = shape_of(make_profile(parts_s=parts, other_collectives=3.0))
    assert shape.alone_s == pytest.approx(1.45)
    # gaps are spread over the step
    assert [bucket.ready_s for bucket in shape.buckets] == pytest.approx([0.6, 1.08])
    # Three small all-reduces of two hops each.
    network = make_network(1e15, 0.01)
    assert step_s(shape, network, 2, 1) == pytest.approx(1.45 + 3 * 0.02 + 0.02)


def test_the_slowest_rank_sets_the_pace() -> None:
    assert slowest_weights(2, 1) == [0.5, 0.5]
    assert slowest_weights(2, 3) == [0.125, 0.875]
    shape = shape_of(make_profile(compute_s=(0.9, 1.1)))
    network = make_network(1e15)
    assert step_s(shape, network, 1, 1) == pytest.approx(1.0)
    assert step_s(shape, network, 3, 1) == pytest.approx(0.125 * 0.9 + 0.875 * 1.1)
    assert typical_step_s(shape, network, 1024, 1) == pytest.approx(1.1)
    many = shape_of(make_profile(compute_s=[1.0 + number / 1000 for number in range(500)]))
    assert len(many.paces) == 64
    assert many.paces[-1].compute == pytest.approx(1.499 / 1.2495)


def test_a_wait_in_python_is_no_longer_where_computing_is() -> None:
    """50 ms of compute that take twice as long in one step of four, and 400 ms of Python: the
    slowest of many ranks is 37.5 ms later, not 75% of 437.5."""
    computes = (0.025, 0.05, 0.025, 0.05)
    profile = make_profile(
        compute_s=computes, buckets=((4, 0.03),), parts_s={"gaps": 0.4}, step_s=0.4375
    )
    shape = shape_of(profile)
    assert shape.own_s(slowest_pace(shape, 1024)) - shape.own_s() == pytest.approx(0.0125)
    assert step_s(shape, make_network(1e15), 1024, 1) == pytest.approx(0.45, rel=1e-3)


def test_python_that_takes_longer_in_some_steps_has_a_spread_of_its_own() -> None:
    """What a rank computes and what its host does are of the same step: here the one that computes
    less waits longer."""
    profile = make_profile(
        compute_s=(0.1, 0.3), host_s=(0.6, 0.2), buckets=((4, 0.2),), parts_s={"gaps": 0.4}
    )
    shape = shape_of(profile)
    assert (shape.compute_s, shape.host_s) == pytest.approx((0.2, 0.4))
    assert shape.own_s(slowest_pace(shape, 1024)) == pytest.approx(0.7)
    assert step_s(shape, make_network(1e15), 1, 1) == pytest.approx(0.6)


def test_a_bucket_is_ready_after_what_the_host_did_before_it() -> None:
    """All of the Python is in the forward pass: the last bucket is as late as it is, and what
    follows is compute alone."""
    buckets = (Bucket(num_bytes=4, ready_s=0.9, backward_s=0.5, reduce_s=0.1, host_s=0.4),)
    shape = shape_of(replace(make_profile(parts_s={"gaps": 0.4}, host_s=(0.4,)), buckets=buckets))
    assert shape.buckets[0].ready_s == pytest.approx(1.3)
    assert shape.tail_s(AVERAGE) == pytest.approx(0.1)


def test_buckets_of_another_size_have_whole_tensors() -> None:
    """DDP splits none: a large tensor is a bucket by itself, or ends one."""
    tensors = ((MIB, 0.5), (MIB, 0.55), (8 * MIB, 0.8), (MIB // 2, 0.85), (MIB, 0.9))
    shape = shape_of(make_profile(buckets=((12 * MIB, 0.9),), tensors=tensors))
    small = shape.with_bucket_cap(1.0)
    assert [(bucket.num_bytes, bucket.ready_s) for bucket in small.buckets] == [
        (MIB, 0.5),
        (MIB, 0.55),
        (8 * MIB, 0.8),
        (MIB * 3 // 2, 0.9),
    ]
    medium = shape.with_bucket_cap(3.0)
    assert [(bucket.num_bytes, bucket.ready_s) for bucket in medium.buckets] == [
        (10 * MIB, 0.8),
        (MIB * 3 // 2, 0.9),
    ]


def test_buckets_stay_as_they_are_where_the_sizes_of_tensors_are_not_known() -> None:
    shape = shape_of(make_profile())
    assert shape.with_bucket_cap(0.1) == shape


def test_the_size_of_a_bucket_counts_gradients_not_what_is_sent() -> None:
    buckets = ((MIB, 0.6), (MIB, 0.9))
    tensors = [(MIB, 0.6), (MIB, 0.7), (MIB, 0.8), (MIB, 0.9)]
    rounded = shape_of(
        make_profile(buckets=buckets, tensors=tensors, settings={"dist.comm": "bf16"})
    )
    assert [bucket.num_bytes for bucket in rounded.with_bucket_cap(1.0).buckets] == [
        MIB // 2
    ] * 4, "4 MiB of gradients"
    factors = shape_of(
        make_profile(buckets=buckets, tensors=tensors, settings={"dist.comm": "powersgd"})
    )
    assert factors.with_bucket_cap(1.0) == factors, "its factors are not in proportion"


def test_micro_batches_communicate_once() -> None:
    shape = shape_of(make_profile()).with_accumulation(3)
    assert shape.alone_s == pytest.approx(1.0 + 2 * 0.9)
    assert [bucket.ready_s for bucket in shape.buckets] == pytest.approx([0.5 + 1.8, 0.9 + 1.8])
    assert step_s(shape, make_network(MIB), 2, 1) == pytest.approx(2.6 + 1.8)
    assert shape.with_accumulation(1).alone_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "count"),
    [({"dist.sync_batchnorm": "true"}, 12), ({"dist.sync_batchnorm": "false"}, 4), ({}, 12)],
)
def test_each_micro_batch_has_the_collectives_of_sync_batchnorm(
    settings: dict[str, str], count: float
) -> None:
    """Of a script it is not known: the more expensive case is assumed."""
    shape = shape_of(make_profile(other_collectives=4.0, settings=settings))
    assert shape.with_accumulation(3).other_collectives == count


jobs = st.lists(st.tuples(st.integers(1, 64 * MIB), st.floats(0, 0.2)), min_size=1, max_size=12)
spreads = st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8)


@given(
    buckets=jobs,
    spread=spreads,
    ranks=st.integers(1, 64),
    rate=st.floats(1e5, 1e10),
    backend=st.sampled_from(("gloo", "nccl")),
)
def test_more_ranks_and_slower_links_never_shorten_a_step(
    buckets: list[tuple[int, float]], spread: list[float], ranks: int, rate: float, backend: str
) -> None:
    mean = sum(spread) / len(spread)
    ready = accumulate(
        (0.4 + gap if not number else gap for number, (_, gap) in enumerate(buckets)), initial=0
    )
    timed = [
        (size, min(ready_s, mean))
        for (size, _), ready_s in zip(buckets, list(ready)[1:], strict=True)
    ]
    shape = shape_of(make_profile(compute_s=spread, buckets=timed))
    here = step_s(shape, make_network(rate, backend=backend), ranks, 1)
    assert here >= shape.alone_s * (1 - 1e-9)
    # NCCL's trees have a latency by whole levels, so that doubling is what is compared.
    assert step_s(shape, make_network(rate, backend=backend), 2 * ranks, 1) >= here * (1 - 1e-9)
    assert step_s(shape, make_network(rate / 2, backend=backend), ranks, 1) >= here * (1 - 1e-9)
    # All communication after all compute is the longest that a step can be.
    total = sum(step.num_bytes for step in shape.buckets) * 2 / rate + len(timed) * ranks * 1e-3
    assert here <= max(spread) / mean * shape.alone_s + total * 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"buckets": ()}, "the profile has no buckets of gradients"),
        ({"buckets": ((0, 0.5),)}, "the profile has no bytes of gradients"),
        ({"compute_s": (0.0,)}, "the profile has no compute time"),
        ({"compute_s": (float("inf"),)}, "the profile has no compute time"),
        ({"parts_s": {"gaps": float("nan")}}, "the profile has no compute time"),
    ],
)
def test_a_profile_without_what_is_needed_is_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        shape_of(make_profile(**values))  # type: ignore[arg-type]


def test_gloo_runs_two_collectives_at_a_time() -> None:
    # Both buckets are ready at 0.9 and wait for hops of 0.1 s: two each, side by side.
    shape = shape_of(make_profile(buckets=((4, 0.9), (4, 0.9))))
    assert step_s(shape, make_network(1e15, 0.1), 2, 1) == pytest.approx(0.9 + 0.2 + 0.1)
    # NCCL's one after the other, with its own latencies beside those of the link.
    assert step_s(shape, make_network(1e15, 0.1, backend="nccl"), 2, 1) == pytest.approx(
        0.9 + 0.4 + 0.1, rel=1e-3
    )


def test_what_the_profiler_took_is_not_predicted() -> None:
    shape = shape_of(make_profile(parts_s={"exposed_communication": 1.0}, unprofiled_step_s=1.8))
    assert shape.alone_s == pytest.approx(0.8)
    assert [bucket.ready_s for bucket in shape.buckets] == pytest.approx([0.4, 0.72])
    assert shape_of(make_profile(unprofiled_step_s=9.0)).alone_s == pytest.approx(1.0)
    assert shape_of(make_profile(unprofiled_step_s=0.1)).alone_s == pytest.approx(0.5)


def test_a_difference_that_steps_have_by_themselves_was_not_the_profiler() -> None:
    """Steps of 0.8 and 1.2 s: a mean that is 0.2 s shorter says nothing, one that is 0.4 s shorter
    does."""
    profile = make_profile(unprofiled_step_s=0.8)
    noisy = replace(profile.ranks[0], step_s=(0.8, 1.2) * 4)
    profile = replace(profile, ranks=(noisy,))
    assert shape_of(profile).alone_s == pytest.approx(1.0)
    assert shape_of(replace(profile, unprofiled_step_s=0.55)).alone_s == pytest.approx(0.55)


STALLED = (1.0,) * 7 + (3.0,)


@pytest.mark.parametrize(
    ("unprofiled_step_s", "alone_s"),
    [(1.0, 1.0), (1.25, 1.25), (None, 1.25)],
    ids=["other steps have none", "other steps have them, too", "no other steps"],
)
def test_a_stall_that_only_the_profiled_steps_had_is_left_out(
    unprofiled_step_s: float | None, alone_s: float
) -> None:
    profile = make_profile(unprofiled_step_s=unprofiled_step_s)
    stalled = replace(profile.ranks[0], step_s=STALLED, compute_s=STALLED)
    profile = replace(profile, ranks=(stalled,), step_s=1.25)
    assert shape_of(profile).alone_s == pytest.approx(alone_s)


def test_a_stall_that_ranks_see_in_different_steps_is_left_out() -> None:
    """The others wait for the rank that stalled one step later, where steps end with a bucket."""
    late = (2.9, *STALLED[1:])
    stalled = [
        replace(make_profile().ranks[0], step_s=steps, compute_s=steps) for steps in (STALLED, late)
    ]
    profile = replace(make_profile(unprofiled_step_s=1.0), ranks=tuple(stalled), step_s=1.5)
    assert shape_of(profile).alone_s == pytest.approx(1.0)


def test_without_a_stall_buckets_are_ready_earlier() -> None:
    profile = make_profile(unprofiled_step_s=1.0)
    stalled = replace(profile.ranks[0], step_s=STALLED, compute_s=STALLED)
    shape = shape_of(replace(profile, ranks=(stalled,), step_s=1.25))
    ready_s = [bucket.ready_s for bucket in profile.buckets]
    assert [bucket.ready_s for bucket in shape.buckets] == pytest.approx(
        [seconds / 1.25 for seconds in ready_s]
    )


@pytest.mark.parametrize(
    ("setting", "value", "what"),
    [
        ("dist.mode", "fsdp", "--dist.mode fsdp"),
        ("dist.mode", "zero1", "--dist.mode zero1"),
        ("dist.mode", "hsdp", "--dist.mode hsdp"),
        ("dist.sync", "diloco:50", "--dist.sync diloco:50"),
        ("train.exact", "elastic", "--train.exact elastic"),
    ],
)
def test_a_job_that_does_not_reduce_gradients_as_ddp_does_is_refused(
    setting: str, value: str, what: str
) -> None:
    """Also where its profile has all-reduces: hsdp has them between replicas."""
    with pytest.raises(UsageError, match=f"the profile is of a job with {what}") as error:
        shape_of(make_profile(settings={setting: value}))
    assert error.value.next_step == (
        f"measure it: drumline scale measure TASK --world 2,4 {what}, or predict it from a profile "
        f"without {what}, if the model fits so"
    )
    assert shape_of(make_profile(settings={"dist.mode": "ddp", "dist.sync": "step"}))


def test_a_script_whose_collectives_are_not_those_of_ddp_is_refused() -> None:
    sharded = make_profile(buckets=(), other_collectives=12.0)
    with pytest.raises(UsageError, match="has 12 collectives a step, none of them DDP's") as error:
        shape_of(sharded)
    assert "DistributedDataParallel" in str(error.value.next_step)
