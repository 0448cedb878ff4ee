"""What slows a step down and what to change, from the numbers of a profile: the most expensive
bottleneck first, each with a prediction, its band and how it was derived. No torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median

from drumline.base.text import bit_rate, file_size, latency, plural
from drumline.report.profile.bottleneck import (
    CRITICAL_SHARE,
    MIN_GAIN,
    OWN_PARTS,
    USUAL_CORES,
    Advice,
    Savings,
    SlowRank,
    blame,
    by_setting,
    crowding_s,
    find_slow_rank,
    is_gpu,
    is_script,
    of_step,
    removable,
    slower_line,
)
from drumline.report.profile.bucket_plan import (
    ReduceCost,
    backward_gradients,
    exposed_by_cap,
    exposed_s,
    fit_costs,
)
from drumline.report.profile.host_advice import (
    MIN_PYTHON,
    at_line,
    first_line,
    host_rules,
    is_waiting,
    more_workers,
    mostly_at,
)
from drumline.runs.profile_files import BUFFERS
from drumline.runs.profile_result import (
    Bucket,
    ProfileResult,
    RankSteps,
    bus_bytes_per_s,
    sent_part,
)

MIN_COST_TO_TRAIN_OTHERWISE = 0.15
"""Of the step."""
MAX_WORKERS = 16
WORKERS_PER_CORE = 4
MATRIX_KERNELS = re.compile(r"gemm|conv|cutlass|winograd|wgrad|dgrad|fprop|mma", re.IGNORECASE)
HALF_KERNELS = re.compile(r"fp?16|float16|half|_h\d*gemm", re.IGNORECASE)  # already in bf16 or fp16
# Of such kernels in bf16, as times of fp32.
USUAL_BF16_SPEED = 3.0
MOST_BF16_SPEED = 8.0
LEAST_BF16_SPEED = 1.2
MAX_ACCUMULATE = 8
# of the work of a rank with one core: what threads of many all-reduces took from it, at most
ONE_CORE = 0.3
SLOWER_LINK = 0.6  # of what doctor measured


def advise(result: ProfileResult) -> tuple[Advice, ...]:
    """The advice that promises more than MIN_GAIN of the step, the most expensive bottleneck
    first. What changes the training is last, unless it is all that helps against that one."""
    result = _without_profiler(result)
    result = replace(result, step_s=result.step_s + sum(result.pauses_s.values()))
    rules = (
        _data,
        _ranks,
        communication_rules,
        _buffers,
        other_collectives_rules,
        _device_idles,
        host_rules,
        _float64,
        _fp32,
    )
    advice_of_rules = [
        replace(item, step_s=result.step_s) for rule in rules for item in rule(result)
    ]
    worth = [advice for advice in advice_of_rules if _is_worth(advice)]
    largest_s = max((advice.cost_s for advice in worth), default=0.0)

    def place(advice: Advice) -> tuple[bool, float, bool]:
        is_last = advice.changes_training and advice.cost_s < largest_s
        return is_last, -advice.cost_s, advice.changes_training

    return tuple(sorted(worth, key=place))


def _is_worth(advice: Advice) -> bool:
    """What changes the training has to be worth more, unless it is no bottleneck."""
    least = MIN_COST_TO_TRAIN_OTHERWISE if advice.changes_training and advice.cost_s else 0.0
    return (
        advice.saved_s.likely > MIN_GAIN * advice.step_s and advice.cost_s >= least * advice.step_s
    )


def _without_profiler(result: ProfileResult) -> ProfileResult:
    """On a GPU the profiler takes time from the host that launches kernels, so the device waits
    longer: the step and its gaps without that time."""
    gaps = result.parts_s["gaps"]
    unprofiled_s = result.unprofiled_step_s
    if not is_gpu(result) or unprofiled_s is None:
        return result

    extra = min(gaps, max(0.0, result.step_s - unprofiled_s))
    return replace(
        result, step_s=result.step_s - extra, parts_s={**result.parts_s, "gaps": gaps - extra}
    )


def _without_worker_starts(result: ProfileResult) -> ProfileResult:
    """Their start, and the wait for their first batch, have advice of their own."""
    if result.worker_starts is None:
        return result
    data_s = result.parts_s["data"]
    start_s = min(data_s, result.worker_starts.seconds)
    parts_s = {**result.parts_s, "data": data_s - start_s}
    return replace(result, step_s=result.step_s - start_s, parts_s=parts_s)


def _data(result: ProfileResult) -> Iterator[Advice]:
    """Several processes make several batches at once, as far as there are cores for what loading
    computes; the rest of the step remains."""
    running = _without_worker_starts(result)
    waited = running.parts_s["data"]
    if waited < MIN_GAIN * result.step_s:
        return

    loading = Loading.of(running)
    text = f"a rank waits {of_step(result, waited)} for its batch"
    if loading.workers:
        text += (
            f", which {plural(loading.workers, 'worker')} load{'s' if loading.workers == 1 else ''}"
        )
    line = first_line(result, "data")
    if line is not None:
        text += f"; it {'waits' if is_waiting(line) else 'computes'} mostly at {at_line(line)}"
    likely = loading.saved_s(1.0 if loading.load is None else min(1.0, loading.load))
    if loading.more_workers <= loading.workers or likely < MIN_GAIN * result.step_s:
        if waited < MIN_PYTHON * result.step_s:
            return
        on = f"{loading.cores:.3g} core{'' if loading.cores == 1 else 's'} a rank"
        remedy = f"more workers bring nothing on {on}: store samples decoded and resized"
        yield removable("data", text, remedy, waited, what="the wait")
        return

    most_s = loading.saved_s(0.0)
    if loading.load is not None:
        most_s = likely + 0.1 * (result.step_s - likely)
    yield Advice(
        bottleneck="data",
        text=text,
        **more_workers(result, loading.more_workers),
        cost_s=waited,
        saved_s=Savings(likely, most_s, 0.8 * likely),
        derivation=f"a batch takes {latency(loading.batch_s)} to load; workers load {loading.more_workers} at once; "
        f"the rest takes {latency(loading.working_s)}",
    )


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a rank loads its batches, and how many workers would."""

    workers: int
    load: float | None
    """How much of a core loads a batch; None: not known."""
    batch_s: float
    """How long one process takes for a batch."""
    working_s: float
    """The step without the wait."""
    cores: float
    computes_s: float
    """The part of the step that needs a core."""
    more_workers: int

    @classmethod
    def of(cls, result: ProfileResult) -> Loading:
        """From the wait, the workers and the cores of a profile."""
        waited = result.parts_s["data"]
        working_s = result.step_s - waited
        workers = int(result.settings.get("data.workers", "0"))
        load = result.loading_cores
        line = first_line(result, "data")
        if result.workers is not None:
            workers = result.workers.number
            load = result.workers.cores / workers
        elif line is not None and line.own_s > waited / 2:
            # With the time in the queue for a core, which `loading_cores` leaves out.
            load = line.cpu_s / max(line.own_s, 1e-9)

        batch_s = workers * result.step_s if workers else waited
        cores = result.cores_per_rank or USUAL_CORES
        is_storage = load is not None and load < 0.5
        most = max(1, min(MAX_WORKERS, int(cores * WORKERS_PER_CORE if is_storage else cores)))
        if cores <= 1 and load is not None and not is_storage and not is_gpu(result):
            most = 0  # the training needs the core

        return cls(
            workers=workers,
            load=load,
            batch_s=batch_s,
            working_s=working_s,
            cores=cores,
            computes_s=0.0 if is_gpu(result) else working_s,
            more_workers=min(most, math.ceil(1.2 * batch_s / max(working_s, 1e-9))),
        )

    def saved_s(self, load: float) -> float:
        """By more workers that each keep so much of a core busy."""
        if self.more_workers <= self.workers:
            return 0.0

        all_cores_s = (self.computes_s + load * self.batch_s) / self.cores
        waited_s = (
            self.batch_s if not self.workers else self.batch_s / self.workers - self.working_s
        )
        step_s = self.working_s + waited_s
        return step_s - max(self.working_s, self.batch_s / self.more_workers, all_cores_s)


