"""The context of a run, which everything around its steps gets, the hooks of its task, and what runs
between steps: actions, which `loop.between_steps` lists."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drumline.base.errors import DrumlineError, UsageError, log, summary
from drumline.checkpoint.optimizer_state import decode_state, encode_state
from drumline.checkpoint.retention import Retention
from drumline.checkpoint.state import translated
from drumline.checkpoint.store import Snapshot
from drumline.config.schema import Config
from drumline.parallel.shards import is_shard
from drumline.rank.collectives import check_same, gather_json
from drumline.rank.determinism import keeping_rng
from drumline.runs.events import Reporter
from drumline.runs.run_folder import RunFolder
from drumline.training.between_steps.throughput import Throughput
from drumline.training.job.evaluation_job import EvaluationJob
from drumline.training.job.job import Job, Progress, run_length
from drumline.training.tasks.hook import Hook, Run
from drumline.watch.heartbeat import Phase

HOOKS_FILE = "hooks"
"""The file and document of the hooks' states in a checkpoint."""

AT_EPOCH_END = sys.maxsize
RunFacts = dict[str, Any]
"""What a checkpoint records about the run (`resume.facts_of`)."""


# The hooks of the task


@dataclass(frozen=True)
class TaskHooks:
    """A task's hooks, and the `Run` that they are given: they are called at their moments, in order;
    checkpoints keep their states; and ranks agree to end the run because a hook asked for it."""

    hooks: Sequence[Hook]
    run: Run
    job: EvaluationJob
    progress: Progress

    def call(self, moment: str, only: Hook | None = None) -> None:
        """Call this method of every hook, or of one. Collective where a hook's is."""
        hooks = self.hooks if only is None else (only,)
        if not hooks:
            return

        self.job.heartbeat.mark(Phase.BETWEEN)

        # The checkpoint of this step has the random numbers of the moment before.
        draws = keeping_rng(self.run.device) if moment in ("start", "after_save") else nullcontext()
        with draws, self._logging() as run:
            # Hooks nest around an evaluation: the last one to change the model is the first to put
            # it back.
            for hook in hooks[::-1] if moment == "after_evaluation" else hooks:
                with _named(hook, moment):
                    getattr(hook, moment)(run)

    def fail(self, error: BaseException) -> None:
        """This rank ends with this error. What a hook raises about it does not hide it."""
        with self._logging() as run:
            for hook in self.hooks:
                try:
                    hook.failure(run, error)
                except Exception as also:
                    log.warning(f"the hook {type(hook).__name__}.failure() failed: {summary(also)}")

    @contextmanager
    def _logging(self) -> Iterator[Run]:
        """The run, where it is now. The task may log meanwhile."""
        run = self.run
        run.step = self.progress.step
        run.epoch = self.progress.epoch
        run.metrics = self.progress.metrics
        run.task._log = run.log

        try:
            yield run
        finally:
            run.task._log = None

    # The end of the run: each rank has its own reason, or none, and all must end at the same step.

    def vote(self) -> float:
        """1 if a hook has asked this rank to end the run, else 0, to be summed over all ranks."""
        # A checkpoint may have the request of a hook that the task no longer has.
        return float(bool(self.hooks) and self.run.stop_reason is not None)

    def pending_reason(self) -> str | None:
        """Collective: the reason of the first rank that has one."""
        reasons = gather_json(self.run.stop_reason) if self.hooks else ()
        return next((reason for reason in reasons if reason is not None), None)

    def defining(self, moment: str) -> list[Hook]:
        """Those that have this method: no other is called then."""
        return [hook for hook in self.hooks if _overrides(hook, moment)]

    # Checkpoints

    def capture(self) -> Snapshot:
        """The states of all hooks. The tensors share memory with theirs."""
        tensors: dict[str, Tensor] = {}
        document = []
        for number, hook in enumerate(self.hooks):
            with _named(hook, "state_dict"):
                encoded = encode_state(hook.state_dict(), str(number), tensors)
            document.append({"name": type(hook).__name__, "state": encoded})

        return Snapshot(
            {HOOKS_FILE: tensors} if tensors else {}, {HOOKS_FILE: document} if document else {}
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Give every hook the state that one of its class had, in order."""
        if not self.hooks:
            return

        def copied(tensor: Tensor) -> Tensor:
            # A shard is read on the host; it goes where the parameters are.
            device = next(self.run.model.parameters()).device if is_shard(tensor) else tensor.device
            return tensor.to(device, copy=True)

        with translated(HOOKS_FILE):
            tensors = snapshot.tensors.get(HOOKS_FILE, {})
            document = snapshot.documents.get(HOOKS_FILE, [])
            states = defaultdict[str, list[Any]](list)

            for entry in document:
                state = decode_state(entry["state"], lambda name: copied(tensors[name]))
                states[entry["name"]].append(state)

        for hook in self.hooks:
            name = type(hook).__name__
            if not states[name]:
                if _overrides(hook, "load_state_dict") and self.run.rank == 0:
                    log.warning(
                        f"the checkpoint has no state of the hook {name}, which begins anew"
                    )
            elif state := states[name].pop(0):
                with _named(hook, "load_state_dict"):
                    hook.load_state_dict(state)


def make_hooks(
    job: EvaluationJob,
    config: Config,
    folder: Path,
    report: Callable[..., None] | None,
    total_steps: int,
    progress: Progress,
) -> TaskHooks:
    """Collective: the task's hooks, compared across ranks. `report`: as for `Run`."""
    hooks: list[Any] = list(job.task.hooks())
    ddp = job.ddp
    where = f"{type(job.task).__name__}.hooks()"

    for hook in hooks:
        every = getattr(hook, "every_steps", None)
        if not isinstance(hook, Hook) or type(every) is not int or every < 1:
            name = getattr(hook, "__name__", type(hook).__name__)
            raise UsageError(
                f"{where} returned {name}, which is not a drumline.Hook object with every_steps from 1 on",
                next_step="return a list of hook objects",
            )

    check_same(
        {where: [[type(hook).__name__, hook.every_steps] for hook in hooks]},
        host=ddp.host,
        next_step="return the same hooks in the same order on every rank; a hook may use run.rank",
    )

    run = Run(
        task=job.task,
        model=job.model,
        _optimizer=getattr(job, "optimizer", None),
        config=config,
        total_steps=total_steps,
        rank=ddp.rank,
        world_size=ddp.world_size,
        device=ddp.device,
        folder=folder,
        has_eval_data=bool(job.eval_loaders),
        _report=report,
        _autocast=job.autocast,
        _shared_weights=getattr(job, "shared_weights", nullcontext),
    )

    return TaskHooks(hooks, run, job, progress)


def _overrides(hook: Hook, method: str) -> bool:
    """Whether the hook has a method of its own for this."""
    return getattr(type(hook), method) is not getattr(Hook, method)


@contextmanager
def _named(hook: Hook, method: str) -> Iterator[None]:
    """What is raised here names the hook."""
    where = f"{type(hook).__name__}.{method}()"
    try:
        yield
    except DrumlineError as error:
        error.what = f"the hook {where}: {error.what}"
        raise
    except (Exception, SystemExit) as error:
        error.add_note(f"in the hook {where}")
        raise


# The context


@dataclass(frozen=True)
class RunRequest:
    """A task, its settings and folder, and the arguments of the command."""

    task: str
    """As the user named it."""

    config: Config
    run: Path
    """The run folder."""

    fresh: bool
    """Whether an earlier run in it is moved aside."""

    command: tuple[str, ...]


@dataclass(frozen=True)
class RunContext:
    """One object for the whole run; only `progress` and `throughput` change."""

    request: RunRequest
    job: Job
    progress: Progress
    """The loop changes it, and so do actions."""

    reporter: Reporter
    total_steps: int
    """Of the whole run, from its first start on."""

    hooks: TaskHooks
    throughput: Throughput = field(default_factory=Throughput)

    def __post_init__(self) -> None:
        self.progress.last_step = self.total_steps

    @property
    def config(self) -> Config:
        return self.request.config

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.request.run)

    def end_if(self, num_votes: float) -> None:
        """Collective: end the run after this step if `num_votes`, the number of ranks that ask for
        it, is not 0."""
        if not num_votes:
            return

        progress = self.progress
        if progress.step < progress.last_step:
            progress.stopped = {
                "reason": self.hooks.pending_reason(),
                **run_length(self.config.train),
            }
            progress.last_step = progress.step

        self.hooks.run.stop_reason = None

    @property
    def retention(self) -> Retention:
        """Which checkpoints are kept."""
        task = self.job.task
        settings = self.config.checkpoint
        return Retention(
            settings.keep_last, settings.keep_best, task.best_metric, task.higher_is_better
        )

    def note(self, message: str) -> None:
        """Log a note."""
        self.reporter.report("note", step=self.progress.step, message=message)

    def warn(self, message: str) -> None:
        self.reporter.report("warning", step=self.progress.step, message=message)


