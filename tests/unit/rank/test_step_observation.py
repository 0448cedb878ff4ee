"""What the profiled steps use and wait for: how long a rank waits for a CPU is the kernel's own count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from drumline.base.processes import thread_times
from drumline.rank.profiled.step_observation import (
    SYNCHRONIZES,
    ChildTimes,
    CpuWait,
    SyncLines,
)

SPIN_S = 0.3


@pytest.fixture
def shared_core() -> Iterator[None]:
    """This thread has one core, on which another process computes."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    spinning = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"],
        stdout=subprocess.PIPE,
    )
    assert spinning.stdout is not None
    spinning.stdout.readline()
    try:
        yield
    finally:
        spinning.kill()
        spinning.communicate()
        os.sched_setaffinity(0, cores)


def spin() -> None:
    end = time.perf_counter() + SPIN_S
    while time.perf_counter() < end:
        pass


@pytest.mark.skipif(not thread_times(os.getpid()), reason="the kernel does not count waits")
@pytest.mark.usefixtures("shared_core")
def test_a_thread_that_shares_its_core_waits_for_it() -> None:
    wait = CpuWait()
    spin()
    use = wait.stop()
    assert use is not None
    assert 0.1 * SPIN_S < use.waited_s < 2 * SPIN_S
    assert 0.0 < use.ran_s < 0.9 * SPIN_S


def test_nothing_is_known_where_the_kernel_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drumline.rank.profiled.step_observation.thread_times", lambda pid: {})
    wait = CpuWait()
    assert wait.stop() is None


def test_modes_and_warnings_are_as_before_after_the_profiled_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[int | str] = [2]
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", modes.append)
    before = list(warnings.filters)
    show = warnings.showwarning
    lines = SyncLines()
    lines.start()
    lines.stop()
    assert modes == [2, "warn", 2]
    assert list(warnings.filters) == before
    assert warnings.showwarning == show


def test_what_a_script_changes_of_its_warnings_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", lambda mode: None)
    with warnings.catch_warnings():
        lines = SyncLines()
        lines.start()
        warnings.filterwarnings("ignore", message="a script's own filter")
        own_filter = warnings.filters[0]
        warnings.showwarning = show = lambda *_: None  # type: ignore[assignment]
        lines.stop()
        assert warnings.filters[0] == own_filter
        assert SYNCHRONIZES not in str(warnings.filters)
        assert warnings.showwarning is show


def test_lines_that_wait_for_the_device_are_those_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    lines = SyncLines()
    lines.start()
    torch.cuda.synchronize()
    warnings.warn(f"this {SYNCHRONIZES}", stacklevel=1)
    lines.stop()
    code = test_lines_that_wait_for_the_device_are_those_of_the_user.__code__
    first = code.co_firstlineno
    sources = [source for _, source in lines.lines]
    assert sources == [f"{__file__}:{first + 8}", f"{__file__}:{first + 9}"]


def test_lines_that_wait_for_the_device_are_no_more_than_a_reader_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("drumline.rank.profiled.step_observation.MOST_SYNC_LINES", 2)
    monkeypatch.setattr("torch.cuda.get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr("torch.cuda.set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    lines = SyncLines()
    lines.start()
    for _ in range(3):
        torch.cuda.synchronize()
    lines.stop()
    assert len(lines.lines) == 2


def test_processes_of_a_rank_are_workers_or_others() -> None:
    command = "import time\nwhile True: pass"
    data: Any = torch.utils.data.DataLoader(range(1000), num_workers=2)  # type: ignore[arg-type]
    with subprocess.Popen([sys.executable, "-c", command]) as process:
        batches = iter(data)
        next(batches)
        time.sleep(0.1)  # until the workers have their name
        times = ChildTimes()
        time.sleep(0.3)
        workers, busiest = times.use()
        process.kill()
    assert workers is not None
    assert workers.number == 2
    assert busiest is not None
    assert busiest.name.endswith(f"-c {command}")
    assert busiest.cores + busiest.waiting > 0.5
    del batches