def _ranks(result: ProfileResult) -> Iterator[Advice]:
    """One rank for which the others wait, or ranks that are late in turn."""
    if len(result.ranks) < 2:
        return
    slow = find_slow_rank(result)
    yield _uneven_ranks(result) if slow is None else _slow_rank(result, slow)


def _uneven_ranks(result: ProfileResult) -> Advice:
    """Advice against waits for ranks that are late in turn."""
    for_cores_s = fmean(crowding_s(rank, result) for rank in result.ranks)
    waiting = max(0.0, result.parts_s["waiting_for_rank"] - for_cores_s)
    late = max(result.ranks, key=lambda rank: blame(rank, result))
    whom = "one another, and not always for the same rank"
    remedy = "give ranks batches of about the same cost"
    if blame(late, result) >= CRITICAL_SHARE:
        whom = f"rank {late.rank} on {late.host}, whose own work takes no longer"
        remedy = "it joins collectives late: look for what else uses its device and its cores"

    return Advice(
        bottleneck="uneven_ranks",
        text=f"ranks wait {of_step(result, waiting)} for {whom}",
        remedy=f"{remedy}, and use hosts without other jobs",
        cost_s=waiting,
        saved_s=Savings(waiting / 2, waiting, 0.0),
        derivation="without any of the wait at best",
    )


