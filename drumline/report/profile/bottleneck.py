"""A bottleneck of a step, with what to do about it, what that should bring, and the words for it;
and what the rules that find bottlenecks (advice.py) share. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

from drumline.base.text import latency, one_line
from drumline.runs.profile_files import SampledLine, WasteKind
from drumline.runs.profile_result import (
    PAUSES,
    LineCost,
    ProfileResult,
    RankSteps,
    most_crowded,
)

Bottleneck = Literal[
    WasteKind,
    "data",
    "sampler",
    "workers",
    "worker_starts",
    "bucket_size",
    "network",
    "micro_batches",
    "buffers",
    "other_collectives",
    "slow_rank",
    "uneven_ranks",
    "host_sync",
    "kernel_search",
    "launches",
    "fp32",
    "unused_gradients",
    "python",
    "no_gradients",
    "operations",
    "gradients_of_gradients",
    "own_profiler",
    "slow_modes",
    "tracers",
    "process",
    "cores",
    "debug_level",
    "on_device",
    "hook",
    "garbage_collection",
    "optimizer",
    "small_tensors",
    "log",
    "comparison",
    "evaluation",
    "save",
    "thread",
    "threads",
]
MIN_GAIN = 0.05
"""Advice that promises less of the step is not given."""
MIN_UNCERTAIN = 0.15
"""Of the step: what may be needed, or may be chance, costs as much in any job."""
CRITICAL_SHARE = 0.7
"""Of the time in which ranks wait: they wait for this one, not for whichever is late by chance."""
OWN_PARTS = {
    "compute": "computes",
    "data": "waits for data",
    "host_sync": "waits for its device",
    "gaps": "runs Python, or waits,",
}
USUAL_CORES = 8.0


class Savings(NamedTuple):
    """What a change should save of a step, in seconds."""

    likely: float
    most: float
    least: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One bottleneck, and what to do about it."""

    bottleneck: Bottleneck
    text: str
    """What was measured."""
    remedy: str = ""
    """What to do where no setting does it, or what else to know."""
    settings: Mapping[str, str] | None = None
    """The settings to try; None: no setting changes it."""
    changes_training: bool = False
    """Whether other numbers are trained with these settings."""
    samples_factor: int = 1
    """With these settings a step has this many times the samples."""
    cost_s: float
    """What the bottleneck takes of a step."""
    step_s: float = 0.0
    """The step as it is, from the profile."""
    saved_s: Savings
    """With more samples: for as many as before."""
    derivation: str

    @property
    def predicted_step_s(self) -> float:
        """The step with the change."""
        return self.step_s - self.saved_s.likely

    @property
    def band(self) -> tuple[float, float]:
        """The shortest and the longest step that the prediction allows."""
        saved_s = self.saved_s
        shortest = self.step_s - max(saved_s.likely, saved_s.most)
        longest = self.step_s - min(saved_s.likely, saved_s.least)
        return shortest, longest


def removable(
    bottleneck: Bottleneck,
    text: str,
    remedy: str,
    cost_s: float,
    *,
    what: str = "it",
) -> Advice:
    """Advice against something that a step can do without, at best."""
    return Advice(
        bottleneck=bottleneck,
        text=text,
        remedy=remedy,
        cost_s=cost_s,
        saved_s=Savings(cost_s, cost_s, 0.0),
        derivation=f"the step without {what} at best",
    )


def flags_of(settings: Mapping[str, str]) -> str:
    """`--data.workers 4`, `--no-dist.sync_batchnorm`."""
    flags = []
    for path, value in settings.items():
        if value == "true":
            flags.append(f"--{path}")
        elif value == "false":
            flags.append(f"--no-{path}")
        else:
            flags.append(f"--{path} {value}")

    return " ".join(flags)


def advice_lines(advice: Sequence[Advice]) -> Iterator[str]:
    """The advice as numbered lines."""
    if not advice:
        yield "nothing worth changing"
    for number, item in enumerate(advice, start=1):
        yield f"{number}. {item.bottleneck.replace('_', ' ')}: {item.text}"
        flags = f"try {flags_of(item.settings)}" if item.settings else ""
        changes = "this changes what is trained" if item.changes_training else ""
        yield f"   {'; '.join(filter(None, [flags, item.remedy, changes]))}"
        low, high = map(latency, item.band)
        yield f"   should bring {latency(item.predicted_step_s)} a step ({low} to {high}): {item.derivation}"


def of_step(result: ProfileResult, seconds: float) -> str:
    """`42 ms of each 60 ms step`."""
    return f"{latency(seconds)} of each {latency(result.step_s)} step"


def is_script(result: ProfileResult) -> bool:
    """Whether the job is a script, which has no settings."""
    return result.batch_size is None


def by_setting(
    result: ProfileResult,
    settings: Mapping[str, str],
    *,
    script: str,
    task: str = "",
) -> dict[str, Any]:
    """The remedy where a setting makes the change: of a script its author does, as `script` says.
    `task`: what else to know of the setting."""
    if is_script(result):
        return {"remedy": script}
    return {"remedy": task, "settings": settings}


