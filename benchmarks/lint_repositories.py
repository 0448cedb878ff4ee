"""How often the linter is right in public repositories whose findings were judged.

    python -m benchmarks.lint_repositories benchmarks/judged/NAME.json SOURCES

NAME.json has the repositories with their commits, and a verdict about each finding: `right` (a
maintainer would call it a mistake, or a real risk of this code as it is run), `arguable` or
`wrong`. SOURCES has a folder OWNER__NAME for each; where one is missing, the git commands that make
it are printed. Findings that nobody has judged are listed, and count for nothing.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline_lint.findings import Finding, Severity
from drumline_lint.linter import all_docs, check, read_all
from drumline_lint.reading.discovery import find_files
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings

VERDICTS = ("right", "arguable", "wrong")
NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Place:
    """Where a finding is. Its message is not compared: the wording may change."""

    repository: str
    path: str
    line: int
    rule: str


@dataclass(frozen=True)
class JudgedFinding:
    place: Place
    severity: Severity
    verdict: str


def source_of(repository: str, sources: Path) -> Path:
    return sources / repository.replace("/", "__")


def read_verdicts(judged: dict[str, Any]) -> dict[Place, str]:
    return {
        Place(entry["repository"], entry["path"], entry["line"], entry["rule"]): entry["verdict"]
        for entry in judged["findings"]
    }


def findings_in(source: Path) -> list[Finding]:
    """Errors and warnings, as they are shown by default."""
    rules = all_rules()
    settings = Settings(chosen=frozenset(all_docs(rules)))
    findings = check(read_all(find_files([source]).files), rules, settings).findings
    return [finding for finding in findings if finding.severity is not Severity.NOTE]


def judge(repository: str, source: Path, verdicts: dict[Place, str]) -> list[JudgedFinding]:
    judged = []
    for finding in findings_in(source):
        path = Path(finding.place.path).relative_to(source)
        place = Place(repository, str(path), finding.place.line, finding.rule)
        verdict = verdicts.get(place, NOT_JUDGED)
        judged.append(JudgedFinding(place, finding.severity, verdict))
    return judged


def print_precision(findings: list[JudgedFinding]) -> None:
    for severity in (Severity.ERROR, Severity.WARNING):
        counts = Counter(finding.verdict for finding in findings if finding.severity is severity)
        total = sum(counts[verdict] for verdict in VERDICTS)
        share = f" ({counts['right'] / total:.0%})" if total else ""
        parts = [f"{counts[verdict]} {verdict}" for verdict in (*VERDICTS, NOT_JUDGED)]
        print(f"{severity.name.lower()}s: {', '.join(parts)}{share}")


def print_rules(findings: list[JudgedFinding]) -> None:
    counts = Counter((finding.place.rule, finding.verdict) for finding in findings)
    for rule in sorted({finding.place.rule for finding in findings}):
        parts = [
            f"{counts[rule, verdict]} {verdict}"
            for verdict in (*VERDICTS, NOT_JUDGED)
            if counts[rule, verdict]
        ]
        print(f"  {rule}: {', '.join(parts)}")


def print_missing(repository: str, commit: str, source: Path) -> None:
    print(f"missing: {repository}; to fetch it:")
    print(f"  git init {source} && cd {source}")
    print(
        f"  git fetch --depth 1 https://github.com/{repository} {commit} && git checkout FETCH_HEAD"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("judged", type=Path)
    parser.add_argument("sources", type=Path)
    options = parser.parse_args()
    judged = json.loads(options.judged.read_text(encoding="utf-8"))
    verdicts = read_verdicts(judged)
    findings: list[JudgedFinding] = []
    has_all = True
    for repository, commit in judged["repositories"].items():
        source = source_of(repository, options.sources)
        if source.is_dir():
            findings += judge(repository, source, verdicts)
        else:
            has_all = False
            print_missing(repository, commit, source)
    print_precision(findings)
    print_rules(findings)
    reported = {finding.place for finding in findings}
    not_reported = Counter(verdict for place, verdict in verdicts.items() if place not in reported)
    print(f"judged, and not reported: {dict(not_reported)}")
    for finding in findings:
        if finding.verdict != "right":
            place = finding.place
            print(f"  {finding.verdict} {place.rule} {place.repository} {place.path}:{place.line}")
    return 0 if has_all else 1


if __name__ == "__main__":
    raise SystemExit(main())
