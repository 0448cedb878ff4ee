"""When a command began: as the system says, or the launcher, if that can be true."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from drumline.launch import command_start as room
from drumline.launch.command_start import COMMAND_START, command_start, now, process_start
from drumline.launch.node.supervision import Supervision
from drumline.launch.node.watched_agent import RankFiles, WatchedAgent

TICK_S = 0.02


def test_a_process_knows_when_it_began() -> None:
    code = "from drumline.launch.command_start import process_start; print(process_start())"
    before = now()
    began = float(subprocess.check_output([sys.executable, "-c", code]))
    assert before - TICK_S <= began < now() - TICK_S, "before Python itself had started"


@pytest.mark.parametrize("text", [None, "", "1 (a name) S 1 2", "1 (python) " + "x " * 30])
def test_where_the_system_does_not_tell_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    file = tmp_path / "stat"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(room, "OWN_STAT", file)
    before = now()
    assert before <= process_start() <= now()


def test_the_name_of_a_process_may_hold_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stat"
    file.write_text("7 (a ) b) " + " ".join(["S", *["1"] * 18, "250", "9"]))
    monkeypatch.setattr(room, "OWN_STAT", file)
    monkeypatch.setattr("os.sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    assert process_start() == 2.5


def test_a_launcher_tells_its_ranks() -> None:
    assert command_start({COMMAND_START: "1.25"}) == 1.25


@pytest.mark.parametrize("word", ["", "soon", "nan", "inf", "-1", "1e12"])
def test_what_cannot_be_true_is_not_believed(word: str) -> None:
    assert command_start({COMMAND_START: word}) is None


def test_another_launcher_tells_nothing() -> None:
    assert command_start({}) is None


@pytest.mark.parametrize(
    ("num_starts", "folder", "tells"), [(0, None, True), (1, None, False), (0, Path("logs"), False)]
)
def test_only_the_first_ranks_of_a_command_that_was_given_here_are_told(
    tmp_path: Path, num_starts: int, folder: Path | None, tells: bool
) -> None:
    agent = object.__new__(WatchedAgent)  # without a job: only what it would tell
    agent.files = RankFiles(str(tmp_path), folder)
    agent.files.num_starts = num_starts
    agent.supervision = Supervision(folder=folder)
    assert agent._command_start() == (f"{process_start():.2f}" if tells else "")
