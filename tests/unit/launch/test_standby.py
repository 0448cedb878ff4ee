"""Ranks begin in processes that wait: as they would have begun anyway, but for what is loaded
already."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from drumline.launch.node import standby as standby_module
from drumline.launch.node.standby import Standby

RANK = """
import json, os, sys
from drumline.base.startup import now, process_start
facts = {"pid": os.getpid(), "rank": os.environ["RANK"], "argv": sys.argv[1:], "main": __name__}
facts |= {"age": now() - process_start(), "is_loaded": "loaded_before" in sys.modules}
print(json.dumps(facts), flush=True)
print("an error", file=sys.stderr, flush=True)
sys.exit(3)
"""
PROGRAM = ("-m", "some_rank", "a b")


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_rank.py").write_text(RANK)
    (tmp_path / "loaded_before.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(standby_module, "AFTER_S", 0.0)


def start(
    standby: Standby, folder: Path, args: tuple[str, ...] = PROGRAM
) -> tuple[int, dict[str, Any]]:
    """A rank as torch's agent starts it: its pid, and what it said."""
    with standby.serving():
        handler = SubprocessHandler(
            sys.executable, args, {"RANK": "7"}, str(folder / "out"), str(folder / "err"), 0, None
        )
    assert handler.proc.wait(60) == 3
    for file in (handler._stdout, handler._stderr):
        file.close()
    assert (folder / "err").read_text() == "an error\n"
    rank_output: dict[str, Any] = json.loads((folder / "out").read_text())
    assert rank_output["pid"] == handler.proc.pid
    return handler.proc.pid, rank_output


def test_a_rank_begins_in_a_process_that_waits_and_else_in_one_of_its_own(tmp_path: Path) -> None:
    standby = Standby(PROGRAM, modules=["loaded_before"], count=2)
    standby.fill(at_once=True)
    standby.fill()
    first, second = (process for process, _ in standby._waiting)
    pid, rank_output = start(standby, tmp_path)
    assert pid == first.pid
    assert rank_output["is_loaded"]
    assert (rank_output["rank"], rank_output["argv"], rank_output["main"]) == (
        "7",
        ["a b"],
        "__main__",
    )
    assert rank_output["age"] < 30, "it began when it was needed"
    second.kill()
    second.wait()
    pid, rank_output = start(standby, tmp_path)
    assert pid != second.pid
    assert not rank_output["is_loaded"], "one that was killed is no rank"
    assert (rank_output["rank"], rank_output["argv"]) == ("7", ["a b"])


def test_one_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    standby = Standby(PROGRAM, modules=["loaded_before"], count=3)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = len(list(Path("/proc/self/fd").iterdir()))
    standby.fill(at_once=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not standby._waiting


def test_what_waits_is_not_taken_for_another_program_and_ends_when_it_is_not_needed(
    tmp_path: Path,
) -> None:
    standby = Standby(PROGRAM, modules=["loaded_before"], count=1)
    standby.fill()
    (waiting,) = (process for process, _ in standby._waiting)
    assert start(standby, tmp_path, ("-m", "some_rank", "c"))[0] != waiting.pid
    standby.close()
    assert waiting.wait(60) == 0
