"""The folder that a run leaves behind, and how it is opened: new, again, or afresh.

config.toml  environment.json  events/rank-NNNNN.jsonl  logs/rank-NNNNN.log  checkpoints/step-NNNNNNNN/
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from drumline.errors import UsageError


@dataclass(frozen=True)
class RunFolder:
    """Names of what is where in a run folder."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment_file(self) -> Path:
        return self.path / "environment.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def event_file(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank:05d}.jsonl"

    def log_file(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:05d}.log"

    def make(self) -> None:
        for folder in (self.path / "events", self.logs, self.checkpoints):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"the run folder {self.path} cannot be made: {error.strerror}",
                    next_step="choose another with --run DIR",
                ) from error


def set_aside(path: Path) -> Path | None:
    """Move an earlier run out of the way, to a name that nothing has; a new start deletes nothing."""
    if not path.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.before-{stamp}")
    number = 1
    while aside.exists():
        aside = path.with_name(f"{path.name}.before-{stamp}-{number}")
        number += 1
    path.rename(aside)
    return aside


@contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Keep a second job out of this folder. The lock goes with the process, however that ends."""
    with (folder.path / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UsageError(
                f"another job ({file.read().strip() or 'unknown'}) is training in {folder.path}",
                next_step="wait for it, or give this one a folder of its own with --run DIR",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
