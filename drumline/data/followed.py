"""Batches on their way to a user's own loop: who follows it is told when it asks for one and when it has it.

That is all that can be known of such a loop from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

_END = object()


class Follower(Protocol):
    """Who is told; what it makes of it is no matter of data."""

    def ask(self, step: int | None) -> None:
        """The loop asks for a batch of the optimizer step after so many; None: it does not train."""

    def hand_out(self) -> None:
        """It has it."""

    def end(self) -> None:
        """There is no other."""


def followed(
    batches: Iterator[Any], follower: Follower | None, *, steps_done: Callable[[], int | None] = lambda: None
) -> Iterator[Any]:
    """The same batches."""
    return batches if follower is None else _told(batches, follower, steps_done)


def _told(batches: Iterator[Any], follower: Follower, steps_done: Callable[[], int | None]) -> Iterator[Any]:
    follower.ask(steps_done())
    while (batch := next(batches, _END)) is not _END:
        follower.hand_out()
        yield batch
        follower.ask(steps_done())
    follower.end()