def is_gpu(result: ProfileResult) -> bool:
    return result.device != "cpu"


def _busy_s(rank: RankSteps) -> float:
    """The step without what it spends in collectives."""
    return sum(rank.parts_s[part] for part in OWN_PARTS)


def crowding_s(rank: RankSteps, result: ProfileResult) -> float:
    """How long it waits in a step for a core of a host that all ranks share: any of them may have
    to wait there."""
    return (rank.cpu_wait_s or 0.0) if result.num_nodes == 1 else 0.0


def for_cores_s(result: ProfileResult, most: float) -> float:
    """How long the rank that waits longest for a core waits in a step, and at most this part of it."""
    crowded = most_crowded(result)
    return 0.0 if crowded is None else min(most, crowded.part) * result.step_s


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The rank for which the others wait in most steps since its own work takes longer."""

    steps: RankSteps
    peers: Sequence[RankSteps]
    cost_s: float
    waited_s: float
    """How long the others wait for any rank."""


def blame(rank: RankSteps, result: ProfileResult) -> float:
    """For how much of the time in which ranks wait they wait for this one. A single step, in which
    anything may happen, is left out; of an earlier version's profile the steps are counted."""
    if not rank.waited_for_s:
        return rank.critical_steps / result.num_steps

    worst = rank.waited_for_s.index(max(rank.waited_for_s))

    def waited_s(peer: RankSteps) -> float:
        """How long the others waited for a rank, without the worst step."""
        return sum(peer.waited_for_s[:worst]) + sum(peer.waited_for_s[worst + 1 :])

    total_s = sum(map(waited_s, result.ranks))
    return waited_s(rank) / total_s if total_s else 0.0


def find_slow_rank(result: ProfileResult) -> SlowRank | None:
    """None: no rank is late in most steps by its own work."""
    if len(result.ranks) < 2:  # one rank, or the only one whose trace can be read
        return None

    slow = max(result.ranks, key=lambda rank: (blame(rank, result), _busy_s(rank)))
    peers = [rank for rank in result.ranks if rank is not slow]
    waited_s = sum(peer.parts_s["waiting_for_rank"] for peer in peers) / len(peers)
    longer_s = _busy_s(slow) - median(map(_busy_s, peers))
    crowding = crowding_s(slow, result) - median(crowding_s(peer, result) for peer in peers)
    for_itself_s = max(longer_s - max(0.0, crowding), _more_work_s(slow, peers))
    cost_s = min(for_itself_s, longer_s, waited_s)
    if blame(slow, result) < CRITICAL_SHARE or cost_s < MIN_UNCERTAIN * result.step_s:
        return None

    return SlowRank(slow, peers, cost_s, waited_s)


def _more_work_s(slow: RankSteps, peers: Sequence[RankSteps]) -> float:
    """How long a rank takes for what it runs more than the others, as fast as it gets a CPU: a rank
    with more work also waits more for one."""
    if not slow.cpu_run_s:
        return 0.0
    more_s = slow.cpu_run_s - median(peer.cpu_run_s or 0.0 for peer in peers)
    return more_s * _busy_s(slow) / slow.cpu_run_s


def slower_line(slow: SlowRank) -> LineCost | None:
    """The line that explains most of what this rank takes longer than the others."""
    usual: dict[tuple[str, str], float] = defaultdict(float)
    for peer in slow.peers:
        for line in peer.lines:
            usual[line.phase, line.function] += line.seconds / len(slow.peers)

    def excess_s(line: LineCost) -> float:
        """How much longer this rank takes for the function of a line."""
        return line.seconds - usual[line.phase, line.function]

    # The pauses of a task are not in the step; a script's are.
    outside = set(PAUSES) - slow.steps.phases_s.keys()
    lines = [
        line
        for line in slow.steps.lines
        if line.phase not in outside and not is_call_of_torch(line)
    ]
    slower = max(lines, key=excess_s, default=None)
    return slower if slower is not None and excess_s(slower) > slow.cost_s / 2 else None


def is_call_of_torch(line: LineCost) -> bool:
    """As `loss.backward()`: it says nothing of what takes the time."""
    return line.phase in ("backward", "optimizer") and line.own_s < line.seconds / 10


def at_line(line: LineCost) -> str:
    """`train.py:7, in forward: x = x.cpu()`."""
    text = f": {one_line(line.text)}" if line.text else ""
    return f"{one_line(line.source)}, in {one_line(line.function)}{text}"


def at_sampled(line: SampledLine) -> str:
    """The same, of a line that was not sampled."""
    return one_line(f"{line.file}:{line.line}, in {line.function}: {line.source}")


def mostly_at(line: LineCost | None) -> str:
    """The end of a sentence that names a line, if there is one."""
    return "" if line is None else f", mostly at {at_line(line)}"


def is_waiting(line: LineCost) -> bool:
    """Whether it sleeps or waits, and does not compute."""
    return line.cpu_s < line.own_s / 2


def first_line(result: ProfileResult, phase: str) -> LineCost | None:
    """The costliest line of a phase."""
    lines = [line for line in result.lines if line.phase == phase]
    return max(lines, key=lambda line: line.seconds, default=None)
