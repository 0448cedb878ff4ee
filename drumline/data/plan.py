"""Who sees which positions of the epoch's order, and when: pure arithmetic that every rank does alike.

The global batch of a step depends on the cursor and the batch size alone; the world size only says how it is
shared. One cursor is therefore all a checkpoint has to hold, and a run may go on with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next global batch starts."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a global batch is cut up: by rank, or into shards that do not depend on the number of ranks."""

    batch_size: int
    rank: int
    world_size: int
    accumulate: int = 1
    """Micro-batches that a share (or a shard) is cut into."""
    micro_batch_size: int | None = None
    """As many micro-batches as keep them this small, instead."""
    shards: int | None = None
    """Cut the batch into so many shards; a rank takes whole shards. None: each rank takes one share."""

    @property
    def parts(self) -> int:
        """How many pieces a full batch is cut into before micro-batches are made."""
        return self.shards or self.world_size

    @property
    def least(self) -> int:
        """The smallest share of a short last batch. BatchNorm has no statistics of a single sample, and some of its
        layers refuse it, so shares of one are made only where all are that small."""
        return min(2, max(1, self.batch_size // (self.parts * self.accumulate)))

    def parts_used(self, size: int) -> int:
        """How many parts of a batch of this size get samples."""
        return _parts_used(size, parts=self.parts, least=self.least)

    def micro_batches(self, size: int) -> int:
        """How many micro-batches a share of this size is cut into."""
        if self.micro_batch_size is not None:
            return -(-size // self.micro_batch_size)
        return _parts_used(size, parts=self.accumulate, least=self.least)


class Piece(NamedTuple):
    """One micro-batch: the positions [low, high) of the epoch's order."""

    low: int
    high: int
    part: int
    """Which share or shard of the global batch it belongs to."""
    ends_part: bool
    """Whether it is the last one of that."""
    counts: bool = True
    """False: a placeholder, to be run with weight 0."""

    @property
    def size(self) -> int:
        """How many samples count."""
        return self.high - self.low if self.counts else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step as one rank sees it; all numbers are positions in the epoch's order."""

    epoch: int
    start: int
    """The global batch is [start, stop)."""
    stop: int
    share: tuple[int, int]
    """This rank's own samples are [low, high)."""
    pieces: tuple[Piece, ...]
    """The share, cut into micro-batches. Without shards there are as many on every rank, so that collectives in the
    forward pass match: a rank with too few samples for that ends with a placeholder, the first samples of the global
    batch. With shards a rank may have none."""
    num_parts: int
    """How many shares or shards of this global batch have samples."""
    following: Cursor

    @property
    def global_size(self) -> int:
        return self.stop - self.start

    @property
    def local_size(self) -> int:
        return self.share[1] - self.share[0]

    @property
    def has_several_parts(self) -> bool:
        """Whether this rank has more than one shard."""
        return bool(self.pieces) and self.pieces[0].part != self.pieces[-1].part


# Asked for twice in every step: by who makes its batches, which may be far ahead, and by who takes it.
@lru_cache(maxsize=256)
def plan_step(cursor: Cursor, *, length: int, sharing: Sharing) -> StepPlan:
    """The step that starts at the cursor, which must stand inside the epoch (`position < length`)."""
    start = cursor.position
    stop = min(start + sharing.batch_size, length)
    mine = own_parts(stop - start, sharing)
    parts = [_share(start, stop, part=part, sharing=sharing) for part in mine]
    return StepPlan(
        epoch=cursor.epoch,
        start=start,
        stop=stop,
        share=(parts[0][0], parts[-1][1]) if parts else (stop, stop),
        pieces=tuple(_pieces(start, stop, mine, parts, sharing)),
        num_parts=sharing.parts_used(stop - start),
        following=Cursor(cursor.epoch, stop) if stop < length else Cursor(cursor.epoch + 1, 0),
    )


def plan_epoch(cursor: Cursor, *, length: int, sharing: Sharing) -> Iterator[StepPlan]:
    """The steps from the cursor to the end of its epoch."""
    epoch = cursor.epoch
    while cursor.epoch == epoch and cursor.position < length:
        plan = plan_step(cursor, length=length, sharing=sharing)
        yield plan
        cursor = plan.following


def own_parts(size: int, sharing: Sharing) -> range:
    """The shares or shards of a batch of this size that a rank computes."""
    if sharing.shards is None:
        return range(sharing.rank, sharing.rank + 1)
    return parts_of_rank(sharing.rank, num_parts=sharing.parts_used(size), world_size=sharing.world_size)


def parts_of_rank(rank: int, *, num_parts: int, world_size: int) -> range:
    """The shards that a rank has, of so many that hold samples."""
    return range(*_balanced(0, num_parts, part=rank, parts=min(world_size, num_parts)))


def micro_batches_per_epoch(*, length: int, sharing: Sharing) -> int:
    """How many micro-batches a whole epoch has; the same number on every rank (without shards)."""
    full_steps, rest = divmod(length, sharing.batch_size)
    per_step, last = (_common_count(size, sharing) if size else 0 for size in (sharing.batch_size, rest))
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


def _pieces(
    start: int, stop: int, mine: range, parts: list[tuple[int, int]], sharing: Sharing
) -> Iterator[Piece]:
    placeholder = (start, min(start + sharing.least, stop))
    for part, (low, high) in zip(mine, parts, strict=True):
        # Without shards: what the rank with the most samples needs. The others do the same number of forward passes,
        # because some of these hold collectives (SyncBatchNorm, or a level-1 loop without no_sync).
        count = (
            _common_count(stop - start, sharing)
            if sharing.shards is None
            else sharing.micro_batches(high - low)
        )
        used = _pieces_used(high - low, count, sharing)
        for number in range(count):
            if number < used:
                yield Piece(*_balanced(low, high, part=number, parts=used), part, number == count - 1)
            else:
                yield Piece(*placeholder, part, number == count - 1, counts=False)


def _pieces_used(size: int, count: int, sharing: Sharing) -> int:
    if size == 0:
        return 0
    return max(sharing.micro_batches(size), _parts_used(size, parts=count, least=sharing.least))


def _common_count(size: int, sharing: Sharing) -> int:
    largest_share = -(-size // sharing.parts_used(size))
    return sharing.micro_batches(largest_share)


def _share(start: int, stop: int, *, part: int, sharing: Sharing) -> tuple[int, int]:
    """One part of [start, stop); the last parts get nothing when there are too few samples."""
    return _balanced(start, stop, part=part, parts=sharing.parts_used(stop - start))


def _balanced(start: int, stop: int, *, part: int, parts: int) -> tuple[int, int]:
    """A contiguous piece of [start, stop), empty for parts that there are not. The first pieces get what does not
    divide evenly: rank 0, whose buffers are sent to all, is never without samples."""
    if part >= parts:
        return stop, stop
    size, extra = divmod(stop - start, parts)
    low = start + part * size + min(part, extra)
    return low, low + size + (part < extra)


def _parts_used(size: int, *, parts: int, least: int) -> int:
    return min(parts, max(1, size // least))
