"""Training batches of a stream on the device; for the engine and for a user's own loop the same as a `Loader`.

Two kinds: a plain iterable is dealt to the ranks (`dealt`), one with a state of its own is each rank's own
(`own_stream`). How long either is is not known: steps come until the stream ends, and the next epoch begins with it
anew. One that is each rank's own has no epochs at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from drumline.data.dataset import check_stream, is_resumable
from drumline.data.dealt import DealtReader
from drumline.data.delivery import Delivery
from drumline.data.loader import check_sizes
from drumline.data.own_stream import OwnPlace, OwnReader
from drumline.data.plan import Cursor, Sharing
from drumline.data.serving import Loading
from drumline.data.steps import Micro, Step, StepLoader, not_taken_whole
from drumline.data.streamed import NoLengthError, ReadStep, asks_from, read_by
from drumline.data.transfer import copied
from drumline.errors import CheckpointError, DataError, UsageError


class StreamLoader(StepLoader):
    """This rank's training batches of a stream."""

    num_samples: None = None
    """Not known."""
    steps_per_epoch: None = None
    """Not known."""

    def __init__(
        self,
        dataset: Any,
        *,
        sharing: Sharing,
        device: torch.device,
        seed: int,
        loading: Loading,
    ) -> None:
        check_sizes(sharing)
        check_stream(dataset)
        self.name = type(dataset).__name__
        self._place = OwnPlace() if is_resumable(dataset) else None
        if self._place is not None and sharing.shards is not None:
            raise _not_elastic(self.name)
        self.sharing = sharing
        # Where nothing is copied to the device, what is kept must not be changed by a loss that works in place.
        self._delivery = Delivery(device, copied if device.type == "cpu" else lambda batch: batch)
        self._cursor = Cursor()
        reader = DealtReader if self._place is None else OwnReader
        self._server = read_by(
            reader(dataset, sharing=sharing, seed=seed, collate=loading.collate),
            # The worker stays from epoch to epoch in any case: the stream does not end there.
            replace(loading, persistent_workers=True),
            device,
            warns=sharing.rank == 0,
        )
        self._answers: Iterator[Any] = iter(())
        self._answers_at: Cursor | None = None  # the step that the next of these answers belongs to
        self._current: ReadStep | None = None  # read, and kept until it is taken whole
        self._steps_of_epochs = 0  # of those that this loader has seen the end of

    @property
    def is_resumable(self) -> bool:
        """Whether the stream is each rank's own and keeps its own place."""
        return self._place is not None

    @property
    def cursor(self) -> Cursor:
        """Where the next global batch starts. A plain stream goes there by reading all that comes before."""
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        if cursor == self._cursor:
            return
        if self._place is not None:
            raise CheckpointError(
                f"the run stands at sample {cursor.position}, but it has saved no state of the stream {self.name}",
                next_step="resume with the dataset that the run began with, or start a new run",
            )
        if cursor.epoch < 0 or cursor.position < 0:
            raise DataError(
                f"a stream has no sample {cursor.position} of epoch {cursor.epoch}", next_step="count from 0"
            )
        self._go_to(cursor)

    @property
    def steps_done(self) -> int:
        """How many optimizer steps come before the cursor; how long earlier epochs were is known only of those that
        this loader has read."""
        return self._steps_of_epochs + self._cursor.position // self.sharing.batch_size

    def state_dict(self) -> dict[str, Any] | None:
        """This rank's place in a stream of its own, after the last whole step; None: the cursor says it all."""
        if self._place is None:
            return None
        return {"world_size": self.sharing.world_size, "rank": self.sharing.rank, **self._place._asdict()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go to where `state_dict` was taken, on the same rank of as many."""
        if self._place is None or state is None:
            return
        places = dict(state)
        saved, now = places.pop("world_size"), self.sharing.world_size
        if saved != now:
            raise _another_world(self.name, saved=saved, now=now)
        if places.pop("rank") != self.sharing.rank:
            raise CheckpointError(
                f"rank {self.sharing.rank} was given the state of the stream {self.name} on rank {state['rank']}",
                next_step="give every rank the state that it saved",
            )
        self._place = OwnPlace(**places)
        self._go_to(Cursor(0, self._place.position))

    def __len__(self) -> int:
        raise NoLengthError(self.name)

    def steps(self) -> Iterator[Step]:
        """The steps from the cursor to the end of its epoch."""
        epoch = self._cursor.epoch
        while self._cursor.epoch == epoch:
            asked = time.perf_counter()
            read = self._read()
            self.waited_s += time.perf_counter() - asked
            yield Step(read.plan, self._micro_batches(read))
            if self._cursor != read.plan.following:
                raise not_taken_whole()

    def preview(self, most: int | None = None) -> Any:
        """The next micro-batch, which stays the next, whole: it is made already. None: this rank has none."""
        batches = self._read().batches
        return self._delivery.now(batches[0]) if batches else None

    def peek(self) -> str:
        """A digest of the first sample that this loader has read or will read; nothing is taken."""
        return self._read().digest

    def close(self) -> None:
        """End the worker process."""
        self._go_to(self._cursor)
        self._server.close()

    def _go_to(self, cursor: Cursor) -> None:
        self._cursor, self._current = cursor, None
        self._answers, self._answers_at = iter(()), None

    def _read(self) -> ReadStep:
        """The step at the cursor. One that was given up half-way is not read again: that may take long."""
        if self._current is None:
            self._current = self._next_answer()
        return self._current

    def _next_answer(self) -> ReadStep:
        if self._answers_at != self._cursor:
            self._answers = self._server.batches(
                asks_from(self._cursor if self._place is None else self._place)
            )
        self._answers_at = None  # until there is an answer: after an error the stream is opened anew
        answer = next(self._answers)
        if isinstance(answer, DataError):
            raise answer
        read: ReadStep = answer
        self._answers_at = read.plan.following
        return read

    def _micro_batches(self, read: ReadStep) -> Iterator[Micro]:
        pieces = read.plan.pieces
        # Only those of this step: what is not read yet is not made ahead.
        batches = self._delivery.batches(iter(read.batches))
        for number, (piece, data) in enumerate(zip(pieces, batches, strict=True), 1):
            if number == len(pieces):
                # Moved before the batch is handed out: a checkpoint after the optimizer step holds the right place.
                self._move_past(read)
            yield Micro(data, piece.size, number == len(pieces), piece.part, piece.ends_part)
        if not pieces:  # a rank may have none of a short batch's shards
            self._move_past(read)

    def _move_past(self, read: ReadStep) -> None:
        if read.plan.following.position == 0:
            self._steps_of_epochs = self.steps_done + 1
        self._cursor, self._current = read.plan.following, None
        self._place = read.state


def _not_elastic(name: str) -> UsageError:
    return UsageError(
        f"the stream {name} decides by rank what it yields, so its samples cannot be cut into shards that are the same "
        "on any number of ranks",
        next_step="train without --train.exact elastic, or give a map-style dataset or an iterable without state_dict",
    )


def _another_world(name: str, *, saved: int, now: int) -> CheckpointError:
    return CheckpointError(
        f"the state of the stream {name} was saved on {saved} ranks, now there are {now}: each rank's state is its own "
        "and cannot be shared out anew",
        next_step=f"resume on {saved} ranks, or begin a new run with a map-style dataset or an iterable without "
        "state_dict, which can be shared on any number of ranks",
    )
