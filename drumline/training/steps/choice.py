"""Which kind of step a run takes, by its settings and its device. With `auto` the first steps of
the run try each kind in turn, the same on every rank, and the fastest is kept, by the total time of
all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import Tensor

from drumline.base.errors import TrialError, UsageError
from drumline.base.text import duration
from drumline.base.untrusted import read_regular
from drumline.config.schema import Config
from drumline.data.loader import Step
from drumline.rank.collectives import all_sum, broadcast_json
from drumline.runs.run_folder import write_whole
from drumline.training.job.job import Job
from drumline.training.job.optimizer import set_capturable
from drumline.training.manager import DDPManager
from drumline.training.steps.compilation import compile_before
from drumline.training.steps.compiled_blocks import compiled
from drumline.training.steps.eager import AnyStep, TrainStep, loss_function
from drumline.training.steps.elastic import ElasticStep
from drumline.training.steps.graph import GraphStep

# Enough steps to compile and to capture, so that a kind reaches its full speed.
WARM_UP_STEPS = 20
TIMED_STEPS = 12
COMPILED = ("compile", "compiled_graph")
CAPTURED = ("graph", "compiled_graph")
# A compilation takes a minute or more: in less time than this it is not regained.
SHORTEST_COMPILED_S = 300.0
MOST_MEMORY = 0.45  # of a GPU, before graphs are captured


def _ignore(_: str) -> None: ...


def make_step(
    job: Job,
    config: Config,
    *,
    chosen: str | None = None,
    num_steps: int | None = None,
    is_default: bool = False,
    uncaptured: str | None = None,
    trials: TrialFile | None = None,
    on_choice: Callable[[str], None] = _ignore,
    note: Callable[[str], None] = _ignore,
) -> AnyStep:
    """`chosen`: the earlier choice of `auto` in this run; `on_choice` gets a new one. `num_steps`:
    how many are left. `is_default`: the run did not ask for `auto`. `uncaptured`: why `auto` is not
    to try captured steps, as the end of a sentence. `trials`: where it records what it tries.
    `note` logs a message."""
    match config.train.exact:
        case "world":
            pass
        case "elastic":
            return ElasticStep(
                job,
                seed=config.train.seed,
                clip_norm=config.optim.clip_norm,
                bucket_bytes=int(config.dist.bucket_cap_mb * 2**20),
                find_unused=config.dist.find_unused_parameters,
            )
        case _:
            assert_never(config.train.exact)
    settings: dict[str, Any] = {
        "clip_norm": config.optim.clip_norm,
        "sends_buffers": config.dist.broadcast_buffers,
    }
    kinds: dict[str, Callable[[], AnyStep]] = {
        "eager": lambda: TrainStep(job, **settings),
        # The blocks of a sharded model are compiled already (`compile_blocks`).
        "compile": lambda: (
            TrainStep(job, **settings)
            if job.is_sharded
            else CompiledStep(job, note=note, **settings)
        ),
    }
    is_gpu = job.ddp.device.type == "cuda"
    uncapturable = job.uncapturable or uncaptured
    if is_gpu and uncapturable is None:
        kinds["graph"] = lambda: GraphStep(kinds["eager"](), job, note=note)
        kinds["compiled_graph"] = lambda: GraphStep(kinds["compile"](), job, note=note)

    def choose(choice: str) -> None:
        if "graph" in kinds and choice not in CAPTURED:
            set_capturable(job.optimizer, job.group_settings, is_on=False)
        on_choice(choice)

    if job.step == "auto" and chosen not in kinds:
        failed = [] if trials is None else trials.failed
        for kind in failed:
            note(
                f"{kind} steps are not tried: the run failed at an earlier start while it tried them "
                "(remove step-trial.txt from the run folder to try them again)"
            )
        # By a part of the name: compiled_graph needs the memory of both others.
        tried = {
            name: make for name, make in kinds.items() if not any(kind in name for kind in failed)
        }
        trial = len(tried) * (WARM_UP_STEPS + TIMED_STEPS)
        if is_default and num_steps is not None and num_steps < 2 * trial:
            note(
                f"steps run as eager: {num_steps} are too few to try others (--train.step auto tries them)"
            )
            return kinds["eager"]()
        if is_gpu and uncapturable is not None:
            note(f"captured steps are left out: {uncapturable}")
        on_trial = _ignore if trials is None else trials.write
        given: dict[str, Any] = {
            "num_steps": num_steps,
            "on_trial": on_trial,
            "on_choice": choose,
            "note": note,
        }
        return AutoStep(tried, device=job.ddp.device, **given)
    wanted = chosen if chosen and job.step == "auto" else job.step
    if wanted not in kinds:
        needs = f"needs a GPU, and this rank computes on {job.ddp.device}"
        reason = f"cannot capture the steps of this run: {uncapturable}" if uncapturable else needs
        also = "" if job.uncapturable is None else ", or another optimizer"
        raise UsageError(
            f"--train.step {wanted} {reason}", next_step=f"choose one of {', '.join(kinds)}{also}"
        )
    return kinds[wanted]()


class TrialFile(AbstractContextManager["TrialFile"]):
    """The kinds of steps in whose trial the run has failed, and the one that it tries. They may
    need more memory than there is, so a restart does not try them. Rank 0 reads and writes the
    file."""

    def __init__(self, path: Path, ddp: DDPManager) -> None:
        """Collective."""
        self._path = path if ddp.is_main_process() else None
        words = ""
        with suppress(OSError, ValueError):
            words = read_regular(path).decode()
        found = [kind for kind in (*COMPILED, "graph") if kind in words.split()]
        self.failed: list[str] = broadcast_json(found, device=ddp.device)

    def write(self, trying: str = "") -> None:
        if self._path is not None:
            write_whole(self._path, " ".join([*self.failed, trying]))

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error in (None, KeyboardInterrupt):  # a trial that ends so has not failed
            self.write()


class AutoStep:
    """Takes steps of each kind in turn, then of the fastest."""

    def __init__(
        self,
        kinds: Mapping[str, Callable[[], AnyStep]],
        *,
        device: torch.device,
        num_steps: int | None = None,
        on_trial: Callable[[str], None] = _ignore,
        on_choice: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """The first kind is the one that the others are to be faster than. `num_steps`: how many
        are left."""
        self._left = list(kinds.items())
        self._device = device
        self._on_trial = on_trial
        self._on_choice = on_choice
        self._note = note
        self._num_steps = num_steps
        self._not_tried = ""
        self._fastest: tuple[float, str, AnyStep] | None = None
        self._seconds: dict[str, float] = {}
        self._is_settled = False
        self.grad_norm: Tensor | None = None
        self._try_next()

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        begin = None if self._is_settled else _time_point(self._device)
        try:
            self._step(step)
        except torch.OutOfMemoryError as error:
            if self._is_settled or not self._seconds:
                raise
            what = f"out of memory while --train.step auto tried {self._name}: {str(error).partition('. GPU')[0]}"
            raise TrialError(
                what, next_step="rerun the same command to resume: it does not try it again"
            ) from error
        self.grad_norm = self._step.grad_norm
        if begin is not None:
            self._count(step, begin)

    def _try_next(self) -> None:
        self._name, make = self._left.pop(0)
        if self._seconds:
            self._on_trial(self._name)
        self._step = make()
        self._num_taken = self._num_samples = 0
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
        own = sum(_seconds_between(*pair) for pair in self._times) / self._num_samples
        measured = torch.tensor([own, _is_memory_used(self._device), 1.0], device=self._device)
        seconds, num_full, num_ranks = all_sum(measured).tolist()
        if not self._seconds:
            self._leave_out(seconds / num_ranks * step.plan.global_size, is_full=num_full > 0)
        self._seconds[self._name] = seconds
        if self._fastest is None or seconds < self._fastest[0]:
            self._fastest = seconds, self._name, self._step
        self._step = self._fastest[2]  # frees the memory of the slower one's graphs
        if self._left:
            self._try_next()
        else:
            self._settle(*self._fastest)

    def _leave_out(self, step_s: float, *, is_full: bool) -> None:
        """After the first trial: the kinds that would cost more than they gain, or more memory than
        there is."""
        reasons = []
        if (
            self._num_steps is not None
            and (rest_s := step_s * self._num_steps) < SHORTEST_COMPILED_S
        ):
            reasons.append((COMPILED, f"the run takes {duration(rest_s)}"))
        if is_full:
            reasons.append((CAPTURED, "too little memory is left for graphs"))
        for kinds, reason in reasons:
            if names := [name for name, _ in self._left if name in kinds]:
                self._left = [one for one in self._left if one[0] not in kinds]
                self._not_tried += f"; not tried: {', '.join(names)} ({reason})"

    def _settle(self, seconds: float, choice: str, step: AnyStep) -> None:
        self._is_settled = True
        self._step = step
        self._fastest = None
        others = ", ".join(f"{name} {own / seconds:.2f}" for name, own in self._seconds.items())
        self._on_trial("")
        self._on_choice(choice)
        self._note(
            f"steps run as {choice}, the fastest here; time per step relative to it: {others}{self._not_tried}"
        )


def _is_memory_used(device: torch.device) -> bool:
    """Whether a GPU has too little memory left for graphs, which allocate for themselves what a
    step needs."""
    if device.type != "cuda":
        return False
    return (
        torch.cuda.max_memory_reserved(device)
        > MOST_MEMORY * torch.cuda.get_device_properties(device).total_memory
    )


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


class CompiledStep:
    """`--train.step compile`: the task's loss, with the model's forward and backward pass, compiled
    by torch. The short batch at the end of an epoch is not compiled: that would cost more than it
    gains."""

    def __init__(self, job: Job, *, note: Callable[[str], None] = _ignore, **settings: Any) -> None:
        """`note` logs a message."""
        self._job = job
        self._note = note
        self._batch_size = job.batch.size
        self._is_compiled = False
        self._full = TrainStep(job, compute_loss=compiled(loss_function(job.task)), **settings)
        job.ddp._connection.mark_compilations()  # the compiler is loaded by now
        self._short = TrainStep(job, **settings)
        self.grad_norm: Tensor | None = None

    def __call__(self, step: Step) -> None:
        """Collective: one optimizer step."""
        inner = self._full if step.plan.global_size == self._batch_size else self._short
        if inner is self._full and not self._is_compiled:
            step = compile_before(step, inner.compute_loss, self._job, note=self._note)
            self._is_compiled = True
        inner(step)
        self.grad_norm = inner.grad_norm
