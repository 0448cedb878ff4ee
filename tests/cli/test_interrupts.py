"""Ctrl-C and SIGTERM while a command starts: none is lost, at whatever point they come, and no rank
is left behind.

That one that is ignored from the start stays ignored is shown in tests/cli/test_command.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.base.processes import descendants
from tests.conftest import children_that_stay

ROOT = Path(__file__).parents[2]
EARLY = "drumline: interrupted before the first step; rerun the same command\n"
# What importlib does now and then: Python calls back, and drops what is raised there. The signal
# arrives so in `WHO`.
DROPS_WHAT_IS_RAISED = """
import os, signal, sys, time, weakref
from pathlib import Path

who = "rank" if "RANK" in os.environ else "launcher"

class Finder:
    seen = False
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torch.distributed" and who == os.environ["WHO"] and not cls.seen:
            cls.seen = True
            held = type("Held", (), {})()
            callback = weakref.ref(held, lambda _: (Path(f"importing-{os.getpid()}").touch(), time.sleep(60)))
            del held
        if name == "drumline.training.run" and Finder.seen:
            Path("went-on").touch()

if "drumline" in sys.orig_argv:
    sys.meta_path.insert(0, Finder)
"""


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text(DROPS_WHAT_IS_RAISED)
    path = os.pathsep.join([str(ROOT), *([str(folder / "site")] if environment else [])])
    command = [
        sys.executable,
        "-m",
        "drumline",
        "train",
        "digits",
        "--model.widths",
        "8",
        "--train.steps",
        "90000",
    ]
    return subprocess.Popen(
        [*command, "--run", "run", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str], is_there: Callable[[], bool]) -> None:
    while not is_there():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)


def has_loaded(pid: int, name: str) -> bool:
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # one that has not ended would train on; its guard ends the rest
    assert "Traceback" not in errors
    assert not children_that_stay()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("who", "procs"),
    [
        ("launcher", "2"),
        pytest.param("launcher", "1", marks=pytest.mark.soak),
        pytest.param("rank", "2", marks=pytest.mark.soak),
    ],
)
def test_an_interrupt_that_python_would_drop_is_obeyed(
    tmp_path: Path, who: str, procs: str
) -> None:
    process = start(tmp_path, "--procs", procs, WHO=who)
    num_ranks = int(procs) if who == "rank" else 1
    wait_for(process, lambda: len(list(tmp_path.glob("importing-*"))) == num_ranks)
    os.killpg(process.pid, signal.SIGINT)
    code, errors = ended(process)
    assert code == 130, errors
    assert errors.count("drumline: interrupted") == 1, errors
    if who == "launcher":
        assert errors == EARLY
    assert not (tmp_path / "went-on").exists(), (
        "a rank that dropped it would train until it is killed"
    )


def ranks_of(pid: int) -> list[int]:
    return [
        descendant
        for descendant in descendants(pid)
        if "RANK=" in Path(f"/proc/{descendant}/environ").read_text(errors="replace")
    ]


POINTS: dict[str, Callable[[int], bool]] = {
    "the guard is there": lambda pid: bool(descendants(pid)),
    "torch is being loaded": lambda pid: has_loaded(pid, "libtorch_cpu"),
    "ranks are there": lambda pid: len(ranks_of(pid)) >= 2,
    "ranks load torch": lambda pid: any(has_loaded(rank, "libtorch_cpu") for rank in ranks_of(pid)),
}


@pytest.mark.parametrize(
    "point", [point for point in POINTS if point != "ranks are there"]
)  # right before the last
def test_an_interrupt_at_any_point_of_the_start_ends_the_command(
    tmp_path: Path, point: str
) -> None:
    process = start(tmp_path, "--procs", "2")
    wait_for(process, lambda: POINTS[point](process.pid))
    os.killpg(process.pid, signal.SIGINT)
    code, errors = ended(process)
    assert (code, errors.count("drumline: interrupted")) == (130, 1), errors


def test_sigterm_before_there_are_ranks_exits_with_its_own_code(tmp_path: Path) -> None:
    process = start(tmp_path, "--procs", "2")
    wait_for(process, lambda: POINTS["torch is being loaded"](process.pid))
    process.terminate()
    code, errors = ended(process)
    assert code == 75, errors
    assert errors.count("drumline: stopped before the first step") == 1
