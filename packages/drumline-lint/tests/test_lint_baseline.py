"""`--write-baseline` and `--baseline`: known findings stay away, also when lines move; new ones do
not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline_lint import command
from drumline_lint.command import main
from made_up_rules import RULES


@pytest.fixture(name="here")
def work_with_a_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a folder with two files and a baseline of their findings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "all_rules", lambda: RULES)
    (tmp_path / "a.py").write_text("bad()\nx = 1\nbad()\n")
    (tmp_path / "b.py").write_text("poor()\n")
    assert main([".", "--write-baseline", "known.json"]) == 0
    return tmp_path


def test_known_findings_are_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([".", "--write-baseline", "known.json"]) == 0
    assert capsys.readouterr().err == "drumline-lint: known.json: 3 findings recorded\n"
    assert main([".", "--baseline", "known.json"]) == 0
    assert capsys.readouterr().out == "nothing found in 2 files; 3 in the baseline\n"
    assert main([".", "--baseline", "known.json", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["in_baseline"] == 3


def test_entries_survive_moved_lines_and_other_folders(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "a.py").write_text("import os\n\n\nif os:\n    bad()\nbad()\n")
    assert main([".", "--baseline", "known.json"]) == 0
    (here / "inner").mkdir()
    monkeypatch.chdir(here / "inner")
    assert main(["..", "--baseline", "../known.json"]) == 0


def test_what_is_new_is_shown(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.py").write_text("bad()\nbad()\nbad()\nbad(2)\n")
    assert main([".", "--baseline", "known.json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    places = [line.split(": ")[0] for line in lines if line.startswith("a.py")]
    assert places == ["a.py:3:1", "a.py:4:1"], "the third of equal ones, and a changed line"


def test_a_baseline_that_cannot_be_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([".", "--baseline", "none.json"]) == 2
    assert capsys.readouterr().err == (
        "drumline-lint: error: --baseline none.json: there is no such file\n"
        "  try: record today's findings with --write-baseline none.json\n"
    )
    entry = {"path": "a.py", "rule": "DL101", "line": "bad()", "count": 1}
    for text, reason in (
        ("[]", "it is no baseline of version 1"),
        ('{"version": 2, "findings": []}', "it is no baseline of version 1"),
        (
            json.dumps({"version": 1, "findings": [{**entry, "count": None}]}),
            "its findings are not a list of path, rule, line and count",
        ),
    ):
        (here / "known.json").write_text(text)
        assert main([".", "--baseline", "known.json"]) == 2
        error = capsys.readouterr().err
        assert f"error: --baseline known.json cannot be read: {reason}\n" in error


def test_a_baseline_is_of_all_findings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([".", "--baseline", "known.json", "--write-baseline", "known.json"]) == 2
    error = capsys.readouterr().err
    assert "--write-baseline records all findings: leave out --since, --baseline" in error


def test_unreadable_files_are_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "c.py").write_text("(")
    capsys.readouterr()
    assert main([".", "--write-baseline", "known.json"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("c.py:1:1: error DL000 unreadable")
    assert "3 findings recorded" in printed.err
