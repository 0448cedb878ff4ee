"""We heed our own advice: the package, the examples and the benchmarks are clean."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumline.lint.finding import Severity
from drumline.lint.reading.files import find_files
from drumline.lint.rules import all_rules
from drumline.lint.run import check, read_all
from drumline.lint.settings import Settings

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("folder", ["drumline", "examples", "benchmarks"])
def test_our_own_code_is_clean(folder: str) -> None:
    files = find_files([ROOT / folder]).files
    assert len(files) > 3
    rules = all_rules()
    report = check(read_all(files), rules, Settings(chosen=frozenset(rules)))
    assert not report.problems
    bad = [finding for finding in report.findings if finding.severity is not Severity.NOTE]
    assert [f"{finding.place} {finding.rule}" for finding in bad] == []
