"""`--since`: findings on lines that changed since a revision, by the real git."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from drumline_lint import command
from drumline_lint.command import main
from made_up_rules import RULES


def git(*arguments: str) -> None:
    names = ("-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *names, *arguments], check=True, capture_output=True)


@pytest.fixture(name="here")
def work_in_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one commit, in which every file has a finding."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "all_rules", lambda: RULES)
    git("init", "-b", "main")
    (tmp_path / "a.py").write_text("bad()\nx = 1\ny = 2\n")
    (tmp_path / "b.py").write_text("bad()")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def places(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main([".", "--format", "json", *arguments]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    return [f"{finding['path']}:{finding['line']}" for finding in report["findings"]]


def test_only_changed_lines_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert places(capsys, "--since", "HEAD") == []
    (here / "a.py").write_text("bad()\nx = 1\nbad(3)\n")
    assert places(capsys, "--since", "HEAD") == ["a.py:3"]
    git("commit", "-am", "second")
    assert places(capsys, "--since", "HEAD") == []
    assert places(capsys, "--since", "HEAD~1") == ["a.py:3"]
    assert main([".", "--since", "HEAD"]) == 0
    assert capsys.readouterr().out == "nothing found in 2 files; 3 on unchanged lines\n"


def test_a_branch_is_compared_with_where_it_began(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    git("checkout", "-b", "topic")
    (here / "a.py").write_text("bad()\nx = 1\ny = 2\nbad(4)\n")
    git("commit", "-am", "topic")
    git("checkout", "main")
    (here / "b.py").write_text("good()")
    git("commit", "-am", "main goes on")
    git("checkout", "topic")
    assert places(capsys, "--since", "main") == ["a.py:4"], "b.py did not change on this branch"


def test_new_files_and_names_with_special_characters(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("new.py", "sp ace.py", "\N{LATIN SMALL LETTER E WITH ACUTE}.py"):
        (here / name).write_text("x = 1\nbad()\n")
    (here / ".gitignore").write_text("ignored.py\n")
    (here / "ignored.py").write_text("bad()\n")
    new = ["new.py:2", "sp ace.py:2", "\N{LATIN SMALL LETTER E WITH ACUTE}.py:2"]
    assert sorted(places(capsys, "--since", "HEAD")) == sorted(new)
    git("add", ".")
    assert sorted(places(capsys, "--since", "HEAD")) == sorted(new), "staged ones, too"


def test_code_that_looks_like_a_diff(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "bad()\nx = 1\ny = '''\n++ b/b.py\n@@ -1 +1 @@\n'''"
    (here / "a.py").write_text(text)
    (here / "b.py").write_text("bad()\nbad(2)")
    assert places(capsys, "--since", "HEAD") == ["b.py:1", "b.py:2"]


def test_the_line_of_a_cell(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = {"cell_type": "code", "source": ["x = 1\n", "bad()\n", "poor()"]}
    notebook = here / "n.ipynb"
    notebook.write_text(json.dumps({"cells": [cell]}, indent=1))
    git("add", ".")
    git("commit", "-m", "notebook")
    notebook.write_text(notebook.read_text().replace("poor()", "poor(1)"))
    assert places(capsys, "--since", "HEAD") == ["n.ipynb:3"]


def test_wrong_revisions_and_places(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for revision in ("no-such-branch", "--output=x"):
        assert main([".", f"--since={revision}"]) == 2
        assert capsys.readouterr().err == (
            f"drumline-lint: error: --since {revision}: {here} has no such revision\n"
            "  try: give a branch, a tag or a commit; in CI, fetch it first\n"
        )
    assert main([".", "--since", "HEAD", "--fix"]) == 2
    assert "not --fix or --diff" in capsys.readouterr().err
    outside = tmp_path_factory.mktemp("outside")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(outside.parent))
    monkeypatch.chdir(outside)
    assert main([".", "--since", "HEAD"]) == 2
    assert "error: --since: . is not in a git repository\n" in capsys.readouterr().err
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", "")
    assert main([".", "--since", "HEAD"]) == 2
    assert "error: --since needs git, which was not found\n" in capsys.readouterr().err
