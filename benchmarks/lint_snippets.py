"""How many written mistakes the linter shows by default, and how many look-alikes it reports.

    python -m benchmarks.lint_snippets FOLDER

FOLDER has `mistakes` and `look-alikes`. A case is NAME.json beside NAME.EXT, or beside a folder
NAME. For a mistake, the JSON has `file`, `lines` (first and last) and perhaps `also`: further
places of the same form. A mistake is shown if an error or a warning begins on one of these lines;
a look-alike is reported if there is any error or warning in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline_lint.findings import Finding, Severity
from drumline_lint.linter import all_docs, check, read_all
from drumline_lint.reading.discovery import find_files
from drumline_lint.reading.notebook import line_in_file
from drumline_lint.reading.parse import Reading
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings


@dataclass(frozen=True)
class Case:
    """A mistake or a look-alike, and what the linter says of it."""

    name: str
    description: dict[str, Any]
    findings: list[Finding]

    @property
    def shown(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity is not Severity.NOTE]

    def on_allowed_lines(self, findings: list[Finding]) -> list[Finding]:
        places = [self.description, *self.description.get("also", [])]
        return [finding for finding in findings if any(_is_at(finding, place) for place in places)]


def _is_at(finding: Finding, place: dict[str, Any]) -> bool:
    first, last = place.get("lines", (1, 1_000_000))
    is_in_file = finding.place.path.endswith(f"/{place['file']}")
    return is_in_file and first <= finding.place.line <= last


def read_case(path: Path) -> Case:
    description = json.loads(path.read_text())
    folder = path.with_suffix("")
    target = folder if folder.is_dir() else path.parent / description["file"]
    rules = all_rules()
    settings = Settings(chosen=frozenset(all_docs(rules)))
    report = check(read_all(find_files([target]).files), rules, settings)
    findings = [_in_file(finding, report.readings) for finding in report.findings]
    findings += [_in_file(finding, report.readings) for finding in report.hidden]
    return Case(path.stem, description, findings)


def _in_file(finding: Finding, readings: Mapping[str, Reading]) -> Finding:
    """With the line of the file, also where it was found in a notebook's cell."""
    place = finding.place
    line = line_in_file(readings[place.path].data, place.cell, place.line)
    return replace(finding, place=replace(place, line=line))


def read_cases(folder: Path) -> list[Case]:
    return [read_case(path) for path in sorted(folder.glob("*.json"))]


def _print_share(what: str, count: int, total: int) -> None:
    print(f"{what}: {count} of {total} ({count / max(total, 1):.0%})")


def print_mistakes(cases: list[Case]) -> None:
    shown = [case for case in cases if case.on_allowed_lines(case.shown)]
    missed = [case for case in cases if case not in shown]
    noted = [case for case in missed if case.on_allowed_lines(case.findings)]
    _print_share("mistakes shown", len(shown), len(cases))
    _print_share("mistakes only in notes", len(noted), len(cases))
    for case in missed:
        kind = "note" if case in noted else "missed"
        print(f"  {kind:6} {case.name}: {case.description['mistake']}")
    for case in cases:
        _print_elsewhere(case)


def _print_elsewhere(case: Case) -> None:
    right = case.on_allowed_lines(case.shown)
    for finding in case.shown:
        if finding not in right:
            print(f"  elsewhere {finding.rule} {finding.place}: {finding.message}")


def print_look_alikes(cases: list[Case]) -> None:
    reported = [case for case in cases if case.shown]
    _print_share("look-alikes reported", len(reported), len(cases))
    for case in reported:
        for finding in case.shown:
            print(f"  {finding.rule} {finding.place}: {finding.message}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    print_mistakes(read_cases(folder / "mistakes"))
    print_look_alikes(read_cases(folder / "look-alikes"))


if __name__ == "__main__":
    main()
