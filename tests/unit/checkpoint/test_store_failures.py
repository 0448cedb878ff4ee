"""What a user reads when a checkpoint cannot be saved; and that the last good one is still
there."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drumline.base.errors import CheckpointError
from drumline.base.untrusted import flush_folder
from drumline.checkpoint import store
from drumline.runs import catalog

NOBODY = 65534


def write(root: Path, step: int, *, num_bytes: int = 400) -> Path:
    return store.write(
        root,
        step,
        tensors={"model": {"w": torch.ones(num_bytes // 4)}},
        documents={"progress": {}},
        metrics={},
    )


def failure(root: Path, step: int, *, num_bytes: int = 400) -> str:
    with pytest.raises(CheckpointError) as caught:
        write(root, step, num_bytes=num_bytes)
    assert isinstance(caught.value.__cause__, OSError)
    return str(caught.value)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere, so permissions are tried as someone else."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that others may look into, though pytest's own are closed to them."""
    closed = [
        folder for folder in (tmp_path, *tmp_path.parents) if folder.stat().st_mode & 0o005 != 0o005
    ]
    modes = {folder: folder.stat().st_mode for folder in closed}
    for folder in closed:
        folder.chmod(0o755)
    yield tmp_path
    for folder, mode in modes.items():
        folder.chmod(mode)


def test_full_disk(small_disk: Callable[[str], Path]) -> None:
    root = small_disk("size=256k") / "checkpoints"
    good = write(root, 1, num_bytes=40_000)
    free = os.statvfs(root).f_bavail
    text = failure(root, 2, num_bytes=1_000_000)
    assert re.search(
        rf"the checkpoint {root}/step-00000002 could not be saved: the disk is full "
        rf"\(1 MB needed, 2\d\d kB free\); the last good checkpoint, {good}, is untouched\n"
        rf"  try: free some space on the disk of {root}, or inodes \(df -i\), or use another run folder; "
        "then rerun the same command",
        text,
    ), text
    assert catalog.newest_valid(root) == (good, [])
    assert [path.name for path in root.iterdir()] == [good.name]
    assert os.statvfs(root).f_bavail == free
    assert write(root, 2, num_bytes=40_000)


def test_full_disk_at_the_first_checkpoint(small_disk: Callable[[str], Path]) -> None:
    root = small_disk("size=64k")
    assert "; there is no earlier checkpoint\n" in failure(root, 1, num_bytes=1_000_000)
    assert list(root.iterdir()) == []


def test_full_disk_while_the_same_step_is_replaced(small_disk: Callable[[str], Path]) -> None:
    root = small_disk("size=256k")
    good = write(root, 1, num_bytes=40_000)
    assert f"the last good checkpoint, {good}, is untouched" in failure(
        root, 1, num_bytes=1_000_000
    )
    assert catalog.newest_valid(root) == (good, [])


def test_full_of_files(small_disk: Callable[[str], Path]) -> None:
    root = small_disk("size=1m,nr_inodes=7")
    good = write(root, 1)
    text = failure(root, 2)
    assert "the disk is full" in text
    assert f"free some space on the disk of {root}, or inodes (df -i)" in text
    assert catalog.newest_valid(root).path == good


def test_read_only_disk(small_disk: Callable[[str], Path]) -> None:
    root = small_disk("size=1m")
    good = write(root, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    text = failure(root, 2)
    assert "step-00000002 could not be saved: the file system is read-only (" in text
    assert (
        f"the last good checkpoint, {good}, is untouched\n  try: mount the disk of {root} for writing"
        in text
    )
    assert catalog.newest_valid(root) == (good, [])
    with pytest.raises(
        CheckpointError, match="step-00000001 could not be removed: the file system is read-only"
    ):
        store.remove(good)


def test_no_permission(open_folder: Path) -> None:
    root = open_folder / "checkpoints"
    good = write(root, 1)
    root.chmod(0o555)
    with as_nobody():
        text = failure(root, 2)
        with pytest.raises(CheckpointError, match="could not be removed: no permission"):
            store.remove(good)
        user = os.geteuid()
    root.chmod(0o755)
    assert "step-00000002 could not be saved: no permission (" in text
    assert (
        f"the last good checkpoint, {good}, is untouched\n  try: let user id {user} read and write {root}"
        in text
    )
    assert catalog.newest_valid(root) == (good, [])


def test_no_permission_even_to_look(open_folder: Path) -> None:
    closed = open_folder / "closed"
    root = closed / "checkpoints"
    write(root, 1)
    closed.chmod(0o000)
    with as_nobody():
        text = failure(root, 2)
        with pytest.raises(
            CheckpointError, match=rf"the checkpoints in {root} cannot be listed: no permission"
        ):
            catalog.newest_valid(root)
    closed.chmod(0o755)
    assert "no permission (" in text
    assert "; earlier checkpoints cannot be read\n" in text


def test_a_file_in_the_place_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("x")
    text = failure(tmp_path / "checkpoints", 1)
    assert "a file is where a folder should be" in text
    assert f"try: move away {tmp_path}/checkpoints" in text


def test_a_file_in_the_place_of_the_checkpoint(tmp_path: Path) -> None:
    good = write(tmp_path, 1)
    (tmp_path / "step-00000002").write_text("mine")
    text = failure(tmp_path, 2)
    assert "a file is where a folder should be" in text
    assert f"try: move away {tmp_path}/step-00000002" in text
    assert (tmp_path / "step-00000002").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [good.name, "step-00000002"]


@pytest.mark.parametrize(
    ("number", "reason", "next_step"),
    [
        (errno.ENOSPC, "the disk is full", "free some space on the disk"),
        (errno.EDQUOT, "the disk quota is used up", "free some space, or ask for a larger quota"),
        (errno.EPERM, "no permission", "let user id"),
        (errno.EIO, "Input/output error", "check the disk of"),
    ],
)
def test_an_error_that_only_shows_when_a_file_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, next_step: str
) -> None:
    good = write(tmp_path, 1)

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    text = failure(tmp_path, 2)
    assert f"could not be saved: {reason} (" in text
    assert f"the last good checkpoint, {good}, is untouched\n  try: {next_step}" in text
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


def test_a_partial_folder_taken_away_by_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = flush_folder

    def flush_and_lose(folder: Path) -> None:
        flush(folder)
        if folder.name.endswith(".partial"):
            store.delete_folder(folder)

    monkeypatch.setattr(store, "flush_folder", flush_and_lose)
    text = failure(tmp_path, 2)
    assert "could not be saved: No such file or directory (" in text
    assert f"check the disk of {tmp_path}, and that no other run uses it" in text


def test_a_file_system_without_folder_flush_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    catalog.verify(write(tmp_path, 1))


def test_a_disk_that_does_not_tell_its_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "x")

    monkeypatch.setattr("shutil.disk_usage", fail)
    assert (
        catalog.explain_os_error(OSError(errno.EDQUOT, "x"), folder=tmp_path, needed=5)[0]
        == "the disk quota is used up"
    )
