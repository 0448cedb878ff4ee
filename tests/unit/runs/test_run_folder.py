from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.base.errors import TrainingError, UsageError
from drumline.runs.run_folder import RunFolder, job_at_work, locked, set_aside, write_whole


def test_an_earlier_run_is_moved_to_a_name_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert set_aside(RunFolder(run)) is None
    moved = []
    for content in ("first", "second", "third"):
        run.mkdir()
        (run / "file").write_text(content)
        moved.append(set_aside(RunFolder(run)))
    assert not run.exists()
    assert [(path / "file").read_text() for path in moved if path] == ["first", "second", "third"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UsageError,
        match=r"(?s)the run folder .*file/run cannot be made: Not a directory.*--run DIR",
    ):
        RunFolder(tmp_path / "file" / "run").make()


def test_a_second_job_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    code = (
        "import sys; from pathlib import Path; from drumline.runs.run_folder import RunFolder, locked\n"
        "with locked(RunFolder(Path(sys.argv[1]))): print('in')"
    )
    with locked(folder):
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert result.returncode != 0
        assert (
            f"another job (process {os.getpid()} on {socket.gethostname()}) is training in {tmp_path}"
            in result.stderr
        )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert result.stdout == "in\n"


def test_a_folder_that_cannot_be_written_to_is_reported(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    message = r"(?s)the run folder .* cannot be used: Is a directory \(\.lock\).*try: choose a folder of your own"
    with pytest.raises(UsageError, match=message), locked(RunFolder(tmp_path)):
        pass


def test_who_asks_for_a_job_at_work_is_in_no_ones_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job_at_work(RunFolder(tmp_path)) is None
    (tmp_path / ".lock").write_text("process 1 on a")

    def refuse(*_: object) -> None:
        raise AssertionError("a lock was taken")

    monkeypatch.setattr("fcntl.lockf", refuse)
    assert job_at_work(RunFolder(tmp_path)) is None


def test_a_new_start_does_not_take_the_folder_from_a_job_at_work(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    code = (
        "import sys; from pathlib import Path; from drumline.runs.run_folder import RunFolder, set_aside\n"
        "set_aside(RunFolder(Path(sys.argv[1])))"
    )
    with locked(RunFolder(run)):
        result = subprocess.run(
            [sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=False
        )
    assert "is training in" in result.stderr
    assert run.exists()


def test_a_lock_does_not_outlive_its_process_in_a_child(tmp_path: Path) -> None:
    """As a DataLoader worker would outlive a rank that is killed."""
    code = (
        "import os, sys, time; from pathlib import Path; from drumline.runs.run_folder import RunFolder, locked\n"
        "with locked(RunFolder(Path(sys.argv[1]))):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.close(1)\n"
        "        time.sleep(60)\n"
        "    os.write(1, str(child).encode())\n"
        "    os._exit(0)"
    )
    child = int(subprocess.check_output([sys.executable, "-c", code, str(tmp_path)]))
    try:
        with locked(RunFolder(tmp_path)):
            os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "one")
    write_whole(tmp_path / "file", "two")
    assert (tmp_path / "file").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(
        TrainingError, match=r"could not be written: (Not a directory|No such file)"
    ):
        write_whole(tmp_path / "file" / "inside", "x")
