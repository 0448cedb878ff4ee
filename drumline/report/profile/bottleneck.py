"""A bottleneck of a step, with what to do about it, what that should bring, and the words for it;
and what the rules that find bottlenecks (advice.py, communication_advice.py) share. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

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
CRITICAL_SHARE = (
    0.8  # of the steps: the others wait for this one rank, not for whichever is late by chance
)
OWN_PARTS = {
    "compute": "computes",
    "data": "waits for data",
    "host_sync": "waits for its device",
    "gaps": "is idle",
}
USUAL_CORES = 8.0


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
    saved_s: tuple[float, float, float]
    """What the change should save of it: probably, at most, at least. With more samples: for as
    many as before."""
    derivation: str

    @property
    def predicted_step_s(self) -> float:
        return self.step_s - self.saved_s[0]

    @property
    def band(self) -> tuple[float, float]:
        """The shortest and the longest step that the prediction allows."""
        return self.step_s - max(self.saved_s[:2]), self.step_s - min(self.saved_s[::2])


def flags_of(settings: Mapping[str, str]) -> str:
    """`--data.workers 4`, `--no-dist.sync_batchnorm`."""
    words = {"true": "--{}", "false": "--no-{}"}
    return " ".join(
        words.get(value, f"--{{}} {value}").format(path) for path, value in settings.items()
    )


def advice_lines(found: Sequence[Advice]) -> Iterator[str]:
    """The advice as numbered lines."""
    for number, one in enumerate(found, start=1):
        yield f"{number}. {one.bottleneck.replace('_', ' ')}: {one.text}"
        flags = f"try {flags_of(one.settings)}" if one.settings else ""
        yield f"   {'; '.join(filter(None, [flags, one.remedy]))}"
        low, high = map(latency, one.band)
        yield f"   should bring {latency(one.predicted_step_s)} a step ({low} to {high}): {one.derivation}"


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


def slow_rank(result: ProfileResult) -> tuple[RankSteps, float, float] | None:
    """The rank for which the others wait in most steps since its own work takes longer, what that
    costs, and their wait."""
    if len(result.ranks) < 2:  # one rank, or the only one whose trace can be read
        return None
    slow = max(result.ranks, key=lambda one: (one.critical_steps, _busy_s(one)))
    others = [one for one in result.ranks if one is not slow]
    waited = sum(one.parts_s["waiting_for_rank"] for one in others) / len(others)
    cost = min(_busy_s(slow) - median(map(_busy_s, others)), waited)
    if slow.critical_steps < CRITICAL_SHARE * result.num_steps or cost < MIN_GAIN * result.step_s:
        return None
    return slow, cost, waited
