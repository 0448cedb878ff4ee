"""Predictions and measurements of scaling, as typed documents in RUN/scale/: `scale predict` and
`scale measure` write them, `scale check` and the report read them. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from drumline.base.errors import UsageError
from drumline.base.untrusted import make_own_folder, read_record, replace_text

SCALE_FOLDER = "scale"
USUAL: Mapping[int, tuple[float, float]] = {
    2: (0.90, 0.95),
    4: (0.85, 0.95),
    8: (0.80, 0.90),
    16: (0.75, 0.90),
}
"""The efficiency that is usual for a number of ranks."""
Range = tuple[float, float, float]
"""A mean between the ends of an interval of 90%."""


def usual_efficiency(ranks: int) -> tuple[float, float] | None:
    """The usual efficiency of any number of ranks: between known numbers interpolated by the
    logarithm, above the largest as there; None: a single rank has none."""
    if ranks < min(USUAL):
        return None
    below = max(size for size in USUAL if size <= ranks)
    above = min((size for size in USUAL if size >= ranks), default=below)
    if above == below:
        return USUAL[below]
    fraction = math.log(ranks / below) / math.log(above / below)
    low, high = USUAL[below]
    next_low, next_high = USUAL[above]
    return low + fraction * (next_low - low), high + fraction * (next_high - high)


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """The flags of `scale predict`."""

    nodes: tuple[int, ...]
    gpus_per_node: int
    bucket_cap_mb: float | None = None
    accumulate: int | None = None
    checkpoint_every: int = 1000
    checkpoint_pause_s: float = 0.0
    mtbf_hours: float = 6300.0
    restart_s: float = 120.0
    price: float | None = None
    """Of a node, an hour."""
    pays_above: float = 0.5


@dataclass(frozen=True, kw_only=True)
class PredictedSize:
    """A job on some nodes; the intervals have the model's own error."""

    nodes: int
    ranks: int
    step_s: Range
    efficiency: Range
    """A rank's step alone, as a part of this step: weak scaling."""
    goodput: float
    """The part of the time that is spent on steps that are kept."""
    communication_s: float
    """Exposed communication in a step."""
    waiting_s: float
    """Waiting for the slowest rank in a step."""
    samples_per_day: float | None
    """None: the batch of a script is not known."""
    cost_per_day: float | None
    best_bucket_cap_mb: float
    best_bucket_step_s: float
    best_accumulate: int
    """The smallest that reaches the wanted efficiency, or the largest that was tried."""
    best_accumulate_efficiency: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of a job on other numbers of nodes."""

    version: int = 1
    made_at: float
    """Seconds since the epoch."""
    task: str
    device: str
    profile: str
    """Where the profile was read."""
    profile_ranks: int
    batch_per_rank: float | None
    accumulate: int
    network: str
    network_source: str
    inside: str
    inside_source: str
    alone_s: float
    """The step of a rank that waits for no other."""
    model_error: float
    is_model_compared: bool = True
    """Whether `model_error` was measured; otherwise it is assumed."""
    cpu_wait_part: float | None = None
    """The part of its steps in which a rank of the profile waited for a CPU; None: not known."""
    stops_paying: int | None
    """After so many nodes, an added node brings less than `pays_above` of one; None: not up to the
    largest."""
    options: ScaleOptions
    sizes: tuple[PredictedSize, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """A job that was run. `weak`: each rank keeps its batch; `strong`: all ranks share one
    batch."""

    scaling: str
    nodes: int
    ranks: int
    batch_size: int
    step_s: float
    spread_s: float
    """The standard deviation of steps."""
    speedup: float
    efficiency: float
    parts_s: Mapping[str, float]
    hidden_communication_s: float
    run: str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A job that was run on several numbers of ranks."""

    version: int = 1
    made_at: float
    task: str
    device: str
    shares_cores: bool
    """There were fewer cores or GPUs than ranks."""
    sizes: tuple[MeasuredSize, ...]


T = TypeVar("T", Prediction, Measurement)


def write_scaling(run: Path, result: Prediction | Measurement) -> Path:
    """Write the document into a run folder, under a name of its own."""
    folder = run / SCALE_FOLDER
    make_own_folder(folder)
    path = folder / f"{type(result).__name__.lower()}-{round(result.made_at * 1000)}.json"
    replace_text(path, json.dumps(asdict(result), indent=1) + "\n")
    return path


def read_scaling(run: Path, kind: type[T]) -> list[T]:
    """All documents of this kind in a run folder, the oldest first."""
    paths = (run / SCALE_FOLDER).glob(f"{kind.__name__.lower()}-*.json")
    return sorted((_read(path, kind) for path in paths), key=lambda document: document.made_at)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return read_record(kind, path)
    except (OSError, ValueError) as error:
        what = f"{path} is not a {kind.__name__.lower()}: {error}"
        raise UsageError(what, next_step="remove the file, or make it again") from None
