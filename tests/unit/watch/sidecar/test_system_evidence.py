"""A real process that uses more memory than its control group allows, and the kernel's evidence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from drumline.watch.sidecar.system_evidence import (
    COUNTERS,
    LIMITS,
    OutOfMemoryCheck,
    kernel_lines,
    memory_group,
    num_kills,
    parse_log_record,
    tightest_limit,
)
from tests.multinode.needs import missing, tool

EATER = """
import sys
sys.stdin.readline()
eaten = []
while True:
    eaten.append(b"x" * (1 << 20))
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group of its own below ours, with a limit of 48 MiB."""
    _, parent, _ = memory_group(os.getpid())
    if parent is None:
        pytest.skip("no control group for memory can be seen here")
    folder = parent / f"drumline-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = next(folder / name for name in LIMITS if (folder / name).exists())
        limit.write_text(str(48 << 20))
    except (OSError, StopIteration) as error:
        with suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group with a limit can be made here: {error!r}")
    yield folder
    end = time.monotonic() + 10
    while folder.exists() and time.monotonic() < end:
        with suppress(OSError):  # its last process is still on its way out
            folder.rmdir()


def start_eater(group: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE, text=True)
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


def test_a_process_that_the_kernel_kills_out_of_memory(limited_group: Path) -> None:
    begin = time.monotonic()
    with start_eater(limited_group) as eater, start_eater(limited_group) as other:
        watch = OutOfMemoryCheck(eater.pid)
        watch_of_other = OutOfMemoryCheck(other.pid)
        assert watch.evidence() == ""
        eater.communicate("go\n")
        assert eater.returncode == -signal.SIGKILL
        assert watch.evidence() == "the limit of 48 MiB of its control group"
        assert num_kills(limited_group) == 1
        if lines := kernel_lines(begin):
            assert any(f"Killed process {eater.pid} " in line for line in lines) or os.getuid() != 0
            assert watch_of_other.evidence() == "", (
                "of the same group, but not the one that was ended"
            )
            assert not any(
                f"Killed process {eater.pid} " in line
                for line in kernel_lines(time.monotonic() + 60)
            )
        other.kill()


def test_without_the_log_the_counter_is_used(
    limited_group: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the log may not be read, or has other numbers than ours."""
    monkeypatch.setattr(
        "drumline.watch.sidecar.system_evidence.KERNEL_LOG", "/dev/kmsg-that-may-not-be-read"
    )
    with start_eater(limited_group) as eater:
        watch = OutOfMemoryCheck(eater.pid)
        assert kernel_lines(0.0) == ()
        assert watch.evidence() == ""
        eater.communicate("go\n")
        assert watch.evidence() == "the limit of 48 MiB of its control group"


def test_counters_and_limits_of_one_tree_for_all(tmp_path: Path) -> None:
    """As a host with control groups of version 2 has them."""
    inner = tmp_path / "job" / "rank"
    inner.mkdir(parents=True)
    (inner / COUNTERS[0]).write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 0\n")
    (inner / LIMITS[0]).write_text("max\n")
    (tmp_path / "job" / LIMITS[0]).write_text("536870912\n")
    assert num_kills(inner) == 2
    assert tightest_limit(inner, tmp_path) == 512 << 20
    assert tightest_limit(inner, inner) is None


def test_lines_of_other_programs_in_the_log_do_not_count() -> None:
    assert parse_log_record(
        b"3,17574,34833446646,-;Out of memory: Killed process 7 (python)\n SUBSYSTEM=x\n"
    ) == (34833446646, "Out of memory: Killed process 7 (python)")
    assert parse_log_record(b"12,339,5140900,-;Out of memory: Killed process 7 (python)\n") == (
        5140900,
        "",
    )


IN_A_CONTAINER = """
import subprocess, sys
from pathlib import Path
from drumline.watch.sidecar.system_evidence import OutOfMemoryCheck

eater = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdin=subprocess.PIPE, text=True)
Path(sys.argv[1], "cgroup.procs").write_text(str(eater.pid))
watch = OutOfMemoryCheck(eater.pid)
eater.communicate("go\\n")
print(eater.pid < 100, watch.evidence())
"""


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_in_a_process_namespace_the_control_group_is_used(limited_group: Path) -> None:
    """There the log has other numbers than those that the sidecar knows."""
    spaces = [tool("unshare"), "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = subprocess.run(
        [*spaces, sys.executable, "-c", IN_A_CONTAINER, str(limited_group), EATER],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True the limit of 48 MiB of its control group\n"
