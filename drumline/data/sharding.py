"""Which samples a rank sees in which step: the order of an epoch, how it is split over ranks, and the
ledger of what a rank has trained on. Pure arithmetic, the same on every rank.

The order and the random numbers of samples depend only on (seed, epoch, sample index), never on the
rank or worker. A number is a hash of these, so a whole batch is drawn at once, in any order, and a
checkpoint has nothing to save. The arithmetic is on integers modulo 2**64: the numbers are the same
on every platform.

The global batch of a step depends only on the cursor and the batch size; the world size only
decides how it is split. So a checkpoint needs only the cursor, and a run can resume on any number
of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from drumline.base.errors import UsageError
from drumline.runs.ledger_entries import LedgerEntry

_MASK = (1 << 64) - 1

# The odd number nearest 2**64 divided by the golden ratio: its multiples are spread evenly over 64
# bits.
_GOLDEN = 0x9E3779B97F4A7C15

# Multipliers and shifts of the splitmix64 finaliser, a bijection of 64-bit integers.
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)

# Zero-dimensional arrays: numpy would convert a scalar each time.
_ARRAY_MULTIPLIERS = tuple(np.array(multiplier, dtype=np.uint64) for multiplier in _MULTIPLIERS)
_ARRAY_SHIFTS = tuple(np.array(shift, dtype=np.uint64) for shift in _SHIFTS)
_DROPPED_BITS = np.uint64(11)  # a float64 holds 53 of 64 bits

# Pairs of Feistel rounds of a shuffle: the fewest that make every order of five samples about
# equally likely (chi-square over 24,000 seeds; five pairs fail it). A pair takes about five
# microseconds per batch.
_ROUND_PAIRS = 6


# The order of an epoch, and random numbers


@dataclass(slots=True)
class Draws:
    """Random numbers for the samples of one batch: a row for each of `indices`."""

    seed: int
    epoch: int
    indices: NDArray[np.int64]

    def bits(self, count: int, *, stream: int = 0) -> NDArray[np.uint64]:
        """64 random bits, `count` for each sample; a different `stream` gives independent ones."""
        offset = np.uint64(hash_integers(self.seed, self.epoch, stream))
        starts = _mix_in_place(self.indices.astype(np.uint64) + offset)
        counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return _mix_in_place(starts[:, np.newaxis] + counters)

    def uniform(self, count: int, *, stream: int = 0) -> NDArray[np.float64]:
        """Numbers in [0, 1), `count` for each sample; a different `stream` gives independent
        ones."""
        bits = self.bits(count, stream=stream) >> _DROPPED_BITS
        numbers: NDArray[np.float64] = bits.astype(np.float64)
        numbers *= 2.0**-53
        return numbers


def hash_integers(*numbers: int) -> int:
    """64 bits that follow from a sequence of integers, such as (seed, epoch)."""
    state = 0
    for number in numbers:
        state = ((state ^ (number & _MASK)) + _GOLDEN) & _MASK
        state ^= state >> _SHIFTS[0]
        state = state * _MULTIPLIERS[0] & _MASK
        state ^= state >> _SHIFTS[1]
        state = state * _MULTIPLIERS[1] & _MASK
        state ^= state >> _SHIFTS[2]

    return state


def _mix_in_place(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The same finaliser for a whole array, which it overwrites and returns."""
    numbers ^= numbers >> _ARRAY_SHIFTS[0]
    numbers *= _ARRAY_MULTIPLIERS[0]
    numbers ^= numbers >> _ARRAY_SHIFTS[1]
    numbers *= _ARRAY_MULTIPLIERS[1]
    numbers ^= numbers >> _ARRAY_SHIFTS[2]

    return numbers


def permute(
    positions: NDArray[np.int64],
    *,
    length: int,
    seed: int,
    epoch: int,
) -> NDArray[np.int64]:
    """The sample indices at these positions of the epoch's shuffled order: a bijection of [0,
    length).

    The order is not stored: each index is computed separately, so ranks and workers compute only
    the indices of their own batch. A dataset of a billion samples costs three megabytes and a few
    milliseconds per epoch, not eight gigabytes and minutes.
    """
    if positions.size == 0:
        return positions.copy()

    grid = _grid(length, seed, epoch)
    indices = _shuffle(positions, grid)

    # The grid has up to sqrt(length) extra cells. A position that lands on one is shuffled again
    # until it lands inside ("cycle walking"): a bijection of the grid becomes one of the positions.
    while indices.max() >= length:
        outside = indices >= length
        indices[outside] = _shuffle(indices[outside], grid)

    return indices