def _slow_rank(result: ProfileResult, slow: SlowRank) -> Advice:
    """Advice against a rank whose own work takes longer."""
    rank = slow.steps
    usual = {part: median(peer.parts_s[part] for peer in slow.peers) for part in OWN_PARTS}
    part = max(OWN_PARTS, key=lambda name: rank.parts_s[name] - usual[name])
    line = slower_line(slow)
    remedy = (
        "look there for other jobs, thermal limits and slow storage (drumline doctor --hosts compares hosts); "
        "if its hardware is slower, --data.balance auto gives it fewer samples"
    )
    if line is not None:
        remedy = "the other ranks do not run this line for as long: find out why this one does"

    return Advice(
        bottleneck="slow_rank",
        text=f"rank {rank.rank} on {rank.host} {OWN_PARTS[part]} {latency(rank.parts_s[part])} a step"
        f"{mostly_at(line)}, the others {latency(usual[part])}: they wait {of_step(result, slow.cost_s)} for it",
        remedy=remedy,
        cost_s=slow.cost_s,
        saved_s=Savings(slow.cost_s, slow.waited_s, slow.cost_s / 2),
        derivation=f"if it took as long as the others; they wait for it in {_late_steps(rank)} of "
        f"{plural(result.num_steps, 'step')}",
    )


def _late_steps(rank: RankSteps) -> int:
    """In how many steps the others waited for it, and not for a moment only."""
    if not rank.waited_for_s:
        return rank.critical_steps
    return sum(seconds > max(rank.waited_for_s) / 4 for seconds in rank.waited_for_s)


def _device_idles(result: ProfileResult) -> Iterator[Advice]:
    """A GPU idles while the host prepares its next kernels: a host that never waits for the device
    runs ahead of it, and a captured graph needs no host."""
    if not is_gpu(result):
        return

    step_s = result.step_s
    gaps = result.parts_s["gaps"]
    idle = gaps + result.parts_s["host_sync"]
    # Torch itself waits for events, in DDP's own timers: nobody can change that.
    of_torch = ("unknown", "cudaEventSynchronize")
    syncs = [sync for sync in result.syncs if (sync.source, sync.call) != of_torch]
    blocked = sum(sync.seconds for sync in syncs)
    gained = min(idle, blocked)
    can_capture = result.settings.get("dist.mode", "ddp") == "ddp"  # no sharded model

    if gained > max(MIN_GAIN * step_s, idle / 4):
        lines = ", ".join(
            f"{sync.source} ({sync.call}, {sync.calls:.3g} times)" for sync in syncs[:3]
        )
        yield Advice(
            bottleneck="host_sync",
            text=f"the device is idle {of_step(result, idle)}, and the host waits for it at {lines}",
            remedy="leave numbers on the device there, and read them every so many steps",
            cost_s=idle,
            saved_s=Savings(gained, idle, max(idle - gaps, gained / 3)),
            derivation=f"the device is busy for {latency(step_s - idle)} and the host for "
            f"{latency(step_s - blocked)}: the longer remains",
        )
    elif result.settings.get("train.step") not in ("graph", "compiled_graph") and can_capture:
        yield Advice(
            bottleneck="launches",
            text=f"the device waits {of_step(result, gaps)} for the host to launch kernels",
            **by_setting(
                result,
                {"train.step": "graph"},
                script='capture the step: torch.compile(mode="reduce-overhead")',
            ),
            cost_s=gaps,
            saved_s=Savings(0.8 * gaps, gaps, gaps / 2),
            derivation="a captured step has few gaps between its kernels",
        )


