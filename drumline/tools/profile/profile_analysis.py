"""From the traces of a profile to its result: reads RUN/profile, and writes profile.json and the
merged trace: one of all ranks by one clock, for https://ui.perfetto.dev.

Each rank's trace is read part by part (trace_file.py), cut down to what counts (rank_trace.py), and
compared with the others' (breakdown.py); phases and lines are from samples of its stack (phases.py).
"""

from __future__ import annotations

import gzip
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import msgspec

from drumline.base.errors import UsageError
from drumline.base.text import one_line
from drumline.base.untrusted import replacing
from drumline.runs.profile_files import (
    ALLOCATIONS,
    MERGED_FILE,
    MOST_RANKS_MERGED,
    PROFILE_FOLDER,
    ProcessUse,
    RankFacts,
    facts_path,
    read_facts,
    trace_path,
)
from drumline.runs.profile_result import (
    PARTS,
    HostSync,
    Kernel,
    ProfileResult,
    RankSteps,
    write_profile,
)
from drumline.tools.profile.breakdown import (
    CLOCK_ERROR_S,
    StepParts,
    clock_difference,
    divide_steps,
    matched,
    waiting_of,
)
from drumline.tools.profile.gradient_times import (
    buckets_of,
    calls_of,
    host_intervals,
    tensors_of,
)
from drumline.tools.profile.intervals import Intervals, clipped, length
from drumline.tools.profile.phases import (
    RankPhases,
    mean_known,
    mean_over_ranks,
    mean_phases,
    pauses_of,
    phases_of_rank,
)
from drumline.tools.profile.rank_trace import LAYERS, RankTrace, TracesByRank, from_events
from drumline.tools.profile.trace_file import (
    ON_DEVICE,
    Details,
    Event,
    TraceEntry,
    TracePart,
    columns_of,
    read_parts,
)

K = TypeVar("K", bound=Hashable)
MOST_KERNELS = 15
MOST_SYNCS = 10
MOST_RANKS = 4096
LINE_AFTER_S = 0.05
SAME_CALL_S = 50e-6
"""How long after a host sync its source line may be recorded; how soon a copy is followed by its
wait."""
OF_FIRST_RANK = (
    "world_size",
    "device",
    "backend",
    "first_step",
    "host_cpus",
    "optimizer",
    "workers",
    "has_sync_batchnorm",
    "checks_collectives",
    "searches_kernels",
    "num_threads",
    "num_passes",
    "wasted",
    "own_profiler",
    "slow_modes",
    "tracers",
)
"""What a result has as that rank knows it."""
PROCESSES = 100
"""Numbers of processes for each rank: its own, its GPU's streams. They begin at 100: Perfetto takes
0 for the idle process, and shows it last."""
EARLY_US = 3.6e9
"""An hour for what comes before the instant that all ranks share: Perfetto drops times before 0."""


def analyse(run: Path, *, network_bytes_per_s: float | None = None) -> ProfileResult:
    """The result of the traces in a run folder, which is also written there: `drumline profile` and `scale`
    read it."""
    folder = run / PROFILE_FOLDER
    with merged_trace(folder) as merged:
        facts, traces, missing = read_ranks(folder, merged)

    result = result_of(facts, traces, missing, network_bytes_per_s)
    write_profile(run, result)

    return result


def read_ranks(
    folder: Path, merged: MergedTrace
) -> tuple[dict[int, RankFacts], dict[int, RankTrace], dict[int, str]]:
    """The facts and traces that can be read, by one clock, which are also merged; and for each
    other rank, why its own cannot: `{3: 'it is incomplete'}`.

    How many ranks there are is in the facts of each: ranks without any file are then missing, too.
    """
    facts: dict[int, RankFacts] = {}
    traces: dict[int, RankTrace] = {}
    missing: dict[int, str] = {}

    ahead_s: dict[str, float] = {}
    world_size = 1
    for rank in range(MOST_RANKS):
        has_facts = facts_path(folder, rank).exists()
        if rank >= world_size and (facts or not has_facts):
            break

        try:
            facts[rank] = read_facts(folder, rank)
            world_size = max(world_size, facts[rank].world_size)
            first = next(iter(traces.values()), None)

            with closing(MergedRank(merged, rank, facts[rank].host)) as merged_rank:
                path = trace_path(folder, rank)
                traces[rank] = _read_rank(path, facts[rank], first, ahead_s, merged_rank)
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            missing[rank] = one_line(error)

    if traces:
        return {rank: facts[rank] for rank in traces}, traces, missing

    reasons = [f"rank {rank}: {reason}" for rank, reason in missing.items()]
    raise UsageError(
        f"{folder} has no trace that can be read ({'; '.join(reasons[:4])})",
        next_step="profile the job again",
    )


