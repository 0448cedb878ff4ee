"""`drumline jobs`, `attach` and `stop` on one machine, without ssh; on several, see
tests/multinode/test_detached.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drumline.cli import main
from drumline.launch.detached.job_folder import ENDED, RUNNING, JobState
from tests.multinode.needs import missing
from tests.unit.launch.test_detached_node import make_folder

ROOT = Path(__file__).parents[2]
# The state folder of this user is on a disk of its own, which is full.
FULL = """
import atexit, subprocess, sys, time
from pathlib import Path
from drumline.cli import main
from drumline.launch.node_plan import NodePlan
from tests.unit.launch.test_detached_node import make_folder

DISK = Path(sys.argv[1])
READ_ONLY = f'mount -o remount,bind,ro {DISK} && exec "$@"'
KEEPER = [sys.executable, "-m", "drumline.launch.detached.keeper"]
STOP = [sys.executable, "-m", "drumline", "stop"]

def make(name):
    node = NodePlan(join_timeout_s=600)
    return make_folder(DISK / "drumline", name=name, hosts=("a",), cwd="/nowhere", node=node)

def start(job):
    keeper = subprocess.Popen([*KEEPER, str(job.path)])
    atexit.register(keeper.kill)
    while not job.state().why:
        time.sleep(0.05)
    return keeper

def stop_without_writing(name):
    words = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *STOP, name]
    return subprocess.run(words, capture_output=True, text=True)

kept, stopped, left, forgotten = map(make, ("kept", "stopped", "left", "forgotten"))
keepers = start(kept), start(stopped)
try:
    with open(DISK / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
except OSError as error:
    print(error)
try:
    make("late")
except OSError as error:
    print(error)
assert not kept.path.parents[1].joinpath("late").exists(), "a launch that is refused leaves nothing"
assert main(["stop", "kept"]) == 0
assert stop_without_writing("stopped").returncode == 0
assert [keeper.wait() for keeper in keepers] == [0, 0]
assert main(["stop", "left"]) == 0
for job in (kept, stopped, left):
    assert (job.state().state, job.state().code) == ("ended", 130), job.state()
    assert job.spec().frame["secret"] == ""
assert main(["attach", "kept"]) == 130
done = stop_without_writing("forgotten")
assert "localhost: warning: the state of the job could not be recorded: [Errno 30] Read-only" in done.stderr, done
assert "forgotten has ended on 1 host; it was stopped" in done.stdout
assert forgotten.state().state == "starting"
"""
WRITE_AGAIN = """
import errno, sys
from pathlib import Path
from drumline.launch.detached import job_folder
from tests.unit.launch.test_detached_node import make_folder

def full(path):
    raise OSError(errno.ENOSPC, "No space left on device")

job = make_folder(Path(sys.argv[1]))
job_folder.replacing = full
job.write_state(job_folder.JobState(state="ended"))
assert job.state().state == "ended", job.state()
"""


@pytest.fixture(name="state")
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of this user; `ssh` reaches nobody."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("DRUMLINE_SSH", "/bin/false")
    return tmp_path / "drumline"


def test_a_machine_without_jobs(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs"]) == 0
    assert capfd.readouterr().out == "there are no detached jobs on localhost\n"
    assert main(["jobs", "--json"]) == 0
    assert capfd.readouterr().out == "[]\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attach"], "no JOB was given"),
        (["stop", "../x"], "'../x' is not a job's name (letters a to z, digits and dashes)"),
        (["stop", "digits-1a2b3c"], "there is no job digits-1a2b3c on localhost"),
        (["jobs", "--hosts", "a", "--hostfile", "b"], "--hosts and --hostfile exclude each other"),
    ],
)
def test_wrong_commands(
    state: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(words) == 2
    assert message in capfd.readouterr().err


def test_a_job_without_its_keeper_is_down_and_can_be_stopped(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(state, hosts=("a",), launched_at=time.time())
    folder.write_state(JobState(state=RUNNING, reached_step=1840))
    assert main(["jobs"]) == 0
    assert "digits-1a2b3c  down   1,840" in capfd.readouterr().out

    assert main(["stop", "digits-1a2b3c"]) == 0
    out = capfd.readouterr().out
    assert "drumline: digits-1a2b3c has ended on 1 host; it was stopped\n" in out
    assert folder.state().state == ENDED
    assert main(["stop", "digits-1a2b3c", "--save"]) == 0
    assert main(["jobs"]) == 0
    assert "digits-1a2b3c  stopped" in capfd.readouterr().out
    assert main(["attach", "digits-1a2b3c"]) == 130


def test_hosts_that_are_not_reached_are_named(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_folder(state)
    assert main(["stop", "digits-1a2b3c"]) == 3
    assert "error: b: its program exited (exit code 1)" in capfd.readouterr().err
    assert main(["jobs", "--hosts", "c"]) == 3
    seen = capfd.readouterr()
    assert "error: c: its program exited" in seen.err
    assert seen.out == "", "what is there is not known"


def test_a_job_ends_where_nothing_can_be_written(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    script = f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", FULL]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*words, str(tmp_path)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No space left on device" in done.stdout


def test_a_full_disk_whose_file_system_has_no_fallocate_keeps_the_state(tmp_path: Path) -> None:
    """As NFS; ramfs itself is never full."""
    if why := missing():
        pytest.skip(why)
    script = f'mount -t ramfs ramfs {tmp_path} && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", WRITE_AGAIN]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*words, str(tmp_path)], env=variables, check=True)


def test_a_damaged_job_is_named_beside_the_others(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(state, hosts=("a",))
    (folder.path / "state.json").write_text("{")
    unreadable = make_folder(state, name="unreadable", hosts=("a",))
    (unreadable.path / "spec.json").write_text("{")
    make_folder(state, name="sound", hosts=("a",))
    assert main(["jobs"]) == 0
    printed = capfd.readouterr()
    assert "sound  down" in printed.out
    damaged = [unreadable.path, folder.path]
    for line, path in zip(printed.err.splitlines(), damaged, strict=True):
        assert line.startswith(f"drumline: localhost: warning: {path} cannot be read: ")
        assert line.endswith("; delete it if no job runs from it")

    assert main(["stop", "digits-1a2b3c"]) == 2
    assert f"{folder.path} cannot be read: " in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["attach", "stop"])
def test_what_they_print_has_the_format_of_the_log(
    state: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("DRUMLINE_LOG_FORMAT", "xml")
    assert main([verb, "digits-1a2b3c"]) == 2
    assert "DRUMLINE_LOG_FORMAT is 'xml': it takes text or json" in capfd.readouterr().err