def _is_float64(result: ProfileResult) -> bool:
    """Whether most of the parameters are."""
    optimizer = result.optimizer
    return optimizer is not None and optimizer.float64_bytes > optimizer.num_bytes / 2


def _float64(result: ProfileResult) -> Iterator[Advice]:
    """Its numbers have twice the bytes; a CPU computes half as many at once, many GPUs far fewer."""
    if not _is_float64(result):
        return

    compute_s = result.parts_s["compute"]
    cost_s = compute_s / 2
    yield Advice(
        bottleneck="float64",
        text=f"the model's parameters are float64, in which it computes {of_step(result, compute_s)}",
        remedy="call .float() on the model and on its data (autocast and --train.precision leave float64 as it is)",
        changes_training=True,
        cost_s=cost_s,
        saved_s=Savings(cost_s, 1.5 * cost_s, 0.5 * cost_s),
        derivation="float32 has half the bytes, and takes half the time",
    )


def _fp32(result: ProfileResult) -> Iterator[Advice]:
    """No bottleneck, so it is last."""
    if not is_gpu(result) or result.precision not in (None, "fp32") or _is_float64(result):
        return

    products = [kernel for kernel in result.kernels if MATRIX_KERNELS.search(kernel.name)]
    seconds = sum(kernel.seconds for kernel in products if not HALF_KERNELS.search(kernel.name))
    saved_s = Savings(
        likely=seconds * (1 - 1 / USUAL_BF16_SPEED),
        most=seconds * (1 - 1 / MOST_BF16_SPEED),
        least=seconds * (1 - 1 / LEAST_BF16_SPEED),
    )
    yield Advice(
        bottleneck="fp32",
        text=f"matrix products and convolutions compute {of_step(result, seconds)}",
        **by_setting(
            result,
            {"train.precision": "bf16"},
            script="in fp32, use torch.autocast(dtype=torch.bfloat16)",
            task="compare the losses",
        ),
        changes_training=True,
        cost_s=0.0,
        saved_s=saved_s,
        derivation=f"they are {LEAST_BF16_SPEED:g} to {MOST_BF16_SPEED:g} times as fast in bf16",
    )


# Communication: the size of buckets, the bytes of gradients, how often they are reduced, and the
# collectives besides them


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


def communication_rules(result: ProfileResult) -> Iterator[Advice]:
    """Another bucket size against latency, fewer bytes against bandwidth, fewer all-reduces against
    both."""
    exposed, _ = _exposed_s(result)
    if result.reductions > 1:
        yield _one_reduction(result, exposed)
    elif result.buckets and exposed:
        advice = [_fewer_all_reduces(result, exposed)]
        if all(bucket.num_bytes for bucket in result.buckets):
            advice = [*_fewer_bytes(result, exposed), *advice, *_other_bucket_size(result, exposed)]
        yield from sorted(advice, key=_preference, reverse=True)


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


def _other_bucket_size(result: ProfileResult, exposed: float) -> Iterator[Advice]:
    """The size with the least exposed time, if it is not the present one."""
    part = sent_part(result.settings)
    if part is None:
        return

    buckets = result.buckets
    total = sum(bucket.reduce_s for bucket in buckets)
    costs = fit_costs(
        buckets, network_bytes_per_s=result.network_bytes_per_s, world_size=result.world_size
    )
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


def _fewer_bytes(result: ProfileResult, exposed: float) -> Iterator[Advice]:
    """Gradients in half the bytes."""
    if is_script(result) or result.settings.get("dist.comm", "none") != "none":
        return

    costs = fit_costs(
        result.buckets, network_bytes_per_s=result.network_bytes_per_s, world_size=result.world_size
    )
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


def other_collectives_rules(result: ProfileResult) -> Iterator[Advice]:
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
        saved_s=Savings((exposed + cost_s) / 2, cost_s, exposed / 2),
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