# Actions


class Action:
    """Something that happens between steps, on every rank."""

    name = ""
    interval = 1
    """After how many steps `due` is called; it is also called after the first step, at the end of
    each epoch and after the last step. 0: after every step, for an action that a thread or a signal
    triggers."""

    def start(self, context: RunContext) -> None:
        """Collective: before the first step."""

    def due(self, step: int, /) -> bool:
        """Whether to run after this step: the same on every rank where `run` is collective."""
        raise NotImplementedError

    def run(self, context: RunContext, /) -> None:
        """Collective, unless its docstring differs."""
        raise NotImplementedError


@dataclass
class SimpleAction(Action):
    """An action that needs nothing but these functions."""

    name: str
    due: Callable[[int], bool]
    run: Callable[[RunContext], None]
    interval: int


class Periodic(Action):
    """Due after every so many steps and epochs (0: never), and after the last step."""

    def __init__(self, progress: Progress, *, every_steps: int, every_epochs: int) -> None:
        self._progress = progress
        self.interval = every_steps or AT_EPOCH_END
        self._every_epochs = every_epochs or sys.maxsize

    def due(self, step: int) -> bool:
        cursor = self._progress.cursor
        return (
            step % self.interval == 0
            or (cursor.position == 0 and cursor.epoch % self._every_epochs == 0)
            or step >= self._progress.last_step
        )
