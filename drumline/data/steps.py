"""What training loaders hand out: steps of micro-batches for the engine, plain batches for a user's own loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from drumline.data.sharding import Sharding, StepPlan
from drumline.errors import UsageError

_END = object()


class MicroBatch(NamedTuple):
    """One micro-batch on the device."""

    data: Any
    size: int
    """How many samples count; 0: a placeholder, to be run with weight 0 so that collectives still match."""
    is_last: bool
    """Whether the step ends with it: gradients are synchronized here."""
    shard: int
    """Of the global batch."""
    ends_shard: bool
    """Whether it is the shard's last micro-batch."""


class Step(NamedTuple):
    """One optimizer step: what it covers, and its micro-batches, to be taken before the next step is."""

    plan: StepPlan
    micro_batches: Iterator[MicroBatch]


class LoaderObserver(Protocol):
    """Notified of what a user's own loop does with its loader, which is all that can be known of such a loop."""

    def batch_requested(self, step: int | None) -> None:
        """The loop waits for a batch of the optimizer step after so many; None: it does not train."""

    def batch_ready(self) -> None:
        """The loop has its batch."""

    def epoch_ended(self) -> None:
        """There are no more batches."""


def observed(
    batches: Iterator[Any], observer: LoaderObserver | None, *, steps_done: Callable[[], int | None] = lambda: None
) -> Iterator[Any]:
    """The same batches; the observer is notified around each."""
    return batches if observer is None else _notifying(batches, observer, steps_done)


def _notifying(batches: Iterator[Any], observer: LoaderObserver, steps_done: Callable[[], int | None]) -> Iterator[Any]:
    observer.batch_requested(steps_done())
    while (batch := next(batches, _END)) is not _END:
        observer.batch_ready()
        yield batch
        observer.batch_requested(steps_done())
    observer.epoch_ended()


class StepLoader(ABC):
    """This rank's training batches, whatever the dataset is like."""

    sharding: Sharding
    scale: float = 1.0
    """For the batch just handed out: a mean loss times this, averaged over ranks by DDP, is the exact global mean."""
    waited_s: float = 0.0
    """How long steps have waited for their batches so far."""
    observer: LoaderObserver | None = None
    """Notified while a user's loop iterates; the engine, which uses `steps`, reports for itself."""

    @property
    @abstractmethod
    def steps_done(self) -> int:
        """How many optimizer steps come before the cursor, as far as is known."""

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """The steps from the cursor to the end of its epoch."""

    def __iter__(self) -> Iterator[Any]:
        """The batches from the cursor to the end of its epoch; iterate again for the next epoch."""
        self._refuse_shards()
        return observed(self._batches_of_steps(), self.observer, steps_done=lambda: self.steps_done)

    def _batches_of_steps(self) -> Iterator[Any]:
        for step in self.steps():
            for micro in step.micro_batches:
                self.scale = self.sharding.world_size * micro.size / step.plan.global_size
                yield micro.data

    def _refuse_shards(self) -> None:
        if self.sharding.shards is not None:
            raise UsageError(
                "with shards only steps() can be used: ranks have different numbers of batches",
                next_step="leave shards out, or take steps from loader.steps()",
            )


def incomplete_step() -> UsageError:
    return UsageError(
        "the next step was requested before all micro-batches of the last one were taken",
        next_step="take every item of step.micro_batches before the next step",
    )
