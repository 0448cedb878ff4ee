"""Asks a rank for its flight recorder. A thread of the rank answers: when none does, Python stands still in it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from drumline.untrusted import parse_json
from drumline.watch.facts import Collective

WITHIN_S = 1.0
EVERY_S = 0.01


async def ask_flight(
    folder: Path, rank: int, *, within_s: float = WITHIN_S
) -> tuple[bool | None, tuple[Collective, ...]]:
    """Whether it answers, and its latest collectives. None: nobody is there who could be asked."""
    path = _answer(folder, rank)
    number = (_read(path).get("number", 0) + 1) % 256
    if not _ask(folder / f"rank-{rank:05d}.ask", number):
        return None, ()
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        await asyncio.sleep(EVERY_S)
        record = _read(path)
        if record.get("number") == number:
            return True, _collectives(record)
    return False, ()


def left_collectives(folder: Path, rank: int) -> tuple[Collective, ...]:
    """What a rank that has ended answered last, by itself when it failed."""
    return _collectives(_read(_answer(folder, rank)))


def told_calls(folder: Path, rank: int) -> list[tuple[str, int | None, str]]:
    """What the main thread of a rank that has just answered was doing: file, line and name, the innermost first."""
    try:
        return [(str(file), line, str(name)) for file, line, name in _read(_answer(folder, rank))["calls"]]
    except (KeyError, TypeError, ValueError):
        return []


def told_workers(folder: Path, rank: int) -> list[tuple[int, int]]:
    """Number and process of each DataLoader worker that it waits for."""
    try:
        return [(int(number), int(pid)) for number, pid in _read(_answer(folder, rank))["workers"]]
    except (KeyError, TypeError, ValueError):
        return []


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.flight.json"


def _ask(path: Path, number: int) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False  # not made yet, or nobody reads it
    try:
        os.write(fd, bytes([number]))
    except BlockingIOError:
        pass  # full of questions without an answer: it waits for those already
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        record = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _collectives(record: dict[str, Any]) -> tuple[Collective, ...]:
    try:
        return tuple(
            Collective(**{**one, "sizes": tuple(map(tuple, one["sizes"]))}) for one in record["collectives"]
        )
    except (KeyError, TypeError):
        return ()
