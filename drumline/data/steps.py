"""What training batches come in: steps of micro-batches for the engine, plain batches for a user's own loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from drumline.data.followed import Follower, followed
from drumline.data.plan import Sharing, StepPlan
from drumline.errors import UsageError


class Micro(NamedTuple):
    """One micro-batch on the device."""

    data: Any
    size: int
    """How many samples count; 0: a placeholder, to be run with weight 0 so that collectives still match."""
    is_last: bool
    """Whether the step ends with it: gradients are synchronised here."""
    part: int
    """Which share or shard of the global batch it belongs to."""
    ends_part: bool
    """Whether it is the last one of that."""


class Step(NamedTuple):
    """One optimizer step: what it covers, and its micro-batches, to be taken before the next step is."""

    plan: StepPlan
    micro_batches: Iterator[Micro]


class StepLoader(ABC):
    """This rank's training batches, whatever the dataset is like."""

    sharing: Sharing
    scale: float = 1.0
    """For the batch just handed out: a mean loss times this, averaged over ranks by DDP, is the exact global
    mean."""
    waited_s: float = 0.0
    """How long steps have waited for their batches so far."""
    follower: Follower | None = None
    """Of who iterates; who takes steps speaks for himself."""

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
        return followed(self._batches_of_steps(), self.follower, steps_done=lambda: self.steps_done)

    def _batches_of_steps(self) -> Iterator[Any]:
        for step in self.steps():
            for micro in step.micro_batches:
                self.scale = self.sharing.world_size * micro.size / step.plan.global_size
                yield micro.data

    def _refuse_shards(self) -> None:
        if self.sharing.shards is not None:
            raise UsageError(
                "batches cut into shards are for steps() only: ranks have different numbers of them",
                next_step="leave shards out, or take steps from loader.steps()",
            )


def not_taken_whole() -> UsageError:
    """The loop has gone on too early."""
    return UsageError(
        "the next step was asked for before all micro-batches of the last one were taken",
        next_step="take every item of step.micro_batches before the next step",
    )
