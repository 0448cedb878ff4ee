"""Advice about communication: the size of buckets, the bytes of gradients, how often they are
reduced, and the collectives besides them. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from drumline.base.text import bit_rate, file_size, latency, plural
from drumline.report.profile.bottleneck import (
    USUAL_CORES,
    Advice,
    Savings,
    by_setting,
    crowding_s,
    find_slow_rank,
    is_gpu,
    is_script,
    mostly_at,
    of_step,
)
from drumline.report.profile.bucket_plan import (
    ReduceCost,
    backward_gradients,
    exposed_by_cap,
    exposed_s,
    fit_costs,
)
from drumline.runs.profile_files import BUFFERS
from drumline.runs.profile_result import Bucket, ProfileResult, bus_bytes_per_s, sent_part

MAX_ACCUMULATE = 8
# of the work of a rank with one core: what threads of many all-reduces took from it, at most
ONE_CORE = 0.3
SLOWER_LINK = 0.6  # of what doctor measured


def _exposed_s(result: ProfileResult) -> tuple[float, float]:
    """The exposed communication of gradients, and of other collectives: by the time that each kind
    is open outside of compute, since the parts do not tell them apart."""
    exposed = result.parts_s["exposed_communication"]
    other_collectives_s = result.other_collectives_s
    of_buckets = max(
        0.0, sum(bucket.reduce_s for bucket in result.buckets) - result.hidden_communication_s
    )
    share = of_buckets / (of_buckets + other_collectives_s) if other_collectives_s else 1.0
    return exposed * share, exposed * (1 - share)


def _reductions(result: ProfileResult) -> Iterator[Advice]:
    """Another bucket size against latency, fewer bytes against bandwidth, fewer all-reduces against
    both."""
    exposed, _ = _exposed_s(result)
    if result.reductions > 1:
        yield _one_reduction(result, exposed)
    elif result.buckets and exposed:
        uncrowded = exposed * _uncrowded(result)
        advice = [_fewer_all_reduces(result, uncrowded)]
        if all(bucket.num_bytes for bucket in result.buckets):
            costs = fit_costs(
                result.buckets,
                network_bytes_per_s=result.network_bytes_per_s,
                world_size=result.world_size,
            )
            advice = [
                *_fewer_bytes(result, uncrowded, costs),
                *advice,
                *_other_bucket_size(result, exposed, costs),
            ]
        yield from sorted(advice, key=_preference, reverse=True)


def _uncrowded(result: ProfileResult) -> float:
    """Which part of exposed communication is that of the network: on a crowded machine the threads
    of gloo wait for a core, as the ranks do."""
    if is_gpu(result):
        return 1.0
    crowded_s = fmean(crowding_s(rank, result) for rank in result.ranks)
    return max(0.0, 1 - crowded_s / result.step_s)


def _checked(result: ProfileResult) -> Iterator[Advice]:
    """Ranks compare each collective before they begin it."""
    if not result.checks_collectives:
        return

    cost_s = result.parts_s["exposed_communication"] + _wait_in_collectives_s(result)
    yield Advice(
        bottleneck="debug_level",
        text=f"TORCH_DISTRIBUTED_DEBUG is DETAIL: ranks compare each collective before they begin it, and "
        f"{of_step(result, cost_s)} is exposed communication and the wait in it",
        remedy="set it to OFF, or to DETAIL only to find an error",
        cost_s=cost_s,
        saved_s=Savings(cost_s / 2, cost_s, cost_s / 10),
        derivation="a comparison takes about as long as a small collective",
    )


def _one_reduction(result: ProfileResult, exposed: float) -> Advice:
    """For all micro-batches together."""
    times = result.reductions
    waiting = _wait_in_collectives_s(result)
    cost_s = exposed + waiting
    fewer = 1 - 1 / times
    hidden = _freed_s(result, result.hidden_communication_s, result.hidden_communication_s / times)

    return Advice(
        bottleneck="micro_batches",
        text=f"gradients are reduced {times} times in each step, in every micro-batch: {of_step(result, cost_s)} is "
        "exposed communication and the wait in it",
        remedy="run all micro-batches but the last of a step, forward and backward, in `with model.no_sync():`",
        cost_s=cost_s,
        saved_s=Savings(
            fewer * (exposed + waiting / 2), fewer * (cost_s + hidden), fewer * exposed / 2
        ),
        derivation="one reduction of the summed gradients",
    )


def _preference(advice: Advice) -> float:
    """What changes the training less is first where it brings about as much."""
    return advice.saved_s.likely * (3 if advice.samples_factor == 1 else 1)


def _other_bucket_size(
    result: ProfileResult, exposed: float, costs: Sequence[ReduceCost]
) -> Iterator[Advice]:
    """The size with the least exposed time, if it is not the present one."""
    part = sent_part(result.settings)
    if part is None:
        return

    buckets = result.buckets
    total = sum(bucket.reduce_s for bucket in buckets)
    now = exposed_s([(bucket.reduce_s, bucket.backward_s) for bucket in buckets])
    # gloo reduces several buckets at once, which the queue does not.
    scale = min(1.0, exposed / now) if now else 1.0
    # The likely cost decides on the size.
    tensors = backward_gradients(result, part)
    plans = [list(exposed_by_cap(tensors, part, cost)) for cost in costs]
    best = min(plans[0], key=lambda plan: round(plan.exposed_s / result.step_s, 2))
    cap = f"{best.cap_mb:g}"
    if best.cap_mb == result.bucket_cap_mb:
        return

    if best.reduce_s > total / 2:  # it only moves them
        exposed *= _uncrowded(result)
    place = plans[0].index(best)
    saved = [exposed - min(exposed, plan[place].exposed_s * scale) for plan in plans]
    freed = _freed_s(result, total, best.reduce_s)
    fewer = 1 - min(1.0, best.reduce_s / max(total, 1e-12))
    waiting = fewer * _wait_in_collectives_s(result)
    each = f", {latency(costs[0].latency_s)} of each latency" if len(costs) == 1 else ""
    derivation = (
        f"all-reduces take {latency(total)}{each}; in buckets of {cap} MB {latency(best.reduce_s)}, "
        f"{latency(best.exposed_s * scale)} of it exposed"
    )
    if waiting:
        derivation += ", and less waiting in them"
    yield Advice(
        bottleneck="bucket_size" if saved[0] > exposed / 2 else "network",
        text=f"{of_step(result, exposed)} is exposed communication, in {plural(len(buckets), 'bucket')} of "
        f"{file_size(sum(bucket.num_bytes for bucket in buckets) / len(buckets))}",
        **by_setting(
            result,
            {"dist.bucket_cap_mb": cap},
            script=f"pass bucket_cap_mb={cap} to DistributedDataParallel",
        ),
        cost_s=exposed,
        saved_s=Savings(
            likely=saved[0] + (freed + waiting) / 2,
            most=max(saved) + freed + waiting,
            least=0.7 * min(saved),
        ),
        derivation=derivation,
    )


def _freed_s(result: ProfileResult, total: float, planned_s: float) -> float:
    """On the CPU all-reduces take time from the computing that hides them, and where a rank has one
    core, from the rest."""
    if is_gpu(result):
        return 0.0
    freed = max(0.0, min(result.hidden_communication_s, total - planned_s))
    if (result.cores_per_rank or USUAL_CORES) < 2 and planned_s < total / 2:
        freed += ONE_CORE * (result.parts_s["compute"] + result.parts_s["gaps"])
    return freed


def _on_network(result: ProfileResult, exposed: float) -> str:
    """What is exposed, with the bytes and the bandwidth."""
    size = sum(bucket.num_bytes for bucket in result.buckets)
    speed = bus_bytes_per_s(result.buckets, result.world_size)
    sent = f": {file_size(size)} of gradients at {bit_rate(speed)}" if size else ""
    return f"{of_step(result, exposed)} is exposed communication{sent}"


def _fewer_bytes(
    result: ProfileResult, exposed: float, costs: Sequence[ReduceCost]
) -> Iterator[Advice]:
    """Gradients in half the bytes."""
    if is_script(result) or result.settings.get("dist.comm", "none") != "none":
        return

    saved = [sum(_saved_by_half(bucket, cost) for bucket in result.buckets) for cost in costs]
    likely = min(exposed, saved[0])
    yield Advice(
        bottleneck="network",
        text=_on_network(result, exposed),
        remedy="gradients are rounded to bf16 before they are added: compare the losses",
        settings={"dist.comm": "bf16"},
        changes_training=True,
        cost_s=exposed,
        saved_s=Savings(0.8 * likely, min(exposed, max(saved)), 0.4 * min(likely, *saved)),
        derivation=f"half the bytes save {latency(saved[0])} of the all-reduces, less the time for rounding",
    )


def _saved_by_half(bucket: Bucket, cost: ReduceCost) -> float:
    """With half the bytes in this bucket."""
    return min(bucket.reduce_s, cost.s_per_byte * bucket.num_bytes / 2)


def _fewer_all_reduces(result: ProfileResult, exposed: float) -> Advice:
    """One all-reduce for several times as many samples."""
    speed = bus_bytes_per_s(result.buckets, result.world_size)
    doctors = result.network_bytes_per_s
    factor = 2
    while factor < MAX_ACCUMULATE and exposed / factor > 0.1 * (result.step_s - exposed):
        factor *= 2
    remedies = ["the learning rate may have to follow the larger batch"]
    if is_script(result):
        remedies = [
            f"accumulate {factor} times the samples with no_sync()",
            "or halve the bytes: model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
        ]

    if doctors and 0 < speed < SLOWER_LINK * doctors:
        remedies.append(f"doctor measured {bit_rate(doctors)}: look for what else uses the link")
    elif result.num_nodes > 1 and not doctors:
        remedies.append("drumline doctor --hosts measures the link")

    fewer = 1 - 1 / factor
    saved = fewer * exposed
    waiting = fewer * _wait_in_collectives_s(result)

    return Advice(
        bottleneck="network",
        text=_on_network(result, exposed),
        remedy="; ".join(remedies),
        settings=None if is_script(result) else _larger_batch(result, factor),
        changes_training=True,
        samples_factor=factor,
        cost_s=exposed,
        saved_s=Savings(saved + waiting / 2, min(1.3 * saved, exposed) + waiting, 0.6 * saved),
        derivation=f"one all-reduce for {factor} times the samples; the time is for as many samples as now",
    )


def _larger_batch(result: ProfileResult, factor: int) -> dict[str, str]:
    """The settings for so many times the samples in a step."""
    per_rank = "train.batch_size_per_rank"
    path = per_rank if per_rank in result.settings else "train.batch_size"
    batch_size = int(result.settings.get(path, result.batch_size or 1))
    changed = {path: str(batch_size * factor)}
    if "train.micro_batch_size" not in result.settings:
        changed["train.accumulate"] = str(result.accumulate * factor)
    return changed


def _buffers(result: ProfileResult) -> Iterator[Advice]:
    """DDP sends the buffers of rank 0 to all ranks in each forward pass, Drumline in each step."""
    if result.settings.get("train.exact") == "elastic":  # needs them
        return

    cost_s = _buffers_s(result)
    yield Advice(
        bottleneck="buffers",
        text=f"{of_step(result, cost_s)} is the broadcast of the model's buffers from rank 0 to all ranks",
        **by_setting(
            result,
            {"dist.broadcast_buffers": "false"},
            script="pass broadcast_buffers=False to DistributedDataParallel; each rank then has its own running "
            "statistics of BatchNorm",
            task="each rank then has its own running statistics of BatchNorm",
        ),
        cost_s=cost_s,
        saved_s=Savings(0.9 * cost_s, cost_s, 0.5 * cost_s),
        derivation="without it, and without the wait for other ranks in it",
    )


def _buffers_s(result: ProfileResult) -> float:
    """How long the broadcast of buffers takes, with the wait for ranks that are not slow."""
    _, exposed = _exposed_s(result)
    in_phase_s = result.communication_phases_s.get(BUFFERS, 0.0)
    return min(in_phase_s, exposed + _wait_in_collectives_s(result))


def _other_collectives(result: ProfileResult) -> Iterator[Advice]:
    """SyncBatchNorm, and the user's own. Those of Drumline itself (log lines, weights of a batch)
    are no advice."""
    _, exposed = _exposed_s(result)
    is_sync = result.has_sync_batchnorm or result.settings.get("dist.sync_batchnorm") == "true"
    waiting = min(
        result.parts_s["waiting_for_rank"], max(0.0, result.other_collectives_s - exposed)
    )
    lines = [line for line in result.collective_lines if line.phase != BUFFERS]
    cost_s = max(0.0, exposed + waiting - _buffers_s(result))
    exposed = min(exposed, cost_s)

    if lines and not is_sync:
        cost_s = min(cost_s, sum(line.seconds for line in lines))
        exposed = min(exposed, cost_s)
    elif not is_sync:
        return

    is_setting = result.settings.get("dist.sync_batchnorm") == "true"
    remedy = "call it less often, join several into one, or wait for it (async_op=True) when its result is needed"
    if is_sync:
        remedy = "BatchNorm then has the samples of one rank: at least 16 of them, or use GroupNorm"
    kinds = "SyncBatchNorm" if is_sync else _kinds(result)
    where = mostly_at(lines[0]) if not is_sync else ""
    yield Advice(
        bottleneck="other_collectives",
        text=f"{of_step(result, cost_s)} is in {result.other_collectives:.0f} collectives besides the "
        f"all-reduces of gradients{f' ({kinds})' if kinds else ''}{where}",
        remedy=remedy,
        settings={"dist.sync_batchnorm": "false"} if is_setting else None,
        changes_training=is_sync,
        cost_s=cost_s,
        saved_s=Savings((exposed + cost_s) / 2, cost_s, 0.0),
        derivation="without them, and without half to all of the wait for other ranks in them",
    )


def _kinds(result: ProfileResult) -> str:
    """`2 broadcast, 1 allgather`: the collectives of a step besides those of gradients."""
    kinds = sorted(result.other_kinds.items(), key=lambda item: -item[1])
    return ", ".join(f"{calls:.2g} {kind}" for kind, calls in kinds)


def _wait_in_collectives_s(result: ProfileResult) -> float:
    """The wait for other ranks that is not that for a slow one: each collective has a part of
    it."""
    return 0.0 if find_slow_rank(result) else result.parts_s["waiting_for_rank"]


COMMUNICATION_RULES = (_checked, _reductions, _buffers, _other_collectives)
