"""A rank and the sidecar that it starts: one that cannot be there is no reason not to train."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.rank.watched.watched_rank import MAX_STARTS, SidecarProcess, watch_rank
from drumline.watch.sidecar.sidecar_options import SidecarOptions


def options_of(folder: Path) -> SidecarOptions:
    return SidecarOptions(
        folder=str(folder), owns_folder=False, node=0, host="node-a", ranks=(0,), world_size=1
    )


def test_training_continues_without_a_sidecar_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    sidecar = SidecarProcess(options_of(tmp_path))
    sidecar.start()
    assert sidecar.fileno() is None
    sidecar.close()
    (line,) = capfd.readouterr().err.splitlines()
    what = "the watchdog's sidecar on node-a cannot be started (No such file or directory)"
    assert f"{what}; training continues, but hangs are not diagnosed. Try: " in line


def test_a_sidecar_that_cannot_live_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    sidecar = SidecarProcess(options_of(tmp_path))
    restarts = []
    for _ in range(MAX_STARTS):
        sidecar.start()
        restarts.append(sidecar.reap())
    assert restarts == [True] * (MAX_STARTS - 1) + [False]
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        f"the watchdog's sidecar on node-a exited {MAX_STARTS} times (exit code 1); training continues"
        in line
    )


def test_it_runs_this_very_package_and_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    sidecar = SidecarProcess(options_of(tmp_path / "gone"))
    sidecar.start()
    assert not sidecar.reap()  # in order: the job was over before it was there
    assert capfd.readouterr().err == ""


def test_a_sidecar_that_outlives_the_loop_is_reaped(tmp_path: Path) -> None:
    sidecar = SidecarProcess(options_of(tmp_path / "gone"))
    sidecar.start()
    process = sidecar._process
    sidecar.close()
    assert isinstance(process, subprocess.Popen)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{process.pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_that_cannot_be_watched_reports_it_and_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    listener = os.open("/dev/null", os.O_RDONLY)
    options = replace(options_of(tmp_path / "gone"), listener=listener)
    assert watch_rank(options, 0) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(listener)  # other nodes' sidecars would wait for this one's answer
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("drumline: rank 0 on node-a is not watched: ")
