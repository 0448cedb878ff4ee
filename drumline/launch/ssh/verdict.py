"""Which rank of all hosts failed first, and the last lines that say so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline.launch.node.local import how_it_ended


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank that ended by itself, and not well."""

    host: str
    rank: int
    code: int
    at: float
    """By the controller's monotonic clock."""
    last_words: tuple[str, ...] = ()
    is_follower: bool = False
    """The rank itself knows of another that failed first."""
    error: str = ""
    """What it failed by, in one line, where the rank could tell."""
    was_shown: bool = False
    """Whether its last words are on the screen already, marked with its host and rank."""

    @property
    def in_a_line(self) -> str:
        return self.error or next((line.strip() for line in reversed(self.last_words) if line.strip()), "")

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({how_it_ended(self.code)})"


def in_order(failures: Sequence[Failure]) -> list[Failure]:
    """The first one first: by what ranks of a task say of each other, then by time."""
    return sorted(failures, key=lambda failure: (failure.is_follower, failure.at, failure.rank))


def last_messages(
    failures: Sequence[Failure], num_ranks: int, *, lost_first: bool = False
) -> Iterator[tuple[str, ...]]:
    """What the user reads last, each with the lines below it: the first failure with its last words, and all others in
    one line.

    With `lost_first` it was a host, of which was told already: then all ranks are others.
    """
    later = in_order(failures)
    if not lost_first:
        first = later.pop(0)
        if first.was_shown:
            above = f"next: see the lines above that begin with [{first.host} {first.rank}]"
            yield f"{first} failed first: {first.in_a_line}", above
        else:
            yield f"{first} failed first{':' if first.last_words else ''}", *first.last_words
    parts = [f"{failure} failed after it" for failure in later[:3]]
    if len(later) > 3:
        parts.append(f"{len(later) - 3} more failed")
    if (stopped := num_ranks - len(failures)) > 0:
        parts.append(f"{stopped} rank{'s were' if stopped > 1 else ' was'} stopped")
    if parts:
        yield (f"the others: {'; '.join(parts)}",)
