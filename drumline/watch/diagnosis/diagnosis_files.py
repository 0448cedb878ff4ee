"""Diagnoses in the run folder: `diagnoses/0001-stopped.json` for programs, the same name with `.txt` for people.

Several sidecars may write at the same time: after a cut, each side has a chief of its own. Who takes a number first has
it. A file appears whole or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.untrusted import make_own_folder, parse_json, read_regular, replace_text
from drumline.watch.cluster_state import ClusterState
from drumline.watch.diagnosis.diagnosis import Diagnosis
from drumline.watch.diagnosis.page import page

_NAME = re.compile(r"(\d{4,})-[a-z_]+\.(json|txt)")


def write_diagnosis(
    folder: Path,
    *,
    alarm: str,
    diagnosis: Diagnosis,
    picture: ClusterState,
    action: str,
    launch: str,
    at: float,
) -> Path:
    """The `.json` file. `at`: seconds since the epoch. Raises OSError when the storage does not take it."""
    make_own_folder(folder)
    with _own_number(folder) as number:
        record = {
            "number": number,
            "alarm": str(alarm),
            "sentence": diagnosis.sentence(alarm),
            "action": action,
            "launch": launch,
            "time": at,
            "diagnosis": diagnosis.to_json(),
            "picture": asdict(picture),
        }
        path = folder / f"{number:04d}-{diagnosis.cause}.json"
        # The one that is read by programs comes last: who finds it finds both.
        replace_text(path.with_suffix(".txt"), page(alarm, diagnosis, picture, action=action, at=at))
        replace_text(path, json.dumps(record, indent=1) + "\n")
    return path


def read_diagnoses(folder: Path) -> list[dict[str, Any]]:
    """All records, in order; files that are none are left out. Their `diagnosis` goes through Diagnosis.from_json."""
    paths = [path for path in folder.glob("*.json") if _number(path) is not None] if folder.is_dir() else []
    records = (_read(path) for path in sorted(paths, key=lambda path: (_number(path), path.name)))
    return [record for record in records if record is not None]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        record = parse_json(read_regular(path))
        Diagnosis.from_json(record["diagnosis"])
        is_whole = all(isinstance(record[name], str) for name in ("alarm", "sentence", "launch", "action"))
        is_whole = is_whole and _is_number(record["time"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if is_whole else None


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


@contextmanager
def _own_number(folder: Path) -> Iterator[int]:
    """The next number, held by a file beside until the diagnosis's own is there."""
    number = max(_numbers(folder), default=0)
    while True:
        number += 1
        taken = folder / f".{number:04d}.taken"
        try:
            taken.touch(exist_ok=False)
        except FileExistsError:
            continue
        try:
            # Another may have had it, and finished, since we looked.
            if number not in _numbers(folder):
                yield number
                return
        finally:
            taken.unlink(missing_ok=True)


def _numbers(folder: Path) -> set[int]:
    return {number for path in folder.iterdir() if (number := _number(path)) is not None}


def _number(path: Path) -> int | None:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None
