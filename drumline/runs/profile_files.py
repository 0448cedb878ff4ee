"""The files of a profile in a run folder, and what a rank writes beside its trace. No torch.

profile/rank-NNNNN.trace.json.gz (torch.profiler's trace)  rank-NNNNN.json (facts that a trace
lacks) merged.trace.json.gz (all ranks, or the first 64, for Perfetto)  profile.json (the result)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from drumline.base.untrusted import make_own_folder, read_record, replace_text

PROFILE_FOLDER = "profile"
PROFILE_FILE = "profile.json"
MERGED_FILE = "merged.trace.json.gz"
STEP_MARK = "drumline.step#"
END_MARK = "drumline.end"
DATA_MARK = "drumline.data"
"""The names of the ranges with which a trace is divided into steps: the last step lasts until the
end mark."""

CLIPPING = "gradient clipping"
WORKERS = "start of workers"
BUFFERS = "broadcast of buffers"
SAMPLER = "sampler"
IN_BACKWARD = "code of hooks in backward"
"""Names of phases: DataLoader workers start or end in the second, and in the third all ranks take
the buffers of the model from one. The last is of hooks on gradients and on their communication."""

GRADIENTS = "torch.autograd.grad"

ALLOCATIONS = frozenset({"cudaMalloc", "cudaFree"})
"""Calls that take memory from CUDA and return it, which torch's allocator needs at first only."""

WasteKind = Literal[
    "padding",
    "repeated_work",
    "single_samples",
    "recomputation",
    "unused_output",
    "zero_gradients",
    "zeros",
    "denormals",
    "float64",
    "half_precision",
    "sparse_gradients",
]

FEWEST_TIMED = 3
"""Steps without the profiler that are compared with those with it."""
FIRST_WITH_COST = 2 * (FEWEST_TIMED + 1)
"""The earliest first profiled step before which so many steps are timed with what slows each operation,
and so many without. The first of all is not timed."""

MOST_RANKS_MERGED = 64
"""More would not open in a browser."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What a profile reports of its job; a script's is mostly unknown."""

    task: str
    batch_size: int | None = None
    """The global batch; None: a script's, which is not known."""
    accumulate: int = 1
    precision: str | None = None
    bucket_cap_mb: float = 25.0
    settings: Mapping[str, str] = field(default_factory=dict)
    """The settings that advice may change, as on the command line."""
    step_tflop: float | None = None
    """Of the model, for one global batch; None: not known."""
    peak_tflop_per_s: float | None = None
    """Of all devices together; None: not known."""


@dataclass(frozen=True, kw_only=True)
class SampledLine:
    """A line of the user's code; without a file: only that of libraries ran."""

    file: str
    line: int
    function: str
    library: str = ""
    """The package whose code the line had called, as in `torch`; empty: none."""
    source: str = ""
    """Its text."""


class Pause(NamedTuple):
    """An evaluation or a save after a profiled step, by Unix time."""

    reason: str
    step: int
    began_ns: int
    ended_ns: int


class StackSample(NamedTuple):
    """What ran since the sample before it; several in a row with the same line are one."""

    until_ns: int
    """Unix time."""
    cpu_ns: int
    """How long the thread could run meanwhile: on a CPU, or in the queue for one."""
    phase: int
    """A number in `StackSamples.phases`."""
    line: int
    """A number in `StackSamples.lines`."""


class Collection(NamedTuple):
    """One garbage collection of all objects, by Unix time."""

    began_ns: int
    ended_ns: int
    line: int
    """A number in `StackSamples.lines`: what ran then."""


class ThreadUse(NamedTuple):
    """A thread besides the one that takes the steps."""

    name: str
    cpu_s: float
    """How long it could run: on a CPU, or in the queue for one."""
    line: int
    """A number in `StackSamples.lines`: where it was seen most."""


