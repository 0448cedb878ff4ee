"""The results of earlier runs on the same files: a run in which nothing changed runs no rule.

A finding may follow from any of the files that are checked together, so a run is known by the
content of all of them, the linter's own code, the version of Python and the rules.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
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
    digest = hashlib.blake2b(digest_size=20)
    for part in _parts(readings, chosen):
        # with lengths, so that no two lists of parts are the same bytes
        digest.update(b"%d\n" % len(part))
        digest.update(part)
    return digest.hexdigest()


def _parts(readings: Sequence[Reading], chosen: Iterable[str]) -> Iterator[bytes]:
    """All that the findings of a run may follow from."""
    yield sys.version.encode()
    for number in sorted(chosen):
        yield number.encode()

    package = Path(__file__).parent
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.md")]):
        yield str(path.relative_to(package)).encode()
        yield path.read_bytes()

    for reading in readings:
        yield os.fsencode(reading.path)
        yield reading.data
        yield os.fsencode(" ".join(problem.message for problem in reading.problems))


def find_run(folder: Path, key: str) -> Results | None:
    """The results of an earlier run; None if there is none, or if its file is damaged."""
    try:
        document = parse_json(read_regular(folder / f"{key}.json", most=ENTRY_BYTES))
        findings = [_finding(item) for item in document["findings"]]
        problems = [_finding(item) for item in document["problems"]]
        unparsed = [str(path) for path in document["unparsed"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None

    return Results(findings, problems, unparsed)


def keep_run(folder: Path, key: str, results: Results) -> None:
    """Write the results for later runs; a folder that cannot be written to keeps nothing."""
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
    """A finding, as `asdict` made a table of it."""
    item["severity"] = Severity(item["severity"])
    item["place"] = Place(**item["place"])
    item["edits"] = tuple(map(_edit, item["edits"]))
    return Finding(**item)


def _edit(item: dict[str, Any]) -> Edit:
    """An edit, as `asdict` and JSON made a table of it, which have lists for tuples.

    For example:

        {"start": [3, 4], "end": [3, 9], "text": "good"}
    """
    item["start"] = tuple(item["start"])
    item["end"] = tuple(item["end"])
    return Edit(**item)
