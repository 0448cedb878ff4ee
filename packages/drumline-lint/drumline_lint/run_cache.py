"""The results of earlier runs on the same files: a run in which nothing changed runs no rule.

A finding may follow from any of the files that are checked together, so a run is known by the
content of all of them, the linter's own code, the version of Python and the rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drumline_lint.findings import Edit, Finding, Place, Severity
from drumline_lint.linter import Results
from drumline_lint.reading.parse import Reading
from drumline_lint.untrusted import parse_json, read_regular

ENTRY_BYTES = 64 << 20
MOST_ENTRIES = 64
"""When there are more, the oldest are removed."""


@dataclass(frozen=True)
class KnownRun:
    """What an earlier run found."""

    results: Results
    unreadable: frozenset[str]
    """The files that it could not read or parse."""


def run_key(loaded: Sequence[Reading], chosen: Iterable[str]) -> str:
    """The same for the same files under the same paths, rules, linter and Python."""
    digest = hashlib.blake2b(digest_size=20)
    package = Path(__file__).parent
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.md")]):
        _add(digest, str(path.relative_to(package)).encode(), path.read_bytes())
    _add(digest, sys.version.encode(), *(number.encode() for number in sorted(chosen)))
    for reading in loaded:
        _add(digest, b"file", os.fsencode(reading.path), reading.data)
        _add(digest, *(os.fsencode(problem.message) for problem in reading.problems))
    return digest.hexdigest()


def _add(digest: Any, *parts: bytes) -> None:
    """With lengths, so that no two lists of parts are the same bytes."""
    digest.update(b"%d\n" % len(parts))
    for part in parts:
        digest.update(b"%d\n" % len(part))
        digest.update(part)


def find_run(folder: Path, key: str) -> KnownRun | None:
    """None if there is none, or if its file is damaged."""
    try:
        document = parse_json(read_regular(folder / f"{key}.json", most=ENTRY_BYTES))
        findings = [_finding(item) for item in document["findings"]]
        problems = [_finding(item) for item in document["problems"]]
        unreadable = frozenset(map(str, document["unreadable"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return KnownRun(Results(findings, problems), unreadable)


def keep_run(folder: Path, key: str, results: Results, readings: Sequence[Reading]) -> None:
    """A folder that cannot be written to keeps nothing."""
    document = {
        "findings": [asdict(finding) for finding in results.findings],
        "problems": [asdict(problem) for problem in results.problems],
        "unreadable": [str(reading.path) for reading in readings if reading.problems],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(document))
        Path(name).replace(folder / f"{key}.json")  # so that no reader sees half of it
        entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for entry in entries[:-MOST_ENTRIES]:
            entry.unlink(missing_ok=True)
    except OSError:
        return


def _finding(item: dict[str, Any]) -> Finding:
    """Raises ValueError, KeyError or TypeError if it is none."""
    place = Place(**item["place"])
    texts = [item[name] for name in ("rule", "name", "message", "fix")]
    numbers = [place.line, place.column, place.end_line, place.end_column]
    if not all(isinstance(text, str) for text in [*texts, place.path]):
        raise TypeError("a text of a finding is none")
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("a line or column is no number")
    edits = [_edit(edit) for edit in item["edits"]]
    return Finding(
        **{**item, "severity": Severity(item["severity"]), "place": place, "edits": tuple(edits)}
    )


def _edit(item: dict[str, Any]) -> Edit:
    line, column = map(int, item["start"])
    end_line, end_column = map(int, item["end"])
    return Edit(start=(line, column), end=(end_line, end_column), text=str(item["text"]))
