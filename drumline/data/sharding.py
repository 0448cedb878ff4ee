"""Which rank sees which positions of the epoch's order in which step: pure arithmetic, the same on
every rank.

The global batch of a step depends only on the cursor and the batch size; the world size only
decides how it is split. So a checkpoint needs only the cursor, and a run can resume on any number
of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from drumline.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next global batch starts."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a global batch is split into shards: one per rank, or a fixed number on any number of
    ranks."""

    batch_size: int
    rank: int
    world_size: int
    accumulate: int = 1
    """Micro-batches that a shard is cut into."""
    micro_batch_size: int | None = None
    """Instead: the largest size of a micro-batch."""
    shards: int | None = None
    """A fixed number of shards; a rank computes one or more of them. None: one per rank."""
    sizes: tuple[int, ...] | None = None
    """How many samples of a full batch each rank gets. None: as equally many as possible."""

    @property
    def num_shards(self) -> int:
        """How many shards a full batch is cut into."""
        return self.shards or self.world_size

    @property
    def min_shard_size(self) -> int:
        """The smallest shard of a short last batch. BatchNorm has no statistics for a single
        sample, and some layers refuse it, so shards of one sample are made only if all are that
        small."""
        return min(2, max(1, self.batch_size // (self.num_shards * self.accumulate)))

    def shards_used(self, size: int) -> int:
        """How many shards of a batch of this size get samples."""
        return _parts_used(size, parts=self.num_shards, smallest=self.min_shard_size)

    def micro_batches(self, size: int) -> int:
        """How many micro-batches a shard of this size is cut into."""
        if self.micro_batch_size is not None:
            return -(-size // self.micro_batch_size)
        return _parts_used(size, parts=self.accumulate, smallest=self.min_shard_size)

    def uneven_sizes(self, size: int) -> tuple[int, ...] | None:
        """The sizes of the shards of a batch of this size if they follow `sizes`; None: they are as
        equal as possible, as in a short batch that would leave a rank with too few samples."""
        if self.sizes is None:
            return None
        ends = [size * end // self.batch_size for end in accumulate(self.sizes, initial=0)]
        sizes = tuple(high - low for low, high in pairwise(ends))
        return sizes if min(sizes) >= self.min_shard_size else None

    def own_shards(self, size: int) -> range:
        """The shards of a batch of this size that this rank computes."""
        if self.shards is None:
            return range(self.rank, self.rank + 1)
        return shards_of_rank(
            self.rank, num_shards=self.shards_used(size), world_size=self.world_size
        )

    def check(self) -> None:
        """Refuse a batch that cannot be split as requested."""
        parts = "ranks" if self.shards is None else "shards"
        if self.batch_size < self.num_shards:
            raise UsageError(
                f"a global batch of {self.batch_size} cannot be split over {self.num_shards} {parts}: each needs a "
                "sample",
                next_step=f"set the batch size to {self.num_shards} or more, or choose fewer {parts}",
            )
        if self.num_shards < self.world_size:
            raise UsageError(
                f"{self.shards} shards are too few for {self.world_size} ranks: some ranks would have no samples",
                next_step=f"start at most {self.shards} ranks, or begin a new run with --train.shards "
                f"{self.world_size}",
            )
        for name, value in (
            ("accumulate", self.accumulate),
            ("micro_batch_size", self.micro_batch_size),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name} cannot be {value}", next_step=f"set {name} to 1 or more")


class Span(NamedTuple):
    """The positions [low, high) of the epoch's order that make one micro-batch."""

    low: int
    high: int
    shard: int
    """Which shard of the global batch it belongs to."""
    ends_shard: bool
    """Whether it is the shard's last micro-batch."""
    counts: bool = True
    """False: a placeholder, to be run with weight 0."""

    @property
    def size(self) -> int:
        """The number of its samples."""
        return self.high - self.low if self.counts else 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step as one rank sees it; all numbers are positions in the epoch's order."""

    epoch: int
    start: int
    """The global batch is [start, stop)."""
    stop: int
    local_range: tuple[int, int]
    """This rank's own samples are [low, high)."""
    spans: tuple[Span, ...]
    """This rank's micro-batches. With one shard per rank every rank has the same number, so that
    collectives in the forward pass match: a rank with too few samples ends with a placeholder, the
    first samples of the global batch. With a fixed number of shards a rank may have none."""
    num_shards: int
    """How many shards of this global batch have samples."""
    next_cursor: Cursor

    @property
    def global_size(self) -> int:
        return self.stop - self.start

    @property
    def local_size(self) -> int:
        return self.local_range[1] - self.local_range[0]

    @property
    def has_several_shards(self) -> bool:
        """Whether this rank has more than one shard."""
        return bool(self.spans) and self.spans[0].shard != self.spans[-1].shard


# Called twice in every step: where its batches are made, which may be far ahead, and where they are
# used.
@lru_cache(maxsize=256)
def plan_step(cursor: Cursor, *, length: int, sharding: Sharding) -> StepPlan:
    """The step that starts at the cursor, which must be inside the epoch (`position < length`)."""
    start = cursor.position
    stop = min(start + sharding.batch_size, length)
    count = sharding.shards_used(stop - start)
    sizes = sharding.uneven_sizes(stop - start)
    if sizes is not None:
        low = start + sum(sizes[: sharding.rank])
        own_shards = [_ShardRange(sharding.rank, low, low + sizes[sharding.rank])]
    else:
        own_shards = [
            _ShardRange(shard, *_balanced(start, stop, part=shard, parts=count))
            for shard in sharding.own_shards(stop - start)
        ]
    # With one shard per rank: what the rank with the most samples needs. The others do the same
    # number of forward passes, because some of these hold collectives (SyncBatchNorm, or a user's
    # loop without no_sync).
    largest = max(sizes) if sizes is not None else -(-(stop - start) // count)
    spans: list[Span] = []
    for shard_range in own_shards:
        spans += _spans(start, stop, shard_range, largest, sharding)
    return StepPlan(
        epoch=cursor.epoch,
        start=start,
        stop=stop,
        local_range=(own_shards[0].low, own_shards[-1].high) if own_shards else (stop, stop),
        spans=tuple(spans),
        num_shards=count,
        next_cursor=Cursor(cursor.epoch, stop) if stop < length else Cursor(cursor.epoch + 1, 0),
    )


def plan_epoch(cursor: Cursor, *, length: int, sharding: Sharding) -> Iterator[StepPlan]:
    """The steps from the cursor to the end of its epoch."""
    epoch = cursor.epoch
    while cursor.epoch == epoch and cursor.position < length:
        plan = plan_step(cursor, length=length, sharding=sharding)
        yield plan
        cursor = plan.next_cursor


def shards_of_rank(rank: int, *, num_shards: int, world_size: int) -> range:
    """The shards that a rank computes, of a fixed number that have samples."""
    return range(*_balanced(0, num_shards, part=rank, parts=min(world_size, num_shards)))


class _ShardRange(NamedTuple):
    """The positions [low, high) of the epoch's order that make one shard."""

    shard: int
    low: int
    high: int


def _spans(
    start: int, stop: int, shard_range: _ShardRange, largest: int, sharding: Sharding
) -> Iterator[Span]:
    """The micro-batches of a shard of the global batch [start, stop), whose largest shard has so
    many samples."""
    shard, low, high = shard_range
    size = high - low
    smallest = sharding.min_shard_size
    count = sharding.micro_batches(largest if sharding.shards is None else size)
    used = 0
    if size:
        used = max(sharding.micro_batches(size), _parts_used(size, parts=count, smallest=smallest))
    for number in range(count):
        ends_shard = number == count - 1
        if number < used:
            yield Span(*_balanced(low, high, part=number, parts=used), shard, ends_shard)
        else:
            yield Span(start, min(start + smallest, stop), shard, ends_shard, counts=False)


def _balanced(start: int, stop: int, *, part: int, parts: int) -> tuple[int, int]:
    """A contiguous part of [start, stop), empty if there are too few samples. The first parts get
    the remainder, so that rank 0, whose buffers are broadcast, always has samples."""
    if part >= parts:
        return stop, stop
    size, extra = divmod(stop - start, parts)
    low = start + part * size + min(part, extra)
    return low, low + size + (part < extra)


def _parts_used(size: int, *, parts: int, smallest: int) -> int:
    return min(parts, max(1, size // smallest))