def _read_rank(
    path: Path,
    facts: RankFacts,
    first: RankTrace | None,
    ahead_s: dict[str, float],
    merged: MergedRank,
) -> RankTrace:
    """A trace by the clock of the first one, which is merged meanwhile.

    `ahead_s`: by how much each host's clock is ahead of that."""
    if first is not None and facts.host not in ahead_s:
        trace = from_events(columns_of(read_parts(path)))
        ahead_s[facts.host] = clock_difference(trace, first)

    def shift_s(base_ns: int) -> float:
        """What to add to times that are relative to this instant."""
        if first is None:
            return 0.0
        return (base_ns - first.base_ns) / 1e9 - ahead_s[facts.host]

    def merged_parts() -> Iterator[TracePart]:
        """The parts of the trace, each of which is merged after it has been read."""
        for part in read_parts(path):
            yield part
            merged.add(part.entries, shift_s(part.base_ns))

    columns = columns_of(merged_parts())
    trace = from_events(columns.shifted(shift_s(columns.base_ns)), facts.pauses)
    if first is None:
        ahead_s[facts.host] = 0.0

    return with_sources(trace, facts)


def result_of(
    facts: Mapping[int, RankFacts],
    traces: TracesByRank,
    missing: Mapping[int, str],
    network_bytes_per_s: float | None,
) -> ProfileResult:
    """What the ranks show together. `traces` are by one clock."""
    collectives = matched(traces, clock_error_s=CLOCK_ERROR_S)
    steps: dict[int, Sequence[StepParts]] = {}

    phases: dict[int, RankPhases] = {}
    hosts: dict[int, Intervals] = {}
    for rank, trace in traces.items():
        steps[rank] = divide_steps(rank, trace, collectives)
        phases[rank] = phases_of_rank(facts[rank], trace, waiting_of(rank, collectives))
        hosts[rank] = host_intervals(trace, len(facts[rank].bucket_bytes))

    ranks = _rank_steps(facts, steps, phases, hosts)
    buckets = buckets_of(facts, traces, collectives, hosts)

    all_steps = [step for steps_of_rank in steps.values() for step in steps_of_rank]
    all_traces = list(traces.values())
    all_facts = list(facts.values())
    first_rank = min(facts)
    first = facts[first_rank]
    first_trace = traces[first_rank]
    loads_itself = first.job.settings.get("data.workers") == "0"

    return ProfileResult(
        **vars(first.job),
        **vars(mean_over_ranks(list(phases.values()))),
        **{name: getattr(first, name) for name in OF_FIRST_RANK},
        made_at=first_trace.base_ns / 1e9 + first_trace.steps[0].start,
        num_nodes=len({rank_facts.host for rank_facts in all_facts}),
        num_steps=min(len(steps_of_rank) for steps_of_rank in steps.values()),
        step_s=fmean(fmean(rank.step_s) for rank in ranks),
        parts_s={part: fmean(rank.parts_s[part] for rank in ranks) for part in PARTS},
        hidden_communication_s=fmean(rank.hidden_communication_s for rank in ranks),
        pauses_s=mean_phases(list(map(pauses_of, all_facts))),
        ranks=tuple(ranks),
        buckets=tuple(buckets),
        reductions=reductions_of(first, len(buckets)),
        tensors=tuple(tensors_of(facts, traces, buckets, hosts)),
        other_collectives_s=fmean(step.other_s for step in all_steps),
        other_collectives=fmean(step.num_other for step in all_steps),
        other_kinds=other_kinds(all_traces),
        kernels=tuple(top_kernels(all_traces)[:MOST_KERNELS]),
        syncs=tuple(host_syncs(all_traces)[:MOST_SYNCS]),
        network_bytes_per_s=network_bytes_per_s,
        slow_modes_s=mean_known(rank_facts.slow_modes_s for rank_facts in all_facts),
        unprofiled_step_s=mean_known(rank_facts.unprofiled_step_s for rank_facts in all_facts),
        cores_per_rank=cores_per_rank(facts),
        loading_cores=first.loading_cores if loads_itself else None,
        process=_busiest_process(all_facts),
        missing_ranks={str(rank): reason for rank, reason in missing.items()},
    )


