"""docs/compare.md and its scripts: the line counts are those of the files, and the Drumline scripts do what it says.

The scripts of the other libraries are run by `make compare`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "compare"
PAGE = (ROOT / "docs" / "compare.md").read_text()
WITHOUT_CODE = '''"""A docstring."""

from common import (
    show,
)

# A comment.
show(1,
     2)
'''
WITH_CODE = '''def one():
    """A docstring."""

    text = """two
    lines"""  # and a comment
    return show(text)
'''


@pytest.fixture(name="runner")
def import_runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("run")
    for name in ("run", "common"):
        del sys.modules[name]


def test_lines_of_code_are_counted_without_imports_and_comments(runner: Any, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    for text, lines in ((WITHOUT_CODE, 0), (WITH_CODE, 4), (WITHOUT_CODE + WITH_CODE, 4)):
        file.write_text(text)
        assert runner.code_lines(file) == lines


def test_the_page_has_the_line_counts_of_the_files(runner: Any) -> None:
    shown = re.findall(r"\[(\d+)\]\(\.\./examples/compare/(\w+)\.py\)", PAGE)
    assert {name: int(lines) for lines, name in shown} == {
        f"{job}_{library}": runner.code_lines(runner.script(job, library))
        for job in runner.JOBS
        for library in runner.LIBRARIES
    }
    assert all(line in PAGE for line in runner.line_counts())


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("job", "counted", "reported", "true"),
    [
        ("f1", "samples counted", "F1 reported", "F1 of these weights"),
        ("tokens", "tokens counted", "loss reported", "loss of these weights"),
        ("ema", None, "accuracy reported", "accuracy of the average"),
    ],
)
def test_what_drumline_reports_on_two_ranks_is_true(
    runner: Any, tmp_path: Path, job: str, counted: str | None, reported: str, true: str
) -> None:
    found = runner.JOBS[job](runner.script(job, "drumline"), tmp_path / job)
    assert float(found[reported]) == pytest.approx(float(found[true]), abs=2e-5)
    if counted is not None:
        taken, _, all_of_them = found[counted].partition(" of ")
        assert taken == all_of_them
    if job == "tokens":
        assert float(found["largest difference of a weight, 1 and 2 ranks"]) < 1e-5


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("job", ["resume", "gan"])
def test_the_other_drumline_scripts_run(runner: Any, tmp_path: Path, job: str) -> None:
    """That a kill changes nothing is shown in tests/multiproc, for tasks and for loops."""
    assert runner.run(runner.script(job, "drumline"), tmp_path / job, ranks=1).weights
