"""The script that counts how often the linter is right in judged repositories."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import lint_repositories

LOADER = """import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.barrier()
"""


def run(judged: dict[str, object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    (folder / "judged.json").write_text(json.dumps(judged))
    monkeypatch.setattr(
        sys, "argv", ["lint_repositories", str(folder / "judged.json"), str(folder)]
    )
    return lint_repositories.main()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for name in ("one.py", "two.py"):
        path = tmp_path / "someone__training" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(LOADER)
    return tmp_path


def finding(path: str, verdict: str, line: int = 5) -> dict[str, object]:
    return {
        "repository": "someone/training",
        "path": path,
        "line": line,
        "rule": "DL017",
        "verdict": verdict,
    }


def test_findings_are_counted_by_their_verdicts(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = {
        "repositories": {"someone/training": "c0ffee"},
        "findings": [finding("one.py", "right"), finding("gone.py", "wrong")],
    }
    assert run(judged, sources, monkeypatch) == 0
    output = capsys.readouterr().out
    assert "errors: 1 right, 0 arguable, 0 wrong, 1 not judged (100%)" in output
    assert "judged, and not reported: {'wrong': 1}" in output
    assert "not judged DL017 someone/training two.py:5" in output


def test_a_missing_repository_is_named_with_the_commands_that_fetch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = {"repositories": {"someone/training": "c0ffee"}, "findings": []}
    assert run(judged, tmp_path, monkeypatch) == 1
    assert "https://github.com/someone/training c0ffee" in capsys.readouterr().out
