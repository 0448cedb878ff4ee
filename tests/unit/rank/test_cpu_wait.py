"""How long a rank waits for a CPU, by the kernel's own count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from drumline.base.processes import thread_times
from drumline.rank.watched.trace_capture import CpuWait

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


@pytest.mark.skipif(
    not thread_times(os.getpid()), reason="the kernel does not count waits"
)
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
    monkeypatch.setattr(
        "drumline.rank.watched.trace_capture.thread_times", lambda pid: {}
    )
    wait = CpuWait()
    assert wait.stop() is None
