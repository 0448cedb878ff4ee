"""Predictions and measurements of scaling, as typed documents in RUN/scale/: `scale predict` and `scale measure` write
them, `scale check` and the report read them. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from drumline.errors import UsageError
from drumline.untrusted import make_own_folder, parse_json, read_regular, replace_text
from drumline.watch.typed_json import from_json

SCALE_FOLDER = "scale"
USUAL: Mapping[int, tuple[float, float]] = {2: (0.90, 0.95), 4: (0.85, 0.95), 8: (0.80, 0.90), 16: (0.75, 0.90)}
"""The efficiency that is usual for a number of ranks."""


@dataclass(frozen=True, kw_only=True)
class PredictedSize:
    """A job on some nodes. Values with `low_` and `high_` have an interval of 90%, with the model's own error."""

    nodes: int
    ranks: int
    step_s: float
    low_step_s: float
    high_step_s: float
    efficiency: float
    """A rank's step alone, as a part of this step: weak scaling."""
    low_efficiency: float
    high_efficiency: float
    communication_s: float
    """Exposed communication in a step."""
    waiting_s: float
    """Waiting for the slowest rank in a step."""
    goodput: float
    """The part of a day that is spent on steps that are kept."""
    low_goodput: float
    high_goodput: float
    steps_per_day: float
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
    backend: str
    profile: str
    """Where the profile was read."""
    profile_ranks: int
    batch_per_rank: float | None
    bucket_cap_mb: float
    accumulate: int
    network: str
    network_source: str
    inside: str
    inside_source: str
    alone_s: float
    """The step of a rank that waits for no other."""
    checkpoint_every: int
    checkpoint_pause_s: float
    mtbf_hours: float
    restart_s: float
    price: float | None
    """Of a node, an hour."""
    model_error: float
    """By how much steps differed from predictions on the grid of docs/scaling.md: the interval has it on both sides."""
    stops_paying: int | None
    """With more nodes than this, an added node brings less than `pays_above` of one; None: not up to the largest."""
    pays_above: float
    sizes: tuple[PredictedSize, ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredSize:
    """A measured job."""

    scaling: str
    """`weak`: each rank keeps its batch; `strong`: all ranks share one batch."""
    nodes: int
    ranks: int
    batch_size: int | None
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
    """Ranks had to share cores or a GPU."""
    sizes: tuple[MeasuredSize, ...]


T = TypeVar("T", Prediction, Measurement)
_NAMES: Mapping[type[Prediction] | type[Measurement], str] = {Prediction: "prediction", Measurement: "measurement"}


def write_scaling(run: Path, result: Prediction | Measurement) -> Path:
    """Write the document into a run folder, under a name of its own."""
    folder = run / SCALE_FOLDER
    make_own_folder(folder)
    path = folder / f"{_NAMES[type(result)]}-{round(result.made_at * 1000)}.json"
    replace_text(path, json.dumps(asdict(result), indent=1) + "\n")
    return path


def read_scaling(run: Path, kind: type[T]) -> list[T]:
    """All documents of this kind in a run folder, the oldest first."""
    paths = sorted((run / SCALE_FOLDER).glob(f"{_NAMES[kind]}-*.json"))
    return sorted((_read(path, kind) for path in paths), key=lambda found: found.made_at)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return from_json(kind, parse_json(read_regular(path)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path} is not a {_NAMES[kind]}: {error}", next_step="remove the file, or make it again"
        ) from None
