"""What a profile of some steps found, as the typed document RUN/profile/profile.json: `profile`
writes it, and the words, the advice, `scale` and the report read it. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from drumline.base.errors import UsageError
from drumline.base.untrusted import make_own_folder, read_record, replace_text
from drumline.runs.profile_files import PROFILE_FILE as PROFILE_FILE
from drumline.runs.profile_files import PROFILE_FOLDER as PROFILE_FOLDER
from drumline.runs.profile_files import JobFacts, StepFacts
from drumline.runs.step_times import StepTimes

PART_NAMES = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "waiting_for_rank": "waiting for a slower rank",
    "data": "waiting for data",
    "host_sync": "host waits for the device",
    "gaps": "gaps (Python, launches)",
}
PARTS = tuple(PART_NAMES)
"""What a step consists of: every instant of a rank belongs to one of them."""


PAUSES = ("evaluation", "save")
"""Phases that are not a part of a step."""


@dataclass(frozen=True, kw_only=True)
class LineCost:
    """A line of the user's code, and how long a step runs it."""

    phase: str
    """Of the step: `forward`, `hook Name`, ..."""
    source: str
    """As in `train.py:7`, with the whole path; empty: no code of the user's ran."""
    function: str = ""
    text: str = ""
    """The line itself."""
    seconds: float
    """Of all lines of its function in this phase, or of all that its caller runs in its file; this
    one has most of it."""
    own_s: float = 0.0
    """Of these, those in which neither an operation ran nor the device: Python, or a wait. Python of
    torch counts where it takes longer than calling an operation does."""
    cpu_s: float = 0.0
    """Of `own_s`, how long the thread could run: on a CPU, or in the queue for one."""
    host_s: float = 0.0
    """Of `seconds`, those in which no operation ran, torch's own Python among them."""
    operations: float = 0.0
    """How many operations the line itself calls."""
    library_operations: float = 0.0
    """How many operations a library calls for the line, as a module of torch does."""
    backward_s: float = 0.0
    """The backward pass of the operations of its function."""
    caller: str = ""
    """The line of the training loop, or of the task, that led there; empty: not recorded."""


@dataclass(frozen=True, kw_only=True)
class Collections:
    """Garbage collections, a step."""

    seconds: float
    full: float
    """How many are of the oldest generation."""
    source: str = ""
    """The line that ran in most of them."""
    is_asked_for: bool = False
    """Whether that line calls gc.collect()."""


@dataclass(frozen=True, kw_only=True)
class WorkerStarts:
    """DataLoader workers that start in the steps, as in each of many short epochs."""

    num_steps: int
    """In how many of the steps."""
    seconds: float
    """How long that takes, with the wait for the first batch: the mean over all steps."""


@dataclass(frozen=True, kw_only=True)
class BusyThread:
    """A Python thread of a rank besides the one that takes the steps."""

    rank: int
    name: str
    cores: float
    """How much of a core it used."""
    source: str


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """The profiled steps of one rank."""

    rank: int
    host: str
    step_s: tuple[float, ...]
    """The length of each step."""
    compute_s: tuple[float, ...]
    """How long the rank computed in each step."""
    parts_s: Mapping[str, float]
    """The mean of each of PARTS over the steps."""
    hidden_communication_s: float
    """Communication while the rank computed: the mean over the steps."""
    critical_steps: int
    """In how many steps the others waited for this rank."""
    host_s: tuple[float, ...] = ()
    """How long the host kept the rank from its work in each step: Python, launches, waits for the
    device. Until the last bucket is ready, also beside all-reduces, which no rank waits for before:
    there it is more than the gaps of `parts_s`. Empty: not recorded."""
    cpu_wait_s: float | None = None
    """How long it waited for a CPU in a step, on average; None: not known."""
    cpu_run_s: float | None = None
    """How long its thread that takes the steps ran on one."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """The mean of each phase over the steps; empty: not recorded."""
    lines: tuple[LineCost, ...] = ()
    """The costliest lines of its phases."""
    waited_for_s: tuple[float, ...] = ()
    """How long the others waited for this rank in each step, on average over them; empty: not
    recorded."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One all-reduce of gradients, by its order in the step: means over steps and ranks."""

    num_bytes: int
    ready_s: float
    """From the start of the step to the call, less the time in which the rank did not compute."""
    backward_s: float
    """The same, from the start of the last backward pass."""
    reduce_s: float
    """From the moment when the last rank joined to its end."""
    host_s: float | None = None
    """What `RankSteps.host_s` has until the call; None: not recorded."""


@dataclass(frozen=True, kw_only=True)
class GradientTensor:
    """The gradient of one parameter: means over steps and ranks, with the times of `Bucket`."""

    num_bytes: int
    """Of the gradient: fewer are sent where they are rounded."""
    ready_s: float
    backward_s: float
    host_s: float


def bus_bytes_per_s(buckets: Sequence[Bucket], world_size: int) -> float:
    """The bus bandwidth of the all-reduces of these buckets, as nccl-tests and `doctor` define it;
    0: not known."""
    seconds = sum(bucket.reduce_s for bucket in buckets)
    if seconds <= 0:
        return 0.0
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    return 2 * (world_size - 1) / world_size * num_bytes / seconds


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """An operation, and how much of the compute time of a step it takes."""

    name: str
    seconds: float
    calls: float
    is_layer: bool = True
    """Whether layers of a model compute it."""


