"""Longer scripts, right and wrong: each marked mistake is found on its line, and nothing else
is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from drumline_lint.findings import Finding, Severity
from drumline_lint.linter import check, read_all
from drumline_lint.reading.discovery import find_files
from drumline_lint.rules import all_rules
from drumline_lint.settings import Settings

CORPUS = Path(__file__).parent / "corpus"
PAIRS = sorted(patch.parent.name for patch in CORPUS.glob("*/wrong.patch"))
ALONE = sorted(
    path
    for folder in ("not_distributed", "frameworks")
    for path in (CORPUS / folder).iterdir()
    if path.is_file()
)
MARKER = re.compile(r"# <- ([a-z, -]+)$")
COUNTS = {
    "accumulation-without-no-sync": 2,
    "clip-before-unscale": 2,
    "collective-on-some-ranks": 14,
    "deprecated-launch": 2,
    "device-by-global-rank": 4,
    "exit-before-collective": 6,
    "launcher-in-every-task": 2,
    "load-without-map-location": 5,
    "local-rank-save": 4,
    "no-distributed-sampler": 2,
    "parts-of-data": 3,
    "set-epoch-missing": 2,
    "shuffle-beside-sampler": 2,
    "unguarded-save": 4,
    "wrapped-model-on-some-ranks": 2,
    "wrapped-state-dict": 5,
}
"""How often each mistake is in the wrong versions."""


class Spot(NamedTuple):
    """A rule at a line; notebooks count their lines by cell."""

    path: str
    cell: int | None
    line: int
    rule: str


@pytest.fixture(name="wrong", scope="module")
def apply_patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wrong versions of all pairs, in folders of their names."""
    folder = tmp_path_factory.mktemp("wrong")
    for name in PAIRS:
        shutil.copytree(
            CORPUS / name / "right", folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
        command = ["git", "apply", "--whitespace=nowarn", CORPUS / name / "wrong.patch"]
        subprocess.run(command, cwd=folder / name, check=True)
    return folder


def test_the_corpus_is_whole() -> None:
    assert len(PAIRS) == 24
    assert len(ALONE) == 11


@pytest.mark.parametrize("name", PAIRS)
def test_of_a_wrong_version_all_that_is_marked_is_found_and_nothing_else(
    name: str, wrong: Path
) -> None:
    marked = set(_markers(wrong / name))
    found = _counted(wrong / name)
    assert {"missed": sorted(marked - found), "made up": sorted(found - marked)} == {
        "missed": [],
        "made up": [],
    }


@pytest.mark.parametrize("name", PAIRS)
def test_of_a_right_version_nothing_is_found(name: str) -> None:
    folder = CORPUS / name / "right"
    assert not _markers(folder)
    assert [_spot(finding) for finding in _lint(folder) if _is_bad(finding)] == []


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.name)
def test_what_is_not_distributed_or_left_to_a_framework_has_no_findings_at_all(path: Path) -> None:
    assert not _markers(path)
    assert [_spot(finding) for finding in _lint(path)] == []


def test_every_rule_is_marked_and_found_as_often_as_counted(wrong: Path) -> None:
    for spots in (_markers, _counted):
        found = Counter(spot.rule for name in PAIRS for spot in spots(wrong / name))
        assert dict(sorted(found.items())) == COUNTS
    assert {module.RULE.name for module in all_rules().values()} >= COUNTS.keys()


# Reading


@cache
def _lint(path: Path) -> tuple[Finding, ...]:
    """All of it, notes included."""
    settings = Settings(chosen=frozenset(all_rules()), severity=Severity.NOTE)
    report = check(read_all(find_files([path]).files), all_rules(), settings)
    assert not report.problems, report.problems
    assert report.readings, "there is something to read"
    return tuple(report.findings)


def _is_bad(finding: Finding) -> bool:
    return finding.severity is not Severity.NOTE


def _counted(top: Path) -> set[Spot]:
    """Warnings and errors, and notes that are marked."""
    marked = set(_markers(top))
    return {
        _spot(finding) for finding in _lint(top) if _is_bad(finding) or _spot(finding) in marked
    }


def _spot(finding: Finding) -> Spot:
    return Spot(finding.place.path, finding.place.cell, finding.place.line, finding.name)


def _markers(top: Path) -> list[Spot]:
    files = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
    return [spot for path in files if path.suffix != ".pyc" for spot in _markers_of_file(path)]


def _markers_of_file(path: Path) -> list[Spot]:
    return [
        Spot(str(path), cell, number, rule.strip())
        for cell, text in _texts(path)
        for number, line in enumerate(text.splitlines(), start=1)
        if (marker := MARKER.search(line))
        for rule in marker[1].split(",")
    ]


def _texts(path: Path) -> list[tuple[int | None, str]]:
    """The text of the file, or that of each cell of code."""
    if path.suffix != ".ipynb":
        return [(None, path.read_text())]
    cells = enumerate(json.loads(path.read_text())["cells"], start=1)
    return [
        (number, "".join(cell["source"])) for number, cell in cells if cell["cell_type"] == "code"
    ]
