"""Which kind of step a run takes, by its settings and its device. With `auto` the first steps of
the run try each kind in turn, the same on every rank, and the fastest is kept, by the total time of
all ranks.

    steps 1 to 32     eager: 20 to warm up, 12 timed
    steps 33 to 64    compile, unless the run is too short for it
    steps 65 to 128   graph and compiled_graph, unless they cannot be captured or too little memory is left
    from then on      the fastest; the choice is in the run's checkpoints
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.base.errors import TrialError, UsageError
from drumline.base.text import duration
from drumline.base.untrusted import read_regular
from drumline.config.schema import Config
from drumline.data.loader import Step
from drumline.rank.collectives import all_sum, broadcast_json
from drumline.runs.run_folder import write_whole
from drumline.training.job.job import Job
from drumline.training.job.optimizer import find_uncapturable, set_capturable
from drumline.training.manager import RunManager
from drumline.training.steps.compilation import compiled_step
from drumline.training.steps.eager import AnyStep, ElasticStep, TrainStep
from drumline.training.steps.graph import GraphStep, find_hook
from drumline.training.tasks.hook import Hook
from drumline.training.tasks.ready_hooks import EMA, EarlyStopping, LogSamples, Unfreeze

# Enough steps to compile and to capture, so that a kind reaches its full speed.
WARM_UP_STEPS = 20
TIMED_STEPS = 12
COMPILED = ("compile", "compiled_graph")
CAPTURED = ("graph", "compiled_graph")
# A compilation takes a minute or more: in less time than this it is not regained.
SHORTEST_COMPILED_S = 300.0
MOST_MEMORY = 0.45  # of a GPU, before graphs are captured


def _ignore(_: str) -> None: ...


@dataclass(frozen=True)
class StepOptions:
    """What a run knows about its steps, beside the settings."""

    chosen: str | None = None
    """The earlier choice of `auto` in this run."""

    num_steps: int = sys.maxsize
    """How many are left."""

    is_default: bool = False
    """The run did not ask for `auto`."""

    uncaptured: str | None = None
    """Why not to capture steps, as the end of a sentence."""

    failed: Sequence[str] = ()
    """The kinds in whose trial an earlier start has failed."""

    on_trial: Callable[[str], None] = _ignore
    """Gets each kind but the first before it is tried, and then nothing: the trials have ended."""

    on_choice: Callable[[str], None] = _ignore
    """Gets a new choice of `auto`."""

    note: Callable[[str], None] = _ignore
    """Logs a message."""


NO_OPTIONS = StepOptions()
StepKinds = dict[str, Callable[[], AnyStep]]


def find_unsafe(job: Job, config: Config, hooks: Sequence[Hook], *, is_default: bool) -> str | None:
    """Why this run should not get captured steps: later steps compute something else; or they may
    do so, and the run takes `auto` by default."""
    for hook in hooks:
        is_unknown = type(hook) not in (EMA, EarlyStopping, LogSamples)
        if isinstance(hook, Unfreeze) or (is_default and is_unknown):
            return f"the hook {type(hook).__name__} may change what a step computes"

    if config.dist.sync != "step" and job.sync is not None:
        return "replicas synchronize between steps (--dist.sync)"
    if config.dist.comm == "powersgd" and job.comm is not None:
        return "PowerSGD waits for the device in every step (--dist.comm powersgd)"
    if not is_default:
        return None

    if config.dist.comm != "none":
        return f"gradients go through a hook (--dist.comm {config.dist.comm})"
    if config.dist.find_unused_parameters:
        return "the parameters in use may change (--dist.find_unused_parameters)"
    if job.ddp.backend == "gloo":
        return "gloo reduces the gradients, on the host"

    return find_hook(job.model, job.optimizer)


def make_step(job: Job, config: Config, options: StepOptions = NO_OPTIONS) -> AnyStep:
    """The step of the settings."""
    if config.train.exact == "elastic":
        return ElasticStep(
            job,
            seed=config.train.seed,
            clip_norm=config.optim.clip_norm,
            bucket_bytes=int(config.dist.bucket_cap_mb * 2**20),
            find_unused=config.dist.find_unused_parameters,
        )

    uncapturable = options.uncaptured or find_uncapturable(job.optimizer, config.train.on_nan)
    kinds = _step_kinds(job, config, captures=uncapturable is None)

    kind: str | None = job.step_kind
    if kind == "auto":
        kind = options.chosen
        if kind not in kinds:
            return _try_kinds(job, kinds, options, uncapturable)

    if kind not in kinds:
        raise _unavailable(job, kinds, uncapturable, options)

    return kinds[kind]()


def _step_kinds(job: Job, config: Config, *, captures: bool) -> StepKinds:
    """Those that this run can take, from the simplest on; a compiled or an eager step is inside a
    captured one."""
    settings: dict[str, Any] = {
        "clip_norm": config.optim.clip_norm,
        "sends_buffers": config.dist.broadcast_buffers,
    }

    def eager() -> AnyStep:
        return TrainStep(job, **settings)

    def compiled_loss() -> AnyStep:
        """With the loss, or the blocks, compiled."""
        # The blocks of a sharded model are compiled already (`compile_blocks`).
        return eager() if job.sharded is not None else compiled_step(job, **settings)

    kinds: StepKinds = {"eager": eager, "compile": compiled_loss}
    if captures and job.ddp.device.type == "cuda":
        kinds["graph"] = lambda: GraphStep(eager(), job)
        kinds["compiled_graph"] = lambda: GraphStep(compiled_loss(), job)

    return kinds


def _try_kinds(
    job: Job, kinds: StepKinds, options: StepOptions, uncapturable: str | None
) -> AnyStep:
    """`--train.step auto` without a choice yet; eager steps where too few are left to try others by
    default."""
    for kind in options.failed:
        options.note(
            f"{kind} steps are not tried: the run failed at an earlier start while it tried them "
            "(remove step-trial.txt from the run folder to try them again)"
        )

    # By a part of the name: compiled_graph needs the memory of both others.
    tried = {
        name: make
        for name, make in kinds.items()
        if not any(failed in name for failed in options.failed)
    }

    num_trial_steps = len(tried) * (WARM_UP_STEPS + TIMED_STEPS)
    if options.is_default and options.num_steps < 2 * num_trial_steps:
        options.note(
            f"steps run as eager: {options.num_steps} are too few to try others (--train.step auto tries them)"
        )
        return kinds["eager"]()

    if job.ddp.device.type == "cuda" and uncapturable is not None:
        options.note(f"captured steps are left out: {uncapturable}")

    return AutoStep(tried, job, options)


def _unavailable(
    job: Job, kinds: StepKinds, uncapturable: str | None, options: StepOptions
) -> UsageError:
    """The error about a kind of step that this run cannot take."""
    reason = f"needs a GPU, and this rank computes on {job.ddp.device}"
    choices = ", ".join(kinds)
    if job.ddp.device.type == "cuda":
        reason = f"cannot capture the steps of this run: {uncapturable}"
        if options.uncaptured is None:
            choices += ", or another optimizer"

    return UsageError(
        f"--train.step {job.step_kind} {reason}", next_step=f"choose one of {choices}"
    )


class TrialFile(AbstractContextManager["TrialFile"]):
    """The kinds of steps in whose trial the run has failed, and the one that it tries. They may
    need more memory than there is, so a restart does not try them. Rank 0 reads and writes the
    file."""

    def __init__(self, path: Path, ddp: RunManager) -> None:
        """Collective."""
        self._path = path if ddp.is_main_process() else None
        recorded = []
        with suppress(OSError, ValueError):
            recorded = read_regular(path).decode().split()

        failed = [kind for kind in (*COMPILED, "graph") if kind in recorded]
        self.failed: list[str] = broadcast_json(failed)

    def write(self, trying: str = "") -> None:
        """Record the kind that is tried now; none: the trials have ended."""
        if self._path is not None:
            write_whole(self._path, " ".join([*self.failed, trying]))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error in (None, KeyboardInterrupt):  # a trial that ends so has not failed
            self.write()


class AutoStep:
    """Takes steps of each kind in turn, then of the fastest."""

    def __init__(self, kinds: StepKinds, job: Job, options: StepOptions) -> None:
        """The first kind is the one that the others are to be faster than."""
        self._left = dict(kinds)
        self._job = job
        self._device = job.ddp.device
        self._options = options
        self._not_tried = ""
        self._seconds: dict[str, float] = {}
        """Of all ranks, per sample, by kind."""

        self._is_settled = False
        self._try_next()

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        if self._is_settled:
            self._step(step)
            return

        begin = _time_point(self._device)
        try:
            self._step(step)
        except torch.OutOfMemoryError as error:
            if not self._seconds:
                raise

            reason = str(error).partition(". GPU")[0]
            raise TrialError(
                f"out of memory while --train.step auto tried {self._name}: {reason}",
                next_step="rerun the same command to resume: it does not try it again",
            ) from error

        self._count(step, begin)

    def _try_next(self) -> None:
        self._name = next(iter(self._left))
        if self._seconds:
            self._options.on_trial(self._name)

        self._step = self._left.pop(self._name)()
        self._num_taken = 0
        self._num_samples = 0
        self._times: list[tuple[Any, Any]] = []

    def _count(self, step: Step, begin: Any) -> None:
        """Collective at the last step of each trial."""
        self._num_taken += 1
        if self._num_taken <= WARM_UP_STEPS:
            return

        self._times.append((begin, _time_point(self._device)))
        self._num_samples += step.plan.global_size
        if len(self._times) < TIMED_STEPS:
            return

        seconds_here = sum(_seconds_between(*pair) for pair in self._times) / self._num_samples
        is_full = _is_memory_used(self._device)
        measured = torch.tensor([seconds_here, is_full, 1.0], device=self._device)
        seconds, num_full, num_ranks = all_sum(measured).tolist()

        if not self._seconds:
            self._leave_out(seconds / num_ranks * step.plan.global_size, is_full=num_full > 0)

        self._seconds[self._name] = seconds
        fastest = min(self._seconds, key=self._seconds.__getitem__)
        if fastest == self._name:
            self._fastest_step = self._step

        self._step = self._fastest_step  # frees the memory of the slower one's graphs
        if self._left:
            self._try_next()
        else:
            self._settle(fastest)

    def _leave_out(self, step_s: float, *, is_full: bool) -> None:
        """After the first trial: the kinds that would cost more than they gain, or more memory than
        there is."""
        left_s = step_s * self._options.num_steps
        if left_s < SHORTEST_COMPILED_S:
            self._do_not_try(COMPILED, f"the run takes {duration(left_s)}")
        if is_full:
            self._do_not_try(CAPTURED, "too little memory is left for graphs")

    def _do_not_try(self, kinds: Sequence[str], reason: str) -> None:
        """Leave out these kinds, and note why."""
        names = [name for name in self._left if name in kinds]
        for name in names:
            del self._left[name]
        if names:
            self._not_tried += f"; not tried: {', '.join(names)} ({reason})"

    def _settle(self, fastest: str) -> None:
        """All kinds were tried: take the fastest, and release what the others needed."""
        self._is_settled = True
        del self._fastest_step
        if fastest not in CAPTURED and not self._seconds.keys().isdisjoint(CAPTURED):
            set_capturable(self._job.optimizer, self._job.group_settings, is_on=False)

        self._options.on_trial("")
        self._options.on_choice(fastest)

        ratios = [
            f"{kind} {seconds / self._seconds[fastest]:.2f}"
            for kind, seconds in self._seconds.items()
        ]

        self._options.note(
            f"steps run as {fastest}, the fastest here; time per step relative to it: {', '.join(ratios)}"
            f"{self._not_tried}"
        )


def _is_memory_used(device: torch.device) -> bool:
    """Whether a GPU has too little memory left for graphs, which allocate for themselves what a
    step needs."""
    if device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_reserved(device) > MOST_MEMORY * memory


def _time_point(device: torch.device) -> Any:
    """The current time; on a GPU an event in its queue, so that nothing waits."""
    if device.type != "cuda":
        return time.perf_counter()

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    """Waits until the device has reached the second."""
    if isinstance(end, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
