"""`drumline jobs`, `attach` and `stop` on one machine, without ssh; on several, see
tests/multinode/test_detached.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from drumline.cli import main
from drumline.launch.detached.job_folder import ENDED, RUNNING, JobState
from tests.unit.launch.test_detached_node import make_folder

ROOT = Path(__file__).parents[2]


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
    assert "error: c: its program exited" in capfd.readouterr().err
