"""What reaches the screen: rank 0's output and the first failure; the other ranks write to log files of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO

from drumline.untrusted import APPEND, descriptor_of

_screen: TextIO | None = None


def divert_output(path: Path) -> None:
    """Send everything this process prints, C++ libraries included, to a file; the screen is kept for a failure."""
    global _screen
    sys.stdout.flush()
    sys.stderr.flush()
    _screen = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="backslashreplace")
    target = descriptor_of(path, APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def is_diverted() -> bool:
    """Whether what this process prints goes to its log."""
    return _screen is not None


def screen() -> TextIO:
    """Where the user looks, whatever became of stderr."""
    return _screen or sys.stderr
