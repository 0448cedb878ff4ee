"""What a kind of store has to offer, and the error that its failures become."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from drumline.errors import DrumlineError

PIECE_BYTES = 8 << 20
"""How much of an object is read at a time."""
Kind = Literal["missing", "denied", "credentials", "unreachable", "busy", "corrupt", "disk", "other"]


class StoreError(DrumlineError):
    """A store refused or failed; `kind` is why."""

    def __init__(self, what: str, *, next_step: str, kind: Kind) -> None:
        super().__init__(what, next_step=next_step)
        self.kind = kind

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later, without anything done about it."""
        return self.kind in ("unreachable", "busy")


def corrupt(where: str, reason: str) -> StoreError:
    what = f"{where} is corrupt: {reason}"
    return StoreError(what, next_step="upload it again, or use an earlier copy", kind="corrupt")


class Backend(Protocol):
    """One kind of store. Its methods raise whatever its library raises, and `explain` puts that into words."""

    def entries(self, under: str) -> Iterator[tuple[str, int, str]]:
        """The objects whose names begin with `under/`, or all: name, size, and a tag that changes with the content."""

    def put(self, name: str, source: Path | bytes) -> None:
        """Upload a whole object."""

    def has_checked(self, name: str, size: int) -> bool:
        """Whether the object has this size, and the store compared a checksum when it received it."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of an object."""

    def delete(self, names: list[str]) -> None:
        """Delete objects; one that is missing is no error."""

    def delete_unfinished(self) -> None:
        """Delete parts of objects whose upload was killed."""

    def explain(self, error: Exception, where: str) -> StoreError:
        """An exception of these methods in words, without secrets."""
