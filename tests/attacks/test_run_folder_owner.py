"""Another user prepares the run folder, or what is in it: nothing is written, truncated or deleted
elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.base.errors import UsageError
from drumline.base.untrusted import check_own_folder, open_append, open_log, replace_text
from drumline.launch.node.rank_logs import LogFollower, last_lines
from drumline.launch.ssh.supervisor import refusals
from drumline.runs.events import JsonLines
from drumline.runs.run_folder import RunFolder, job_at_work, locked, set_aside, write_whole
from drumline.training.failure_report import _append
from drumline.watch.diagnosis.diagnosis_files import read_diagnoses
from drumline.watch.sidecar.sidecar_reporter import write_status_file
from tests.attacks.limits import bounded
from tests.jobs import Classify, make_config, train_here

PARTS = [
    "events",
    "logs",
    "checkpoints",
    "diagnoses",
    "watch",
    "trace",
    "tensorboard",
    "media",
    "trackers",
    "wandb",
]


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp, which every user may write to."""
    folder = Path(tempfile.mkdtemp(prefix="drumline-shared-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """What the attacker wants changed."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("precious")
    (tmp_path / "victim" / ".step-00000001.partial").mkdir()
    return tmp_path / "victim"


def is_untouched(victim: Path) -> bool:
    names = sorted(path.name for path in victim.iterdir())
    return (
        names == [".step-00000001.partial", "precious"]
        and (victim / "precious").read_text() == "precious"
    )


def by_user(number: int, commands: str, *words: object) -> None:
    subprocess.run(
        ["/bin/sh", "-ec", commands, "sh", *map(str, words)],
        user=number,
        group=number,
        extra_groups=[],
        cwd="/",
        check=True,
    )


def test_a_run_folder_of_another_user_is_refused(
    other_user: int, shared: Path, victim: Path
) -> None:
    run = RunFolder(shared / "run")
    by_user(other_user, 'mkdir "$1"; ln -s "$2" "$1/checkpoints"', run.path, victim)
    with pytest.raises(
        UsageError,
        match=rf"the run folder .* cannot be used: it belongs to user id {other_user}, and this is user id 0\n"
        "  try: choose a folder of your own with --run DIR",
    ):
        run.make()
    assert is_untouched(victim)


def test_a_link_of_another_user_to_a_folder_of_ours_is_refused(
    other_user: int, shared: Path, victim: Path
) -> None:
    run = RunFolder(shared / "run")
    by_user(other_user, 'ln -s "$2" "$1"', run.path, victim)
    for attempt in (run.make, lambda: set_aside(run)):
        with pytest.raises(UsageError, match=f"it belongs to user id {other_user}"):
            attempt()
    assert is_untouched(victim)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_user_is_refused(other_user: int, tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    shutil.rmtree(run.path / name, ignore_errors=True)
    (run.path / name).mkdir()
    os.chown(run.path / name, other_user, other_user)
    with pytest.raises(UsageError, match=rf"it belongs to user id {other_user}.*\({name}\)"):
        run.make()


def test_a_file_of_another_user_is_not_written_to(other_user: int, tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    os.chown(tmp_path / "log", other_user, other_user)
    with pytest.raises(PermissionError, match=f"it belongs to user id {other_user}"):
        open_append(tmp_path / "log")


def test_an_own_folder_in_a_shared_one_and_an_own_link_to_it_are_fine(
    shared: Path, tmp_path: Path
) -> None:
    RunFolder(shared / "run").make()
    (tmp_path / "link").symlink_to(shared / "run")
    RunFolder(tmp_path / "link").make()
    with locked(RunFolder(tmp_path / "link")):
        # this process has the lock itself
        assert job_at_work(RunFolder(shared / "run")) is None


def test_a_file_system_that_gives_all_files_one_owner_is_fine(
    other_user: int, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as NFS with root squashed: what we make there belongs to nobody."""
    os.seteuid(other_user)
    try:
        (shared / "run").mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 7)
        check_own_folder(shared / "run")
    finally:
        monkeypatch.undo()
        os.seteuid(0)
    with pytest.raises(PermissionError):
        check_own_folder(shared / "run")


@pytest.mark.parametrize("name", PARTS)
def test_a_link_in_place_of_a_folder_is_refused(tmp_path: Path, victim: Path, name: str) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    (run.path / name).symlink_to(victim)
    with pytest.raises(
        UsageError, match=rf"cannot be used: it is a symbolic link, not a folder \({name}\)"
    ):
        run.make()
    assert is_untouched(victim)


@pytest.mark.parametrize("name", ["ledger.jsonl", "events/rank-00000.jsonl", "logs/rank-00001.log"])
def test_a_link_in_place_of_a_file_is_refused_before_the_first_step(
    tmp_path: Path, victim: Path, name: str
) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    (run.path / name).symlink_to(victim / "precious")
    what = re.escape(f"it is a symbolic link, not a regular file ({Path(name).name})")
    with pytest.raises(
        UsageError, match=f"cannot be used: {what}\n  try: choose a folder of your own with --run"
    ):
        train_here(make_config(steps=1), Classify, run.path)
    assert is_untouched(victim)


def test_the_lock_is_not_a_link(tmp_path: Path, victim: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    (run.path / ".lock").symlink_to(victim / "precious")
    with pytest.raises(UsageError, match="it is a symbolic link"), locked(run):
        pass
    assert job_at_work(run) is None
    assert is_untouched(victim)


def test_the_lock_is_not_a_fifo(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.make()
    os.mkfifo(run.path / ".lock")
    with (
        bounded(),
        pytest.raises(UsageError, match="it is a FIFO, not a regular file"),
        locked(run),
    ):
        pass
    with bounded():
        assert job_at_work(run) is None


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "device"])
def test_nothing_is_appended_through(tmp_path: Path, victim: Path, kind: str) -> None:
    """Ledger, events and logs."""
    path = tmp_path / "rank-00000.jsonl"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        target = {
            "link": victim / "precious",
            "dangling": victim / "new",
            "device": Path("/dev/null"),
        }[kind]
        path.symlink_to(target)
    with bounded():
        for open_it in (open_append, open_log, JsonLines):
            with pytest.raises(OSError, match="not a regular file"):
                open_it(path)
        assert not _append(path, "text")
        assert last_lines(path) == []
        assert LogFollower(path).read() == []
    assert is_untouched(victim)


def test_a_draft_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path, victim: Path) -> None:
    """config.toml, environment.json, diagnoses and the status are written beside first."""
    for write in (write_whole, replace_text):
        (tmp_path / ".config.toml.partial").symlink_to(victim / "precious")
        (tmp_path / "config.toml").unlink(missing_ok=True)
        (tmp_path / "config.toml").symlink_to(victim / "precious")
        write(tmp_path / "config.toml", "settings")
        assert (tmp_path / "config.toml").read_text() == "settings"
        assert not (tmp_path / "config.toml").is_symlink()
    assert is_untouched(victim)


def test_the_sidecar_writes_no_status_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "watch").symlink_to(victim)
    with pytest.raises(NotADirectoryError):
        write_status_file(tmp_path, {}, writer="node-a-1")
    assert is_untouched(victim)


def test_the_supervisor_refuses_logs_that_are_no_folder_of_this_user(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    spec = {"logs": str(tmp_path / "logs"), "program": {"words": ["digits"], "is_task": True}}
    ((what, next_step),) = refusals(spec)
    assert "cannot be made" in what
    assert next_step == "choose another with --logs"


def test_diagnoses_that_are_no_files_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0001-stopped.json")
    (tmp_path / "0002-stopped.json").symlink_to("/dev/zero")
    (tmp_path / "0003-stopped.json").write_text("[" * 100_000)
    with bounded():
        assert read_diagnoses(tmp_path) == []
