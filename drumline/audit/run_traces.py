"""Reads a trace: what all ranks of one attempt wrote, by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from drumline.errors import TrainingError
from drumline.metrics.events import read_events


@dataclass(frozen=True)
class TensorHashes:
    """Hashes of all tensors after a step, by name."""

    saved: Mapping[str, str]
    unsaved: Mapping[str, str]
    """Buffers with persistent=False, which are in no checkpoint."""


@dataclass
class StepTrace:
    """One step, over all ranks."""

    step: int
    epoch: int
    samples: dict[int, tuple[int | None, str]] = field(default_factory=dict)
    """By position in the epoch's order: the sample's index, if it has one, and the hash of its bits."""
    rests: dict[tuple[int, int], str] = field(default_factory=dict)
    """By micro-batch: the hash of what belongs to no single sample."""
    num_ranks: int = 0
    """How many ranks have written it; in the last step of a killed attempt some may be missing."""
    state: TensorHashes | None = None


@dataclass(frozen=True)
class RunTrace:
    """One attempt."""

    world_size: int
    from_step: int
    start: TensorHashes
    steps: Mapping[int, StepTrace]
    evaluations: Mapping[int, Mapping[str, str]]
    """The metrics of those that came to their end, by step, each number as text that has all its bits."""

    def is_complete(self, step: int) -> bool:
        return step in self.steps and self.steps[step].num_ranks == self.world_size

    @property
    def num_samples(self) -> int:
        return sum(len(step.samples) for step in self.steps.values())

    @property
    def num_tensors(self) -> int:
        last = self.steps[max(self.steps)].state
        return 0 if last is None else sum(not name.endswith(".json") for name in last.saved)


def read_trace(folder: Path) -> RunTrace:
    """The one attempt whose trace is in this folder."""
    ranks = [list(read_events(file)) for file in sorted(folder.glob("rank-*.jsonl"))]
    if not ranks or not ranks[0] or ranks[0][0]["kind"] != "start":
        raise TrainingError(
            f"there is no trace in {folder}: the run wrote none",
            next_step="see its output, in the .log files beside its folder",
        )
    start = ranks[0][0]
    steps: dict[int, StepTrace] = {}
    for line in (line for lines in ranks for line in lines if line["kind"] == "step"):
        step = steps.setdefault(line["step"], StepTrace(line["step"], line["epoch"]))
        step.num_ranks += 1
        if "tensors" in line:
            step.state = TensorHashes(line["tensors"], line["unsaved"])
        for batch in line["batches"]:
            positions = range(batch["low"], batch["high"])
            step.rests[batch["low"], batch["high"]] = batch["rest"]
            samples = zip(batch["indices"] or [None] * len(positions), batch["samples"], strict=True)
            step.samples |= dict(zip(positions, samples, strict=True))
    evaluations = {  # as text, because NaN is not equal to itself
        line["step"]: {name: repr(value) for name, value in line["metrics"].items()}
        for line in ranks[0]
        if line["kind"] == "evaluated"
    }
    state = TensorHashes(start["tensors"], start["unsaved"])
    return RunTrace(start["world_size"], start["step"], state, dict(sorted(steps.items())), evaluations)
