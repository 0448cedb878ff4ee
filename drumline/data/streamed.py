"""Reading a stream: one pass after another, with randomness that belongs to the position of a sample.

What reads a stream runs in the training process, or ahead of it in one worker process. More than one would share the
stream among them, and the order of samples would depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from drumline.data.fetch import seed_generators
from drumline.data.mixing import key
from drumline.data.plan import StepPlan
from drumline.data.serving import BatchServer, Loading
from drumline.errors import UsageError
from drumline.log import log

END = object()
"""What a pass gives after its last sample."""
_BEGINNING = -1  # the position whose seed `iter` itself is called with


class Ask(NamedTuple):
    """A request to a reader: the next answer; first go to `opening`, if one is given."""

    opening: Any = None


class ReadStep(NamedTuple):
    """A reader's answer: one optimizer step of this rank."""

    plan: StepPlan
    batches: list[Any]
    """One for each piece of the plan."""
    state: Any = None
    """Where a stream that keeps its own place stands after this step."""
    digest: str = ""
    """Of the first sample; only in the first answer after an opening."""


class NoLengthError(UsageError, TypeError):
    """How long a stream is was asked for. A TypeError too: that is how `list` learns that there is no length."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the length of the stream {name} is not known", next_step="count the batches while you take them"
        )


class Pass:
    """One pass over a stream. The global generators are seeded for each sample; whoever reads puts them back."""

    def __init__(self, dataset: Any, *, seeds: tuple[int, ...], position: int = 0) -> None:
        self.position = position
        """Of the next sample."""
        self._name = type(dataset).__name__
        self._seeds = seeds
        seed_generators(key(*seeds, _BEGINNING))
        self._samples = iter(dataset)

    def take(self) -> Any:
        """The next sample, or `END`."""
        seed_generators(key(*self._seeds, self.position))
        try:
            sample = next(self._samples)
        except StopIteration:
            self._samples = iter(())  # some iterators would start over
            return END
        except Exception as error:
            error.add_note(f"while reading sample {self.position} of {self._name}")
            raise
        self.position += 1
        return sample


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Tell a dataset that wants to know it which epoch begins."""
    if callable(set_epoch := getattr(dataset, "set_epoch", None)):
        set_epoch(epoch)


def asks_from(opening: Any) -> Iterator[Ask]:
    """What is asked of a reader: it goes on by itself, into the next epoch too."""
    yield Ask(opening)
    while True:
        yield Ask()


def read_by(reader: Dataset[Any], loading: Loading, device: torch.device, *, warns: bool) -> BatchServer:
    """A reader's answers, read ahead by one worker process if there are to be any."""
    if loading.workers > 1 and warns:
        log.warning(
            f"{loading.workers} workers were asked for, but one is used: more would share the stream among them, and "
            "the order of its samples would depend on their number"
        )
    return BatchServer(reader, replace(loading, workers=min(loading.workers, 1)), device)