def _busiest_process(facts: Sequence[RankFacts]) -> ProcessUse | None:
    """Of all ranks, the process that used or waited for most cores; None: not recorded."""
    uses = [rank_facts.process for rank_facts in facts if rank_facts.process]
    return max(uses, key=lambda use: use.cores + use.waiting, default=None)


def cores_per_rank(facts: Mapping[int, RankFacts]) -> float | None:
    """Those of the first host, which all its ranks share: 16 cores and 8 ranks are 2; None: not known."""
    first_host = facts[min(facts)].host
    ranks = [rank_facts for rank_facts in facts.values() if rank_facts.host == first_host]
    cpus = {number for rank_facts in ranks for number in rank_facts.cpus}

    return len(cpus) / len(ranks) if cpus else None


def other_kinds(traces: Sequence[RankTrace]) -> dict[str, float]:
    """How many collectives of each kind a step has that reduce no bucket of gradients:
    `{'allgather': 2.0, 'broadcast': 0.1}`."""
    counts: Counter[str] = Counter()
    for trace in traces:
        for step in trace.steps:
            other_calls = [call for call in calls_of(trace, step) if not call.is_bucket]
            counts.update(call.kind.partition(":")[0] for call in other_calls)

    num_steps = sum(len(trace.steps) for trace in traces)
    return {kind: count / num_steps for kind, count in counts.items()}


def _rank_steps(
    facts: Mapping[int, RankFacts],
    steps_by_rank: Mapping[int, Sequence[StepParts]],
    phases: Mapping[int, RankPhases],
    hosts: Mapping[int, Intervals],
) -> list[RankSteps]:
    """Lengths of the steps of each rank, and means over them.

    A step is critical for the rank that the others waited for longest in it.
    """
    waits = waits_by_step(steps_by_rank)
    steps_with_wait = [waits_s for waits_s in waits if any(waits_s.values())]
    critical = [max(waits_s, key=waits_s.__getitem__) for waits_s in steps_with_wait]

    ranks = []
    for rank, steps in steps_by_rank.items():
        ranges = [step.step for step in steps]
        host = hosts[rank]
        ranks.append(
            RankSteps(
                rank=rank,
                host=facts[rank].host,
                step_s=tuple(step.end - step.start for step in ranges),
                compute_s=tuple(step.parts_s["compute"] for step in steps),
                host_s=tuple(length(clipped(host, step.start, step.end)) for step in ranges),
                parts_s={part: fmean(step.parts_s[part] for step in steps) for part in PARTS},
                hidden_communication_s=fmean(step.hidden_s for step in steps),
                critical_steps=critical.count(rank),
                waited_for_s=tuple(waits_s[rank] for waits_s in waits),
                cpu_wait_s=facts[rank].cpu_wait_s,
                cpu_run_s=facts[rank].cpu_run_s,
                phases_s=phases[rank].phases_s,
                lines=phases[rank].lines,
            )
        )

    return ranks


