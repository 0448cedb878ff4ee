"""The results of earlier runs on the same files: a run in which nothing changed runs no rule.

A finding may follow from any of the files that are checked together, so a run is known by the
content of all of them, the linter's own code, the version of Python and the rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline_lint.findings import Edit, Finding, Place, Severity
from drumline_lint.linter import Results
from drumline_lint.reading.parse import Reading
from drumline_lint.untrusted import parse_json, read_regular

ENTRY_BYTES = 64 << 20
MOST_ENTRIES = 64
"""When there are more, the oldest are removed."""


def run_key(readings: Sequence[Reading], chosen: Iterable[str]) -> str:
    """The same for the same files under the same paths, rules, linter and Python."""
    package = Path(__file__).parent
    parts = [sys.version.encode(), *(number.encode() for number in sorted(chosen))]
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.md")]):
        parts += [str(path.relative_to(package)).encode(), path.read_bytes()]
    for reading in readings:
        problems = " ".join(problem.message for problem in reading.problems)
        parts += [os.fsencode(reading.path), reading.data, os.fsencode(problems)]
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:  # with lengths, so that no two lists of parts are the same bytes
        digest.update(b"%d\n" % len(part))
        digest.update(part)
    return digest.hexdigest()


def find_run(folder: Path, key: str) -> Results | None:
    """None if there is none, or if its file is damaged."""
    try:
        document = parse_json(read_regular(folder / f"{key}.json", most=ENTRY_BYTES))
        findings = [_finding(item) for item in document["findings"]]
        problems = [_finding(item) for item in document["problems"]]
        unparsed = [str(path) for path in document["unparsed"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Results(findings, problems, unparsed)


def keep_run(folder: Path, key: str, results: Results) -> None:
    """A folder that cannot be written to keeps nothing."""
    document = {
        "findings": [asdict(finding) for finding in results.findings],
        "problems": [asdict(problem) for problem in results.problems],
        "unparsed": results.unparsed,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = folder / f"{key}.{os.getpid()}"
        draft.write_text(json.dumps(document))
        draft.replace(folder / f"{key}.json")  # so that no reader sees half of it
        entries = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for entry in entries[:-MOST_ENTRIES]:
            entry.unlink(missing_ok=True)
    except OSError:
        return


def _finding(item: dict[str, Any]) -> Finding:
    item["severity"] = Severity(item["severity"])
    item["place"] = Place(**item["place"])
    edits = [
        {**edit, "start": tuple(edit["start"]), "end": tuple(edit["end"])} for edit in item["edits"]
    ]
    item["edits"] = tuple(Edit(**edit) for edit in edits)
    return Finding(**item)
