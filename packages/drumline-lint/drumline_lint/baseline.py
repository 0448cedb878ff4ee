"""Findings that are left for later: `--write-baseline` records them, `--baseline` leaves them out.

An entry is a rule, a path, the text of the line and how often it occurs. So it still fits when
lines above it are added or removed, and not when the line itself is changed.

    {
     "version": 1,
     "findings": [
      {"path": "train.py", "rule": "DL005", "line": "for epoch in range(10):", "count": 1}
     ]
    }
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline_lint.errors import UsageError
from drumline_lint.findings import Finding
from drumline_lint.linter import Report
from drumline_lint.untrusted import parse_json, read_regular

VERSION = 1
BASELINE_BYTES = 64 << 20
Entry = tuple[str, str, str]
"""What a finding is recognized by: its path, relative to the folder of the baseline, its rule, and the
text of the line with single spaces."""


def write_baseline(file: Path, report: Report) -> None:
    """Record the findings of a report. Raises UsageError if the file cannot be written."""
    counts = Counter(_entry(file, report, finding) for finding in report.findings)
    findings = [
        {"path": path, "rule": rule, "line": line, "count": count}
        for (path, rule, line), count in sorted(counts.items())
    ]
    document = {"version": VERSION, "findings": findings}

    try:
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--write-baseline {file} cannot be written: {error.strerror}") from None


def read_baseline(file: Path) -> Counter[Entry]:
    """How often each entry is in the file. Raises UsageError if it cannot be read."""
    try:
        return _entries(parse_json(read_regular(file, most=BASELINE_BYTES)))
    except FileNotFoundError:
        raise UsageError(
            f"--baseline {file}: there is no such file",
            next_step=f"record today's findings with --write-baseline {file}",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--baseline {file} cannot be read: {error}",
            next_step=f"write it again with --write-baseline {file}",
        ) from None


def without_known(report: Report, file: Path, baseline: Counter[Entry]) -> Report:
    """The report without the findings of the baseline; of equal ones, the first are left out."""
    left = baseline.copy()
    findings = []

    for finding in report.findings:
        entry = _entry(file, report, finding)
        if left[entry] > 0:
            left[entry] -= 1
        else:
            findings.append(finding)

    num_known = len(report.findings) - len(findings)
    return replace(report, findings=findings, num_known=num_known)


def _entry(file: Path, report: Report, finding: Finding) -> Entry:
    """What a finding is recognized by: `("train.py", "DL005", "for epoch in range(10):")`."""
    path = os.path.relpath(finding.place.path, file.parent).replace(os.sep, "/")
    line = " ".join((report.line(finding.place) or "").split())
    return _as_json_has_it(path), finding.rule, _as_json_has_it(line)


def _as_json_has_it(text: str) -> str:
    """A byte that is not text is a lone surrogate, which UTF-8 cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def _entries(document: Any) -> Counter[Entry]:
    """Raises ValueError if it is not a baseline."""
    counts: Counter[Entry] = Counter()
    try:
        if not isinstance(document, dict) or document.get("version") != VERSION:
            raise ValueError(f"it is no baseline of version {VERSION}")

        for item in document["findings"]:
            counts[str(item["path"]), str(item["rule"]), str(item["line"])] += int(item["count"])
    except (TypeError, KeyError):
        raise ValueError("its findings are not a list of path, rule, line and count") from None
    return counts