@dataclass(frozen=True, kw_only=True)
class StackSamples:
    """What a rank ran in the profiled steps."""

    began_ns: int = 0
    phases: tuple[str, ...] = ()
    lines: tuple[SampledLine, ...] = ()
    samples: tuple[StackSample, ...] = ()
    statements: tuple[int, ...] = ()
    """For each sample, a number in `lines`: the line of the training loop, or of the task, that led
    there. Empty: not recorded."""
    collections: tuple[Collection, ...] = ()
    threads: tuple[ThreadUse, ...] = ()
    """Those that used the most CPU time."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """What an optimizer updates, and how."""

    name: str
    num_tensors: int
    num_bytes: int
    """Of the parameters."""
    is_fused: bool
    is_foreach: bool
    unused_gradients: float = 0.0
    """Which part of the bytes of gradients no optimizer uses: of weights that none has, or whose
    rate is 0."""


@dataclass(frozen=True, kw_only=True)
class WastedWork:
    """What a step computes in vain."""

    kind: WasteKind
    part: float
    """Of the forward passes; of `sparse_gradients`, the part of the bytes of all gradients that is zero."""
    module: str = ""
    """Its name in the model."""
    line: SampledLine | None = None
    """That calls it."""


@dataclass(frozen=True, kw_only=True)
class WorkerUse:
    """The DataLoader workers of a rank."""

    number: int
    cores: float
    """How many cores they used together."""
    waiting: float
    """How many of them waited for a core, on average."""


class ProcessUse(NamedTuple):
    """A process that a rank has started, and that is no DataLoader worker."""

    name: str
    """Of multiprocessing, or its command."""
    cores: float
    """How much of a core it used."""
    waiting: float
    """For how much of the time it waited for one."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What is known of profiled steps besides their times: of a rank's, and in a result of rank 0's."""

    world_size: int
    device: str
    """As in `cpu` or `NVIDIA H200`."""
    backend: str
    first_step: int
    num_steps: int
    unprofiled_step_s: float | None = None
    """The mean of the steps before the first one that is profiled."""
    host_cpus: int | None = None
    """How many its host has."""
    loading_cores: float | None = None
    """How many were busy while the loop waited for a batch: near 0 it waits for storage. None: not
    known."""
    optimizer: OptimizerFacts | None = None
    workers: WorkerUse | None = None
    """None: there are none, or they are not known."""
    process: ProcessUse | None = None
    """The busiest that it has started; in a result, that any rank has."""
    has_sync_batchnorm: bool = False
    checks_collectives: bool = False
    """Whether torch compares those of all ranks (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    searches_kernels: bool = False
    """Whether cuDNN tries its kernels for each new shape (torch.backends.cudnn.benchmark)."""
    num_threads: int | None = None
    """That an operation on the CPU uses; None: not known."""
    num_passes: int | None = None
    """How many forward passes a step has: several with micro-batches. None: not known."""
    wasted: tuple[WastedWork, ...] = ()
    own_profiler: SampledLine | None = None
    """The line that runs a profiler of torch in the steps before; in the profiled ones that records
    nothing."""
    slow_modes: tuple[str, ...] = ()
    """What slows each operation or each call of Python, as anomaly detection does; in the profiled
    steps it is off."""
    slow_modes_s: float | None = None
    """How much longer steps before the profiled ones were with these, and with `own_profiler`; None: not
    known."""
    tracers: tuple[str, ...] = ()
    """The same, of what cannot be turned off for some steps."""


@dataclass(frozen=True, kw_only=True)
class RankFacts(StepFacts):
    """What one rank knows about its trace."""

    rank: int
    host: str
    bucket_bytes: tuple[int, ...] = ()
    """The sizes of DDP's buckets, in the order in which they are reduced."""
    num_models: int = 1
    """How many models of DDP there are; the buckets are those of the first."""
    tensor_bytes: tuple[int, ...] = ()
    """The sizes of the gradients, in the order in which DDP puts them into buckets; empty: not
    known."""
    cpus: tuple[int, ...] = ()
    """The numbers of those that it may use, as taskset sets them."""
    cpu_wait_s: float | None = None
    """How long the rank waited for a CPU in a step, on average; None: not known."""
    cpu_run_s: float | None = None
    """How long the thread that takes the steps ran on one."""
    pauses: tuple[Pause, ...] = ()
    sync_lines: tuple[tuple[int, str], ...] = ()
    """Unix time in ns and source line of calls that blocked the host until the device had
    finished."""
    num_optimizers: int | None = None
    """How many take steps; None: not known."""
    stacks: StackSamples = field(default_factory=StackSamples)
    job: JobFacts


def trace_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.trace.json.gz"


def facts_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def where_to_look(run: Path, num_ranks: int) -> str:
    """The line that names the file."""
    ranks = "all ranks"
    if num_ranks > MOST_RANKS_MERGED:
        ranks = f"the first {MOST_RANKS_MERGED} of {num_ranks} ranks"
    return f"the trace of {ranks}: {run / PROFILE_FOLDER / MERGED_FILE} (open it in https://ui.perfetto.dev)"


def write_facts(folder: Path, facts: RankFacts) -> None:
    make_own_folder(folder)
    replace_text(facts_path(folder, facts.rank), json.dumps(asdict(facts)))


def read_facts(folder: Path, rank: int) -> RankFacts:
    """Raises OSError for a missing file, ValueError for a damaged one."""
    facts = read_record(RankFacts, facts_path(folder, rank))
    _check_samples(facts.stacks)
    return facts


def _check_samples(stacks: StackSamples) -> None:
    lines = [row.line for row in stacks.samples]
    lines += [row.line for row in stacks.collections]
    lines += [row.line for row in stacks.threads]
    lines += stacks.statements
    times = [stacks.began_ns, *(sample.until_ns for sample in stacks.samples)]
    if (
        not all(0 <= line < len(stacks.lines) for line in lines)
        or not all(0 <= sample.phase < len(stacks.phases) for sample in stacks.samples)
        or times != sorted(times)
        or len(stacks.statements) not in (0, len(stacks.samples))
    ):
        raise ValueError("its samples of stacks are damaged")
