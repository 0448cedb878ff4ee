"""What the user asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drumline.config.schema import Config


@dataclass(frozen=True)
class Request:
    """A task, its settings, a folder, and the command that said so."""

    task: str
    config: Config
    run: Path
    fresh: bool
    command: tuple[str, ...]