class _Grid(NamedTuple):
    """Positions are laid out on about sqrt(length) rows and columns."""

    # Zero-dimensional arrays: numpy would convert a number in each round.
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    row_shifts: NDArray[np.int64]
    """[pair, column]: what is added to the row."""

    column_shifts: NDArray[np.int64]
    """[pair, row]: what is added to the column."""


@lru_cache(maxsize=4)
def _grid(length: int, seed: int, epoch: int) -> _Grid:
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    draws = Draws(seed, epoch, np.arange(_ROUND_PAIRS, dtype=np.int64))

    return _Grid(
        rows=np.array(rows),
        columns=np.array(columns),
        row_shifts=(draws.uniform(columns, stream=1) * rows).astype(np.int64),
        column_shifts=(draws.uniform(rows, stream=2) * columns).astype(np.int64),
    )


def _shuffle(cells: NDArray[np.int64], grid: _Grid) -> NDArray[np.int64]:
    """Feistel rounds: a random number that depends on the column is added to the row (modulo the
    number of rows), then the other way round. Each is a bijection of the grid."""
    row, column = np.divmod(cells, grid.columns)
    for row_shift, column_shift in zip(grid.row_shifts, grid.column_shifts, strict=True):
        row += row_shift[column]
        row %= grid.rows
        column += column_shift[row]
        column %= grid.columns

    row *= grid.columns
    row += column
    return row


# What a step takes of it


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

        for name in ("accumulate", "micro_batch_size"):
            value = getattr(self, name)
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

    # With one shard per rank: what the rank with the most samples needs. The others do the same
    # number of forward passes, because some of these hold collectives (SyncBatchNorm, or a user's
    # loop without no_sync).
    if sizes is not None:
        largest = max(sizes)
        low = start + sum(sizes[: sharding.rank])
        own_shards = [_ShardRange(sharding.rank, low, low + sizes[sharding.rank])]
    else:
        largest = -(-(stop - start) // count)
        own_shards = [
            _ShardRange(shard, *_balanced(start, stop, part=shard, parts=count))
            for shard in sharding.own_shards(stop - start)
        ]

    spans: list[Span] = []
    for shard_range in own_shards:
        spans += _spans(start, stop, shard_range, largest, sharding)

    local_range = (stop, stop)
    if own_shards:
        local_range = (own_shards[0].low, own_shards[-1].high)

    next_cursor = Cursor(cursor.epoch, stop)
    if stop >= length:
        next_cursor = Cursor(cursor.epoch + 1, 0)

    return StepPlan(
        epoch=cursor.epoch,
        start=start,
        stop=stop,
        local_range=local_range,
        spans=tuple(spans),
        num_shards=count,
        next_cursor=next_cursor,
    )


def spans_of_full_batch(sharding: Sharding) -> tuple[Span, ...]:
    """This rank's micro-batches of a full global batch."""
    return plan_step(Cursor(), length=sharding.batch_size, sharding=sharding).spans


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
    start: int,
    stop: int,
    shard_range: _ShardRange,
    largest: int,
    sharding: Sharding,
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
    """How many parts of at least `smallest` it can be cut into, up to `parts`."""
    return min(parts, max(1, size // smallest))


# What was taken


class Ledger:
    """What this rank's steps have covered since the last `take`: positions of each epoch's order,
    run-length encoded.

    Consecutive steps of one global batch each are one entry of five numbers. An epoch is one entry,
    or two when its last batch is short. Before each save rank 0 writes the entries of all ranks
    (`training/between_steps/saver.py`); `drumline verify` replays them. The samples of a stream are
    assigned round-robin, so there an entry states how many samples of a global batch a rank had,
    not which."""

    def __init__(self) -> None:
        self._entries: list[LedgerEntry] = []
        self._first = (0, 0)
        self._epoch = 0
        self._stride = 0
        self._count = 0

        # What the next step of the current entry would cover; initially no step matches.
        self._low = -1
        self._high = -1
        self._stop = -1

    def add(self, plan: StepPlan) -> None:
        """Record a step. It runs in every step: mostly it only increments a counter."""
        low, high = plan.local_range
        if (
            low != self._low
            or high != self._high
            or plan.stop != self._stop
            or plan.epoch != self._epoch
        ):
            self._end_entry()
            self._epoch = plan.epoch
            self._stride = plan.stop - plan.start
            self._first = (low, high)

        self._count += 1
        self._low = low + self._stride
        self._high = high + self._stride
        self._stop = plan.stop + self._stride

    def take(self) -> list[LedgerEntry]:
        """The entries since the last call; the ledger is then empty."""
        self._end_entry()
        self._stop = -1  # no step continues that entry
        entries, self._entries = self._entries, []
        return entries

    def _end_entry(self) -> None:
        if self._count:
            self._entries.append(LedgerEntry(self._epoch, *self._first, self._stride, self._count))
            self._count = 0
