"""Reading /proc, process trees, and ending them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drumline.base import processes
from drumline.base.processes import (
    GONE,
    ProcessHandle,
    Termination,
    children,
    cpu_quota,
    descendants,
    has_signal,
    parent_of,
    parse_stat,
    processes_with_variable,
    read_stat,
    read_status,
    send_signal,
    state_of,
    usable_cpus,
)

IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); time.sleep(60)"


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[bytes]]:
    """A shell, a shell in it, and a sleep in that."""
    root = subprocess.Popen(
        ["sh", "-c", "sh -c 'sleep 60; true'; true"], env={"DRUMLINE_TREE": "7"}
    )
    wait_until(lambda: len(descendants(root.pid)) == 2)
    yield root
    send_signal([*descendants(root.pid), root.pid], signal.SIGKILL)
    root.wait()


def test_a_name_may_hold_anything() -> None:
    stat = parse_stat(
        b"7 (a) (b) S 5 " + b"0 " * 9 + b"30 12 0 0 0 0 3 0 99 " + b"0 " * 29 + b"9 0"
    )
    assert (stat.name, stat.state, stat.parent) == ("a) (b", "S", 5)
    assert (stat.cpu_ticks, stat.num_threads, stat.start_ticks, stat.exit_status) == (42, 3, 99, 9)


def test_a_process_that_has_exited() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_stat(child.pid) is None
    assert read_status(child.pid) == {}
    assert (state_of(child.pid), parent_of(child.pid), descendants(child.pid)) == (GONE, 0, [])
    handle = ProcessHandle(child.pid)
    assert handle.stat() is None
    handle.close()


def test_the_tree(tree: subprocess.Popen[bytes]) -> None:
    inner, sleep = descendants(tree.pid)
    assert (children(tree.pid), children(inner)) == ([inner], [sleep])
    assert parent_of(sleep) == inner
    assert sorted(processes_with_variable("DRUMLINE_TREE=7")) == sorted([tree.pid, inner, sleep])


@pytest.mark.parametrize(
    ("cpu_max", "quota", "usable"),
    [
        ("max 100000", None, 8),
        ("250000 100000", 2.5, 2.5),
        ("1600000 100000", 16, 8),
        (None, None, 8),
    ],
)
def test_cpus_are_limited_by_the_mask_and_by_the_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cpu_max: str | None,
    quota: float | None,
    usable: float,
) -> None:
    if cpu_max is not None:
        (tmp_path / "cpu.max").write_text(f"{cpu_max}\n")
    monkeypatch.setattr(processes, "CGROUPS", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert (cpu_quota(), usable_cpus()) == (quota, usable)


def test_a_machine_without_proc_has_no_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.os, "listdir", lambda path: os.scandir("/no/such/folder"))
    assert descendants(os.getpid()) == []


def test_signals_that_are_caught() -> None:
    status = read_status(os.getpid())
    assert has_signal(status, "SigCgt", signal.SIGINT) == (
        signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    )
    assert not has_signal(status, "SigCgt", signal.SIGKILL)


def test_termination_asks_first_and_kills_after_the_grace_period() -> None:
    root = subprocess.Popen([sys.executable, "-c", IGNORES], stdout=subprocess.PIPE)
    assert root.stdout is not None
    root.stdout.readline()
    ending = Termination(lambda: [root.pid] if root.poll() is None else [], grace_s=60)
    assert not ending.step()
    time.sleep(0.1)
    assert not ending.step(), "it ignores SIGTERM"
    ending.shorten(0)
    ending.wait()
    assert root.wait() == -signal.SIGKILL
    root.stdout.close()


def test_a_stopped_tree_is_ended_too(tree: subprocess.Popen[bytes]) -> None:
    every = [tree.pid, *descendants(tree.pid)]
    send_signal(every, signal.SIGSTOP)
    Termination(lambda: [pid for pid in every if parent_of(pid)], grace_s=10).wait()
    assert tree.wait() == -signal.SIGTERM
