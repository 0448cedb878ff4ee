"""Who sees which positions of the epoch's order, and when: pure arithmetic that every rank does alike.

The global batch of a step depends on the cursor and the batch size alone; the world size only says how it is
shared. One cursor is therefore all a checkpoint has to hold, and a run may go on with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next global batch starts."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step as one rank sees it; all numbers are positions in the epoch's order."""

    epoch: int
    start: int
    """The global batch is [start, stop)."""
    stop: int
    micro_batches: tuple[tuple[int, int], ...]
    """This rank's share, cut into [low, high) pieces: as many on every rank, so that collectives match. A
    rank with too few samples for that ends with a placeholder: the first samples of the global batch, to be
    run with weight 0."""
    local_size: int
    """Samples in this rank's share, without a placeholder."""
    following: Cursor

    @property
    def global_size(self) -> int:
        return self.stop - self.start

    @property
    def is_placeholder(self) -> bool:
        """Whether this rank has no samples in this step at all."""
        return self.local_size == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many samples count in each micro-batch; 0 for a placeholder."""
        sizes = tuple(high - low for low, high in self.micro_batches)
        return sizes if sum(sizes) == self.local_size else (*sizes[:-1], 0)


def plan_step(
    cursor: Cursor, *, length: int, batch_size: int, rank: int, world_size: int, accumulate: int = 1
) -> StepPlan:
    """The step that starts at the cursor, which must stand inside the epoch (`position < length`)."""
    start = cursor.position
    stop = min(start + batch_size, length)
    least = _least_piece(batch_size, world_size=world_size, accumulate=accumulate)
    low, high = _share(start, stop, part=rank, parts=world_size, least=least)
    count = _micro_batch_count(stop - start, world_size=world_size, accumulate=accumulate, least=least)
    pieces = tuple(_share(low, high, part=part, parts=count, least=least) for part in range(count))
    placeholder = (start, min(start + least, stop))
    return StepPlan(
        epoch=cursor.epoch,
        start=start,
        stop=stop,
        micro_batches=tuple(piece if piece[0] < piece[1] else placeholder for piece in pieces),
        local_size=high - low,
        following=Cursor(cursor.epoch, stop) if stop < length else Cursor(cursor.epoch + 1, 0),
    )


def plan_epoch(
    cursor: Cursor, *, length: int, batch_size: int, rank: int, world_size: int, accumulate: int = 1
) -> Iterator[StepPlan]:
    """The steps from the cursor to the end of its epoch."""
    epoch = cursor.epoch
    while cursor.epoch == epoch and cursor.position < length:
        plan = plan_step(
            cursor,
            length=length,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            accumulate=accumulate,
        )
        yield plan
        cursor = plan.following


def micro_batches_per_epoch(*, length: int, batch_size: int, world_size: int, accumulate: int = 1) -> int:
    """How many micro-batches a whole epoch has; the same number on every rank."""
    full_steps, rest = divmod(length, batch_size)
    least = _least_piece(batch_size, world_size=world_size, accumulate=accumulate)
    per_step, last = (
        _micro_batch_count(size, world_size=world_size, accumulate=accumulate, least=least) if size else 0
        for size in (batch_size, rest)
    )
    return full_steps * per_step + last


def evaluation_batches(
    *, length: int, batch_size: int, rank: int, world_size: int
) -> list[tuple[int, tuple[int, int]]]:
    """This rank's batches as (number, [low, high)): dealt round robin, so what is in a batch does not depend
    on the world size. Together the ranks have every sample once; a rank may have none."""
    count = -(-length // batch_size)
    return [
        (number, (number * batch_size, min((number + 1) * batch_size, length)))
        for number in range(rank, count, world_size)
    ]


def _least_piece(batch_size: int, *, world_size: int, accumulate: int) -> int:
    """The smallest piece that a short last batch is cut into. BatchNorm has no statistics of a single sample, and
    some of its layers refuse it, so pieces of one are made only where all pieces are that small."""
    return min(2, max(1, batch_size // (world_size * accumulate)))


def _share(start: int, stop: int, *, part: int, parts: int, least: int) -> tuple[int, int]:
    """A balanced contiguous piece of [start, stop), empty for the last parts when there are too few samples. The first
    pieces get what does not divide evenly: rank 0, whose buffers DDP sends to all, is never without samples."""
    used = _parts_used(stop - start, parts=parts, least=least)
    size, extra = divmod(stop - start, used)
    low = start + part * size + min(part, extra)
    return (low, low + size + (part < extra)) if part < used else (stop, stop)


def _parts_used(size: int, *, parts: int, least: int) -> int:
    return min(parts, max(1, size // least))


def _micro_batch_count(global_size: int, *, world_size: int, accumulate: int, least: int) -> int:
    # What the rank with the most samples needs. The others do the same number of forward passes, because some
    # of these hold collectives (SyncBatchNorm, or a level-1 loop without no_sync).
    largest_share = -(-global_size // _parts_used(global_size, parts=world_size, least=least))
    return _parts_used(largest_share, parts=accumulate, least=least)
