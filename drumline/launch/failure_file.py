"""What a failed rank leaves for its launcher as data: which rank failed first, by what, and can a restart help.

The launcher names a file for each rank of each start. What a rank prints is for people; this is for the launcher.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from drumline.untrusted import parse_json

FAILURE_FILE = "DRUMLINE_FAILURE_FILE"
LOGS_SHOWN = "DRUMLINE_LOGS_SHOWN"
"""Set where the launcher also shows what ranks other than 0 write to their logs in the run folder."""


@dataclass(frozen=True)
class FailureRecord:
    """The first failure of the job, as one of its ranks knows it."""

    rank: int | None
    """Which rank failed first; another one than the writer's where that only followed."""
    step: int | None
    error: str
    is_own: bool
    """Raised by that rank for its own reasons, and not because another process ended."""
    can_restart: bool
    """False: a restart would fail the same way."""

    def repeats(self, before: FailureRecord | None) -> bool:
        """Whether the start before this one failed the same way, at the same step."""
        return self.is_own and self == before


def write_failure(environment: Mapping[str, str], record: FailureRecord) -> None:
    """Where no launcher of ours is, nothing."""
    if path := environment.get(FAILURE_FILE):
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(asdict(record)), encoding="utf-8")


def read_failure(path: Path) -> FailureRecord | None:
    """None: the rank could not write it (it was killed), or is a script."""
    try:
        return FailureRecord(**parse_json(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
