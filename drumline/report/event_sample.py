"""Reads event files within a limit: of a larger one, windows at equal distances, so that a report
never takes long."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drumline.base.untrusted import open_regular
from drumline.runs.events import parse_line

RANK_FILE = re.compile(r"rank-(\d{5,9})\.jsonl")
WINDOW_BYTES = 1 << 14
MAX_LINE_BYTES = 1 << 20
MAX_STEP = 1 << 53
"""What JavaScript, too, can count to."""
MAX_TIME = 1e11
MAX_SECONDS = 1e9


def rank_files(folder: Path) -> dict[int, Path]:
    """The event files by rank, in the order of ranks."""
    files = {}
    for path in folder.glob("rank-*.jsonl"):
        if named := RANK_FILE.fullmatch(path.name):
            files[int(named[1])] = path

    return dict(sorted(files.items()))


def sampled_events(
    path: Path,
    *,
    most_bytes: int,
    kind: str | None = None,
) -> Iterator[dict[str, Any]]:
    """The events with a usable time and step, in the order of the file; only those of a kind, if
    one is given. A file that cannot be read has none."""
    # Most lines of another kind are not parsed at all.
    needle = b"" if kind is None else f'"{kind}"'.encode()
    try:
        with open_regular(path) as file:
            for lines in _windows(file, most_bytes):
                for line in lines:
                    if needle not in line or len(line) > MAX_LINE_BYTES:
                        continue
                    event = _usable(line, kind)
                    if event is not None:
                        yield event
    except OSError:
        return


def _windows(file: Any, most_bytes: int) -> Iterator[list[bytes]]:
    """The lines of the file, or of windows of it."""
    size = file.seek(0, os.SEEK_END)
    if size <= most_bytes:
        file.seek(0)
        yield file.read(most_bytes).split(b"\n")
        return

    count = max(2, most_bytes // WINDOW_BYTES)
    for number in range(count):
        begin = number * (size - WINDOW_BYTES) // (count - 1)
        file.seek(begin)
        lines = file.read(WINDOW_BYTES).split(b"\n")
        # What is cut off at either end is no event.
        if begin > 0:
            del lines[0]
        if begin + WINDOW_BYTES < size:
            del lines[-1:]
        yield lines


def _usable(line: bytes, kind: str | None) -> dict[str, Any] | None:
    """The event in a line; None: it has another kind, or no usable time and step."""
    event = parse_line(line) if line.strip() else None
    if event is None or type(event.get("kind")) is not str or kind not in (None, event["kind"]):
        return None
    step = event.get("step")
    if unix_time(event.get("time")) is None or type(step) is not int or not 0 <= step < MAX_STEP:
        return None
    return event


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if type(value) not in (int, float):
        return None
    converted = float(value)
    return converted if math.isfinite(converted) else None


def seconds_of(value: Any) -> float | None:
    """A duration from 0 to MAX_SECONDS; None for anything else."""
    seconds = number(value)
    return seconds if seconds is not None and 0 <= seconds < MAX_SECONDS else None


def unix_time(value: Any) -> float | None:
    """A time before MAX_TIME, in Unix seconds; None for anything else."""
    moment = number(value)
    return moment if moment is not None and 0 < moment < MAX_TIME else None


def text(value: Any) -> str:
    """A text; empty for anything else."""
    return value if isinstance(value, str) else ""
