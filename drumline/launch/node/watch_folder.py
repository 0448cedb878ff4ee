"""The watch folder of a node: what its agent, its ranks and the sidecar beside them leave for each other.

A folder for each start of the ranks, in memory where that can be written to: the run folder may hang, this does not.
The agent writes how ranks ended, and reads what the sidecar made of it. The guard takes all away when the job is over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.launch.node.memory_folder import hold, make_memory_folder
from drumline.untrusted import parse_json

DIAGNOSIS, SIDECAR = "diagnosis.json", "sidecar.pid"
# How long the sidecar may take to say why a rank has ended; it gathers what it can see first.
DIAGNOSIS_S = 4.0
POLL_S = 0.05


@dataclass(frozen=True)
class Ruling:
    """What the sidecars said of the run, as far as a launcher needs it."""

    alarm: str
    """`hang` or `failure`."""
    action: str
    """`restart`, `stop` or `report`."""
    sentence: str
    was_told: bool = False
    """Whether the user has read it on this screen already."""

    @property
    def is_hang(self) -> bool:
        return self.alarm == "hang"

    @property
    def is_final(self) -> bool:
        return self.action == "stop"

    def tells_more(self, rank_code: int, *, is_task: bool) -> bool:
        """Whether it explains the end better than the rank that failed first: not where that one told its error
        itself."""
        return self.is_hang or rank_code < 0 or not is_task


class WatchFolder:
    """All starts of one job on this node."""

    def __init__(self, job: str) -> None:
        self.root: Path | None = None
        """None where no folder could be made: then the ranks have to help themselves."""
        self._hold: int | None = None
        with contextlib.suppress(OSError):
            self.root = make_memory_folder(job[:8])
            self._hold = hold(self.root)
        self.current: Path | None = None
        self._written: set[int] = set()

    def close(self) -> None:
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    def begin(self, start: int) -> Path | None:
        """A fresh folder for the ranks that are about to start. That of the start before stays: the last words of its
        sidecar may be on their way."""
        self._written = set()
        self.current = None
        if self.root is None:
            return None
        shutil.rmtree(self.root / f"start-{start - 2}", ignore_errors=True)
        folder = self.root / f"start-{start}"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
            self.current = folder
        return self.current

    def note_exit(self, rank: int, code: int) -> None:
        """How a rank ended: its exit code, or minus the signal. To be called as often as one likes."""
        if self.current is None or rank in self._written:
            return
        self._written.add(rank)
        path = self.current / f"exit-{rank:05d}"
        with contextlib.suppress(OSError):
            path.with_suffix(".partial").write_text(f"{code}\n", encoding="utf-8")
            path.with_suffix(".partial").replace(path)

    def wait_for_ruling(self, deadline: float) -> Ruling | None:
        """What the sidecar says; it is waited for as long as it lives, and not beyond the deadline (monotonic)."""
        while True:
            if (ruling := self.ruling()) is not None:
                return ruling
            if time.monotonic() >= deadline or not self.has_sidecar():
                return self.ruling()  # it may have written it as its last act
            time.sleep(POLL_S)

    def ruling(self) -> Ruling | None:
        """What it has said so far."""
        if self.current is None:
            return None
        try:
            return ruling_from(parse_json((self.current / DIAGNOSIS).read_bytes()))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def has_sidecar(self) -> bool:
        """Whether one lives beside the ranks."""
        if self.current is None:
            return False
        try:
            os.kill(int((self.current / SIDECAR).read_text(encoding="utf-8")), 0)
        except PermissionError:
            return True
        except (OSError, ValueError):
            return False
        return True


def ruling_from(record: Mapping[str, Any]) -> Ruling:
    """From a diagnosis file. A stall is no ruling, nor is a hang that was only reported: neither has ended a rank."""
    alarm, action = record["alarm"], record["action"]
    if alarm not in ("hang", "failure") or (alarm, action) == ("hang", "report"):
        raise ValueError(f"{alarm}, {action}")
    diagnosis = record["diagnosis"]
    sentence = (
        record.get("sentence") or f"{record['alarm']}: {diagnosis['what']}. Next: {diagnosis['next_step']}"
    )
    return Ruling(record["alarm"], record["action"], str(sentence), bool(record.get("was_told")))
