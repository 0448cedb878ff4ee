"""Placeholder until the shell reader is merged."""

from __future__ import annotations

from pathlib import Path


class Script:
    """A shell script."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
