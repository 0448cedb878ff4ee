"""What the kinds of stores share: the error that their failures become."""

from __future__ import annotations

from typing import Literal

from drumline.base.errors import DrumlineError

PIECE_BYTES = 8 << 20
"""How much of an object is read at a time."""
Kind = Literal[
    "missing", "denied", "credentials", "unreachable", "busy", "corrupt", "disk", "other"
]


class StoreError(DrumlineError):
    """A store refused or failed; `kind` is why."""

    def __init__(self, what: str, *, next_step: str, kind: Kind) -> None:
        super().__init__(what, next_step=next_step)
        self.kind = kind

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later, without anything done about it."""
        return self.kind in ("unreachable", "busy")

    @property
    def is_bad_copy(self) -> bool:
        """Whether this object is missing or corrupt, and another one may be used in its place."""
        return self.is_missing or self.kind == "corrupt"

    @property
    def is_missing(self) -> bool:
        """Whether there is no such object."""
        return self.kind == "missing"

    @property
    def is_of_disk(self) -> bool:
        """Whether the disk here refused; the OSError is its cause."""
        return self.kind == "disk"


def corrupt(where: str, reason: str) -> StoreError:
    what = f"{where} is corrupt: {reason}"
    return StoreError(what, next_step="upload it again, or use an earlier copy", kind="corrupt")
