from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.engine.run_folder import RunFolder, locked, set_aside
from drumline.errors import UsageError


def test_an_earlier_run_is_moved_to_a_name_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert set_aside(run) is None
    moved = []
    for content in ("first", "second", "third"):
        run.mkdir()
        (run / "file").write_text(content)
        moved.append(set_aside(run))
    assert not run.exists()
    assert [(path / "file").read_text() for path in moved if path] == ["first", "second", "third"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError, match=r"(?s)the run folder .*file/run cannot be made: Not a directory.*--run DIR"
    ):
        RunFolder(tmp_path / "file" / "run").make()


def test_a_second_job_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    code = (
        "import sys; from pathlib import Path; from drumline.engine.run_folder import RunFolder, locked\n"
        "with locked(RunFolder(Path(sys.argv[1]))): print('in')"
    )
    with locked(folder):
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert result.returncode != 0
        assert f"another job (process {os.getpid()}) is training in {tmp_path}" in result.stderr
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.stdout == "in\n"