@dataclass(frozen=True, kw_only=True)
class HostSync:
    """A line of code that makes the host wait for the device, and how long a step."""

    source: str
    call: str
    seconds: float
    calls: float


@dataclass(frozen=True, kw_only=True)
class ProfileResult(StepFacts, JobFacts):
    """A profile of some steps of a job."""

    version: int = 1
    made_at: float = 0.0
    """When its first step began, in seconds since the epoch; 0: not recorded."""
    num_nodes: int
    step_s: float
    parts_s: Mapping[str, float]
    """The means over all ranks: they add up to `step_s`."""
    hidden_communication_s: float
    ranks: tuple[RankSteps, ...]
    buckets: tuple[Bucket, ...]
    reductions: int = 1
    """How often a step reduces all gradients: once, but for micro-batches without `no_sync`."""
    other_collectives_s: float
    """Open collectives that are no buckets (SyncBatchNorm, buffers, a user's own), a step."""
    other_collectives: float
    """How many of these a step has."""
    other_kinds: Mapping[str, float] = field(default_factory=dict)
    """How many of each kind, as in `broadcast`; empty: not recorded."""
    kernels: tuple[Kernel, ...]
    syncs: tuple[HostSync, ...]
    network_bytes_per_s: float | None
    """The bus bandwidth of a large all-reduce that `doctor` measured between these ranks; None: not
    measured."""
    cores_per_rank: float | None = None
    """The CPU cores that each rank may use, its part of those of its host."""
    tensors: tuple[GradientTensor, ...] = ()
    """In the order in which DDP puts them into buckets; empty: not known."""
    communication_phases_s: Mapping[str, float] = field(default_factory=dict)
    """In which phases the host was in exposed collectives or waited for other ranks in them."""
    collective_lines: tuple[LineCost, ...] = ()
    """The lines of the user's code that were in exposed collectives besides DDP's all-reduces."""
    phases_s: Mapping[str, float] = field(default_factory=dict)
    """The means over all ranks, the longest first: they add up to `step_s`. Empty: not recorded."""
    pauses_s: Mapping[str, float] = field(default_factory=dict)
    """Evaluations and saves, a step: they come on top of `step_s`."""
    lines: tuple[LineCost, ...] = ()
    """The costliest lines of the user's code, over all ranks."""
    special_lines: tuple[LineCost, ...] = ()
    """The lines of operations that are no layers (copies, sorts, sums), with their backward pass."""
    undifferentiated: tuple[LineCost, ...] = ()
    """What the user's code computes with torch between the data and the backward pass, and has no
    gradient."""
    worker_starts: WorkerStarts | None = None
    """None: no workers start, or it is not known."""
    collections: Collections | None = None
    threads: tuple[BusyThread, ...] = ()
    """Those of any rank that ran code of the user's."""
    missing_ranks: Mapping[str, str] = field(default_factory=dict)
    """Ranks without a trace that can be read, and why; the means are over the others."""
    run_steps: StepTimes | None = None
    """All steps of the run, not only those that were profiled; None: not recorded."""


CROWDED = 0.02
"""A wait for a CPU of less than this part of the steps is not mentioned."""


class CrowdedRank(NamedTuple):
    """The rank that waited longest for a CPU."""

    rank: int
    host: str
    part: float
    """Of its steps."""


def most_crowded(profile: ProfileResult) -> CrowdedRank | None:
    """None: it is not known how crowded its machines were."""
    waits = [
        CrowdedRank(rank.rank, rank.host, rank.cpu_wait_s / mean_s)
        for rank in profile.ranks
        if rank.cpu_wait_s is not None
        and rank.step_s
        and (mean_s := sum(rank.step_s) / len(rank.step_s)) > 0
    ]
    return max(waits, key=lambda crowded: crowded.part, default=None)


def sent_part(settings: Mapping[str, str]) -> float | None:
    """The bytes that are sent for a byte of fp32 gradients, by `dist.comm`; None: with PowerSGD not
    in proportion."""
    return {"bf16": 0.5, "fp16": 0.5, "powersgd": None}.get(settings.get("dist.comm", "none"), 1.0)


def write_profile(run: Path, result: ProfileResult) -> Path:
    """Write the document into a run folder."""
    path = run / PROFILE_FOLDER / PROFILE_FILE
    make_own_folder(path.parent)
    replace_text(path, json.dumps(asdict(result), indent=1) + "\n")
    return path


def read_profile(path: Path) -> ProfileResult:
    """The profile of a run folder, or of the file itself."""
    file = path / PROFILE_FOLDER / PROFILE_FILE if path.is_dir() else path
    try:
        return read_record(ProfileResult, file, follow_links=file == path)
    except FileNotFoundError:
        raise UsageError(
            f"{path} has no profile",
            next_step="make one: drumline profile TASK, or train with --log.profile 10:20",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} is not a profile: {error}", next_step="profile the job again"
        ) from None
