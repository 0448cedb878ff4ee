"""A bottleneck of a step, with what to do about it, what that should bring, and the words for it;
and what the rules that find bottlenecks (advice.py, communication_advice.py) share. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

from drumline.base.text import latency
from drumline.runs.profile_result import ProfileResult, RankSteps

Bottleneck = Literal[
    "data",
    "bucket_size",
    "network",
    "slow_rank",
    "uneven_ranks",
    "host_sync",
    "other_collectives",
    "launches",
    "fp32",
]
MIN_GAIN = 0.03
"""Advice that promises less of the step is not given."""
CRITICAL_SHARE = 0.8
"""Of the steps: the others wait for this one rank, not for whichever is late by chance."""
OWN_PARTS = {
    "compute": "computes",
    "data": "waits for data",
    "host_sync": "waits for its device",
    "gaps": "is idle",
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
        return self.step_s - self.saved_s.likely

    @property
    def band(self) -> tuple[float, float]:
        """The shortest and the longest step that the prediction allows."""
        saved_s = self.saved_s
        shortest = self.step_s - max(saved_s.likely, saved_s.most)
        longest = self.step_s - min(saved_s.likely, saved_s.least)
        return shortest, longest


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
    for number, item in enumerate(advice, start=1):
        yield f"{number}. {item.bottleneck.replace('_', ' ')}: {item.text}"
        flags = f"try {flags_of(item.settings)}" if item.settings else ""
        yield f"   {'; '.join(filter(None, [flags, item.remedy]))}"
        low, high = map(latency, item.band)
        yield f"   should bring {latency(item.predicted_step_s)} a step ({low} to {high}): {item.derivation}"


def of_step(result: ProfileResult, seconds: float) -> str:
    """`42 ms of each 60 ms step`."""
    return f"{latency(seconds)} of each {latency(result.step_s)} step"


def is_script(result: ProfileResult) -> bool:
    return result.batch_size is None


def is_gpu(result: ProfileResult) -> bool:
    return result.device != "cpu"


def _busy_s(rank: RankSteps) -> float:
    """The step without what it spends in collectives."""
    return sum(rank.parts_s[part] for part in OWN_PARTS)


@dataclass(frozen=True, slots=True)
class SlowRank:
    """The rank for which the others wait in most steps since its own work takes longer."""

    steps: RankSteps
    peers: Sequence[RankSteps]
    cost_s: float
    waited_s: float
    """How long the others wait for any rank."""


def find_slow_rank(result: ProfileResult) -> SlowRank | None:
    if len(result.ranks) < 2:  # one rank, or the only one whose trace can be read
        return None
    slow = max(result.ranks, key=lambda rank: (rank.critical_steps, _busy_s(rank)))
    peers = [rank for rank in result.ranks if rank is not slow]
    waited_s = sum(peer.parts_s["waiting_for_rank"] for peer in peers) / len(peers)
    cost_s = min(_busy_s(slow) - median(map(_busy_s, peers)), waited_s)
    if slow.critical_steps < CRITICAL_SHARE * result.num_steps or cost_s < MIN_GAIN * result.step_s:
        return None
    return SlowRank(slow, peers, cost_s, waited_s)
