"""The global batch of a run, which the number of ranks does not change once the run has begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumline.config.schema import TrainConfig


@dataclass(frozen=True)
class Batch:
    """What one optimizer step is made of."""

    size: int
    """Samples over all ranks."""
    accumulate: int
    micro_batch_size: int | None
    num_shares: int
    """How many ranks the batch was made for; the rate may be scaled by it."""
    note: str | None = None
    """What to tell the user of it."""


def choose_batch(train: TrainConfig, *, world_size: int, saved: Mapping[str, Any] | None = None) -> Batch:
    """The batch that the settings ask for. `saved`: the facts of the checkpoint that the run goes on from."""
    if train.batch_size is not None:
        return Batch(train.batch_size, train.accumulate, train.micro_batch_size, world_size)
    per_rank = train.batch_size_per_rank or 1
    asked = per_rank * world_size
    size = asked if saved is None else _size_at_the_start(saved, per_rank, asked)
    if size == asked:
        return Batch(size, train.accumulate, train.micro_batch_size, world_size)
    ranks = size // per_rank
    note = (
        f"the global batch stays {size}, as the run began ({per_rank} on each of {ranks} ranks): now "
        f"{size / world_size:.4g} on each of {world_size}"
    )
    if train.exact == "elastic":  # micro-batches belong to the shards, which stay as they are
        return Batch(size, train.accumulate, train.micro_batch_size, ranks, note)
    # A rank is to hold no more at once than it did when the run began.
    most = train.micro_batch_size or -(-per_rank // train.accumulate)
    return Batch(size, 1, most, ranks, f"{note}, at most {most} at once")


def _size_at_the_start(saved: Mapping[str, Any], per_rank: int, asked: int) -> int:
    # Another batch per rank than before is the user's wish for another batch.
    was_per_rank = saved["config"].get("train.batch_size_per_rank")
    return int(saved["batch_size"]) if was_per_rank == per_rank else asked
