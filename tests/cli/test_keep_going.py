"""`drumline launch --keep-going`: resumes after a preemption and a full disk, and ends by a signal
to itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from drumline.launch import keep_going
from drumline.launch.keep_going import MIN_BYTES, has_space, needed_bytes, waiting_sentence
from drumline.runs.events import read_events
from tests.cli.test_launch_command import launch
from tests.cli.test_preempt_command import pid_of_rank

ROOT = Path(__file__).parents[2]
TRAIN = ("digits", "--model.widths", "8", "--train.epochs", "5000", "--log.every_steps", "1")
LIMIT_S = 120.0


def wait_for(what: Callable[[], object], job: subprocess.Popen[bytes], screen: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not what():
        assert job.poll() is None, screen.read_text()
        assert time.monotonic() < deadline, screen.read_text()
        time.sleep(0.05)


def num_starts(run: Path) -> int:
    file = run / "events" / "rank-00000.jsonl"
    return sum(event["kind"] == "start" for event in read_events(file)) if file.exists() else 0


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 12))
            except OSError:
                return filler


@pytest.mark.usefixtures("warm")
def test_a_launch_keeps_going_until_it_is_asked_to_stop(
    tmp_path: Path, small_disk: Callable[..., Path]
) -> None:
    disk = small_disk("size=24m")
    run = disk / "run"
    screen = tmp_path / "screen"
    command = [sys.executable, "-m", "drumline", "launch", "--keep-going", "--procs", "2", *TRAIN]
    command += ["--run", str(run), "--checkpoint.every_steps", "20"]
    with screen.open("wb") as file:
        job = subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=file,
        )
    try:
        wait_for(lambda: pid_of_rank(run, 1), job, screen)
        preempted = pid_of_rank(run, 1)
        assert preempted is not None
        os.kill(preempted, signal.SIGTERM)
        wait_for(lambda: num_starts(run) == 2 and pid_of_rank(run, 1), job, screen)
        text = screen.read_text()
        assert (
            "drumline: warning: preempted by a signal or a notice to a rank, and saved; resuming\n"
            in text
        )
        assert "restarting the ranks" not in text, "it is no restart"

        filler = fill(disk)
        wait_for(lambda: " is full; the run resumes when " in screen.read_text(), job, screen)
        time.sleep(0.5)
        assert num_starts(run) == 2, "not before there is space"
        filler.unlink()
        wait_for(lambda: num_starts(run) == 3 and pid_of_rank(run, 1), job, screen)

        job.send_signal(signal.SIGTERM)
        assert job.wait(LIMIT_S) == 75, screen.read_text()
        assert num_starts(run) == 3
    finally:
        job.kill()
        job.wait()


def test_a_disk_has_space_when_a_checkpoint_fits(small_disk: Callable[..., Path]) -> None:
    disk = small_disk("size=4m")
    assert needed_bytes(None) == needed_bytes(disk) == MIN_BYTES
    checkpoint = disk / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_bytes(bytes(MIN_BYTES))
    assert needed_bytes(disk) == 2 * MIN_BYTES
    assert has_space(disk, 2 * MIN_BYTES)
    filler = fill(disk)
    assert not has_space(disk, 2 * MIN_BYTES)
    filler.unlink()
    assert has_space(disk, 2 * MIN_BYTES)
    assert [path.name for path in disk.iterdir()] == ["checkpoints"]
    assert has_space(disk / "missing", 1), "the run itself reports what is wrong"


def test_a_probe_for_space_leaves_no_file_when_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[list[Path]] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: left.append(list(tmp_path.iterdir())))
    assert has_space(tmp_path, 1)
    assert left == [[]], "it has no name while it is filled"


def test_what_is_waited_for_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keep_going, "SPACE_POLL_S", 0.001)
    answers = iter([False, False, True])
    monkeypatch.setattr(keep_going, "has_space", lambda *_: next(answers))
    keep_going.wait_for_space(tmp_path, 2_000_000)
    assert capfd.readouterr().err == (
        f"drumline: warning: the disk of {tmp_path} is full; the run resumes when 2 MB are free there. Try: free "
        "some space\n"
    )
    assert waiting_sentence("/run", host="b").startswith(
        "warning: the disk of /run on b is full; the run resumes when"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.py"],
            "--keep-going: is for tasks, which resume; a script may start from the beginning",
        ),
        (["--slurm", "digits"], "--keep-going: is not for --slurm"),
    ],
)
def test_where_it_cannot_help_it_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "train.py").touch()
    code, _, errors = launch("--keep-going", *words, cwd=tmp_path)
    assert code == 2
    assert message in errors