def reductions_of(facts: RankFacts, num_calls: int) -> int:
    """How often a step with so many all-reduces of buckets reduces all gradients: 8 with 4 buckets are two
    micro-batches that both do.

    With several optimizers, as of a GAN, a pass may belong to another optimizer, and is no micro-batch;
    with one pass, what is reduced besides is which parameters were used."""
    num_buckets = len(facts.bucket_bytes)
    is_single = facts.num_models == 1 and facts.num_optimizers == 1
    has_micro_batches = is_single and facts.num_passes != 1
    if not has_micro_batches or num_buckets == 0 or num_calls % num_buckets:
        return 1

    return max(1, num_calls // num_buckets)


def waits_by_step(steps_by_rank: Mapping[int, Sequence[StepParts]]) -> list[dict[int, float]]:
    """For each step, how long the other ranks waited for each rank, on average over them:
    `[{0: 0.0, 1: 0.02}, ...]`, where rank 0 waited 20 ms for rank 1 in the first step."""
    num_peers = max(1, len(steps_by_rank) - 1)
    waits = []
    for steps in zip(*steps_by_rank.values(), strict=False):
        waits_s = dict.fromkeys(steps_by_rank, 0.0)
        for step in steps:
            for last_rank, seconds in step.waited_s.items():
                waits_s[last_rank] += seconds / num_peers

        waits.append(waits_s)

    return waits


# Kernels and host synchronizations


def top_kernels(traces: Sequence[RankTrace]) -> list[Kernel]:
    """Means over steps and ranks, the longest first."""
    operations = chain.from_iterable(trace.operations for trace in traces)
    kernels = []
    for name, seconds, calls in _per_step(operations, traces):
        is_layer = LAYERS.search(name) is not None
        kernels.append(Kernel(name=name, seconds=seconds, calls=calls, is_layer=is_layer))

    return kernels


def host_syncs(traces: Sequence[RankTrace]) -> list[HostSync]:
    """Calls that wait for the device, by their line: means over steps and ranks, the longest first.

    HostSync(source='train.py:41', call='cudaStreamSynchronize', seconds=0.004, calls=2.0)
    """
    events = chain.from_iterable(trace.syncs for trace in traces)
    rows = (((event.details.source, event.name), event.end - event.start, 1) for event in events)

    return [
        HostSync(source=source, call=call, seconds=seconds, calls=calls)
        for (source, call), seconds, calls in _per_step(rows, traces)
    ]


def _per_step(
    rows: Iterable[tuple[K, float, int]], traces: Sequence[RankTrace]
) -> list[tuple[K, float, float]]:
    """The seconds and calls of each key: means over steps and ranks, the longest first."""
    seconds: dict[K, float] = defaultdict(float)
    calls: dict[K, int] = defaultdict(int)
    for key, lasts_s, count in rows:
        seconds[key] += lasts_s
        calls[key] += count

    num_steps = sum(len(trace.steps) for trace in traces)
    longest_first = sorted(seconds, key=seconds.__getitem__, reverse=True)
    return [(key, seconds[key] / num_steps, calls[key] / num_steps) for key in longest_first]


def with_sources(trace: RankTrace, facts: RankFacts) -> RankTrace:
    """The trace, with the source line of each host sync: `train.py:41`.

    torch reports a line just after the call, so that it is of the last sync before it, and of the copy
    that this one waits for."""
    # torch reports no allocations
    waits = [event for event in trace.syncs if event.name not in ALLOCATIONS]
    syncs = sorted(waits, key=lambda event: event.end)

    sources: dict[Event, str] = {}
    num_done = 0
    for reported_ns, source in sorted(facts.sync_lines):
        reported = (reported_ns - trace.base_ns) / 1e9
        last = bisect_right(syncs, reported, key=lambda event: event.end) - 1
        if last >= num_done and reported - syncs[last].end < LINE_AFTER_S:
            sources[syncs[last]] = source

            copy = syncs[last - 1]
            is_copied_before = syncs[last].start - copy.end < SAME_CALL_S
            if last > num_done and is_copied_before and copy.name.startswith("cudaMemcpy"):
                sources[copy] = source

        num_done = max(num_done, last + 1)

    named_syncs = tuple(
        event._replace(details=Details(source=sources.get(event, "unknown")))
        for event in trace.syncs
    )
    return replace(trace, syncs=named_syncs)


@contextmanager
def merged_trace(folder: Path) -> Iterator[MergedTrace]:
    """Write it beside the traces of the ranks: opened here, filled by each rank, closed at the end."""
    with (
        replacing(folder / MERGED_FILE) as file,
        gzip.open(file, "wb", compresslevel=1) as packed,
    ):
        packed.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        yield MergedTrace(packed)
        packed.write(b"\n]}\n")


class MergedTrace:
    """The entries of a document, written as they come."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file = file
        self._separator = b""

    def write(self, entries: Sequence[TraceEntry]) -> None:
        """Add entries."""
        if entries:
            self._file.write(self._separator)
            self._file.write(msgspec.json.encode(entries)[1:-1])
            self._separator = b",\n"


class MergedRank:
    """A rank's entries, with processes, flows and times that do not clash with those of other ranks. The
    process of rank 2 is number 300, its GPU's are 301 and more.

    The profiler's own rows, whose process is no number, are left out. Ids of flows stay whole numbers,
    which Perfetto needs to join them. Call `close`, also for a trace that turns out to be none."""

    def __init__(self, merged: MergedTrace, rank: int, host: str) -> None:
        self._merged = merged
        self._rank = rank
        self._host = host
        self._numbers: dict[int, int] = {}
        """The number that each process has in the merged trace."""
        self._kernels: list[TraceEntry] = []

    def add(self, entries: Sequence[TraceEntry], shift_s: float) -> None:
        """Changes the entries. Kernels wait for those that follow them on their stream."""
        if self._rank >= MOST_RANKS_MERGED:
            return

        shift_us = EARLY_US + shift_s * 1e6
        written = []
        for entry in entries:
            process = entry.pid
            is_event = entry.ph != "M"
            is_merged = entry.ts is not None if is_event else entry.name == "thread_name"
            if not isinstance(process, int) or not is_merged:
                continue

            if is_event and entry.ts is not None:
                entry.ts += shift_us
            entry.pid = self._numbers.get(process) or self._new_number(process)
            if isinstance(entry.id, int):
                entry.id += self._rank << 40

            if entry.cat in ON_DEVICE:
                # not the whole part that it was read with
                entry.args = entry.args.copy()
                self._kernels.append(entry)
            else:
                written.append(entry)

        self._merged.write(written)

    def _new_number(self, process: int) -> int:
        """The rank's own process is the first that its trace names."""
        first_number = (self._rank + 1) * PROCESSES
        number = first_number + min(len(self._numbers), PROCESSES - 1)
        self._numbers[process] = number

        return number

    def close(self) -> None:
        """Write the kernels, and the names of the processes."""
        cut_kernels(self._kernels)
        self._merged.write(self._kernels)

        names = []
        for process, number in self._numbers.items():
            gpu = f", GPU {process}" if number % PROCESSES else ""
            what = f"rank {self._rank} on {self._host}{gpu}"
            names += [
                process_fact(number, "process_name", {"name": what}),
                process_fact(number, "process_sort_index", {"sort_index": number}),
            ]

        self._merged.write(names)


def process_fact(number: int, name: str, facts: Mapping[str, Any]) -> TraceEntry:
    """An entry that names a process of the merged trace, or gives its place."""
    arguments = msgspec.Raw(msgspec.json.encode(facts))
    return TraceEntry(ph="M", name=name, pid=number, tid=0, ts=0.0, args=arguments)


def cut_kernels(kernels: list[TraceEntry]) -> None:
    """A kernel that ends after the next one of its stream has begun, which Perfetto would drop,
    lasts until that begins."""
    kernels.sort(key=lambda kernel: (kernel.pid, kernel.tid, kernel.ts))
    for kernel, following in pairwise(kernels):
        is_same_stream = (kernel.pid, kernel.tid) == (following.pid, following.tid)
        if is_same_stream and kernel.dur and kernel.ts is not None and following.ts is not None:
            kernel.dur = min(kernel.dur, following.ts - kernel.ts)
