from __future__ import annotations

import errno
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from drumline.base.errors import CheckpointError
from drumline.checkpoint import store
from drumline.runs import catalog, manifest
from drumline.runs.manifest import CorruptCheckpointError

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "progress.json")


def write(root: Path, step: int, *, metrics: dict[str, float] | None = None, size: int = 8) -> Path:
    tensors = {
        "model": {"w": torch.full((size,), float(step))},
        "optimizer": {"w/m": torch.ones(3)},
    }
    return store.write(
        root, step, tensors=tensors, documents={"progress": {"step": step}}, metrics=metrics or {}
    )


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def flip_byte(path: Path, position: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 0x10
    path.write_bytes(raw)


def test_what_is_written_is_restored(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    path = write(tmp_path / "a" / "b", 7, metrics={"loss": 0.5})
    assert path == tmp_path / "a" / "b" / "step-00000007"
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    verified = catalog.verify(path)
    assert (verified.step, verified.metrics) == (7, {"loss": 0.5})
    assert datetime.fromisoformat(verified.created) >= before
    assert verified.files.keys() == set(FILES) - {"manifest.json"}
    snapshot = store.read(path)
    assert torch.equal(snapshot.tensors["model"]["w"], torch.full((8,), 7.0))
    assert snapshot.tensors.keys() == {"model", "optimizer"}
    assert snapshot.documents == {"progress": {"step": 7}}
    assert catalog.read_document(path, "progress") == {"step": 7}
    assert store.read(path).tensors["optimizer"]["w/m"].tolist() == [1, 1, 1]
    assert hidden(path.parent) == []


def test_large_steps_keep_their_order(tmp_path: Path) -> None:
    for step in (99_999_999, 5, 123_456_789):
        write(tmp_path, step)
    assert catalog.list_steps(tmp_path) == [5, 99_999_999, 123_456_789]
    assert catalog.newest_valid(tmp_path).path == tmp_path / "step-123456789"


def test_nothing_there_yet(tmp_path: Path) -> None:
    assert catalog.newest_valid(tmp_path / "none") == (None, [])
    assert catalog.list_steps(tmp_path / "none") == []


def test_other_files_are_not_touched(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    (tmp_path / "step-00000009").write_text("a file, not a folder")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-00000012-copy").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    (path / "notes.txt").write_text("mine")
    write(tmp_path, 4)
    assert catalog.newest_valid(tmp_path) == (tmp_path / "step-00000004", [])
    assert catalog.list_steps(tmp_path) == [3, 4]
    assert (tmp_path / "notes.txt").read_text() == "hello"
    assert (tmp_path / "step-12").is_dir()
    catalog.verify(path)


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    good = write(tmp_path, 1)
    corrupt = write(tmp_path, 2)
    size = (corrupt / name).stat().st_size
    os.truncate(corrupt / name, size - 1)
    newest = catalog.newest_valid(tmp_path)
    assert newest.path == good
    reason = (
        f"{name} has {size - 1} of {size} bytes" if name != "manifest.json" else "manifest.json: "
    )
    assert [skipped.path for skipped in newest.skipped] == [corrupt]
    assert newest.skipped[0].reason.startswith(reason)
    os.truncate(corrupt / name, 0)
    assert catalog.newest_valid(tmp_path).path == good


@pytest.mark.parametrize("name", FILES)
def test_a_deleted_file_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    good = write(tmp_path, 1)
    corrupt = write(tmp_path, 2)
    (corrupt / name).unlink()
    assert catalog.newest_valid(tmp_path) == (good, [(corrupt, f"{name} is missing")])
    with pytest.raises(
        CorruptCheckpointError,
        match=f"the checkpoint {corrupt} is corrupt or incomplete: {name} is missing",
    ):
        catalog.verify(corrupt)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    good = write(tmp_path, 1)
    corrupt = write(tmp_path, 2)
    intact = (corrupt / name).read_bytes()
    for position in range(0, len(intact), 7):
        flip_byte(corrupt / name, position)
        newest = catalog.newest_valid(tmp_path)
        assert newest.path == good
        assert name in newest.skipped[0].reason
        assert name == "manifest.json" or "its checksum differs" in newest.skipped[0].reason
        (corrupt / name).write_bytes(intact)
    assert catalog.newest_valid(tmp_path) == (corrupt, [])


def test_all_corrupt_ones_are_reported_newest_first(tmp_path: Path) -> None:
    paths = [write(tmp_path, step) for step in (1, 2, 3)]
    for path in paths:
        (path / "progress.json").unlink()
    newest = catalog.newest_valid(tmp_path)
    assert newest.path is None
    assert [skipped.path for skipped in newest.skipped] == paths[::-1]


def test_a_folder_under_the_name_of_another_step_is_corrupt(tmp_path: Path) -> None:
    write(tmp_path, 1).rename(tmp_path / "step-00000005")
    assert catalog.newest_valid(tmp_path).skipped[0].reason == "manifest.json belongs to step 1"
    (tmp_path / "step-00000005").rename(tmp_path / "best")
    assert catalog.verify(tmp_path / "best").step == 1


def test_a_file_that_cannot_be_read_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 1)

    def fail(file: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(catalog, "checksum_of", fail)
    with pytest.raises(
        CorruptCheckpointError, match=r"model\.safetensors cannot be read: Input/output error"
    ):
        catalog.verify(path)


def test_a_document_that_went_missing_after_verification(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "progress.json").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"progress\.json is missing"):
        catalog.read_document(path, "progress")


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path, is_corrupt: bool) -> None:
    path = write(tmp_path, 1, size=4)
    if is_corrupt:
        (path / "model.safetensors").unlink()
    assert write(tmp_path, 1, size=5) == path
    catalog.verify(path)
    assert store.read(path).tensors["model"]["w"].numel() == 5
    assert hidden(tmp_path) == []


def test_the_earlier_one_counts_until_its_replacement_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 1, size=4)
    newest_paths: list[Path | None] = []
    rename = Path.rename

    def look_then_rename(source: Path, target: Path) -> Path:
        newest_paths.append(catalog.newest_valid(tmp_path).path)
        result = rename(source, target)
        newest_paths.append(catalog.newest_valid(tmp_path).path)
        return result

    monkeypatch.setattr(Path, "rename", look_then_rename)
    write(tmp_path, 1, size=5)
    aside = tmp_path / ".step-00000001.replaced"
    assert newest_paths == [path, aside, aside, path]


def test_leftovers_of_a_killed_process_go_at_the_next_write(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    for name in (".step-00000002.partial", ".step-00000000.removed", ".step-00000001.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "junk").write_text("x")
    (tmp_path / ".mine").mkdir()
    assert catalog.newest_valid(tmp_path).path == path
    write(tmp_path, 3)
    assert hidden(tmp_path) == [".mine"]
    assert catalog.list_steps(tmp_path) == [1, 3]


def test_one_that_was_moved_aside_and_never_replaced_gets_its_name_back(tmp_path: Path) -> None:
    write(tmp_path, 1).rename(tmp_path / ".step-00000001.replaced")
    assert catalog.newest_valid(tmp_path).path == tmp_path / ".step-00000001.replaced"
    write(tmp_path, 2)
    catalog.verify(tmp_path / "step-00000001")
    assert hidden(tmp_path) == []


def test_everything_is_flushed_before_the_rename_and_the_root_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync = os.fsync
    rename = Path.rename

    def record_fsync(descriptor: int) -> None:
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_rename(source: Path, target: Path) -> Path:
        calls.append(f"{source.name} -> {target.name}")
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "rename", record_rename)
    root = tmp_path / "new" / "root"
    write(root, 1)
    assert calls == [
        tmp_path.name,
        "new",
        "model.safetensors",
        "optimizer.safetensors",
        "progress.json",
        "manifest.json",
        ".step-00000001.partial",
        ".step-00000001.partial -> step-00000001",
        "root",
    ]


def test_a_failure_that_is_not_the_disk_s_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write(tmp_path, 1, size=4)
    with pytest.raises(TypeError, match="JSON"):
        store.write(tmp_path, 1, tensors={}, documents={"progress": object()}, metrics={})
    broken: Any = {"loss": "high"}
    with pytest.raises(ValueError, match="high"):
        store.write(tmp_path, 1, tensors={}, documents={}, metrics=broken)
    assert hidden(tmp_path) == []
    assert catalog.newest_valid(tmp_path).path == path


def test_interrupted_between_the_renames_the_earlier_one_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 1, size=4)
    rename = Path.rename

    def interrupt(source: Path, target: Path) -> Path:
        if source.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1, size=5)
    assert hidden(tmp_path) == []
    assert store.read(path).tensors["model"]["w"].numel() == 4


def test_remove_takes_the_valid_name_away_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 1)
    states: list[bool] = []
    delete = store.delete_folder
    monkeypatch.setattr(
        store, "delete_folder", lambda folder: (states.append(path.exists()), delete(folder))
    )
    store.remove(path)
    assert states == [True, False]
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_checkpoint_elsewhere_is_replaced_and_the_original_stays(
    tmp_path: Path,
) -> None:
    original = write(tmp_path / "elsewhere", 1, size=4)
    root = tmp_path / "root"
    root.mkdir()
    (root / "step-00000001").symlink_to(original)
    assert catalog.newest_valid(root).path == root / "step-00000001"
    write(root, 1, size=5)
    catalog.verify(original)
    assert store.read(root / "step-00000001").tensors["model"]["w"].numel() == 5
    assert hidden(root) == []


def test_removing_what_is_not_there_reports_it(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"step-00000001 could not be removed: No such file or directory"
    ):
        store.remove(tmp_path / "step-00000001")


@pytest.mark.parametrize("num_cores", [2, 16])
def test_a_large_file_is_hashed_while_it_is_written(
    tmp_path: Path, num_cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, by one thread or by several: the record is that of the whole."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cores)))
    chunks = [
        b"head",
        memoryview(os.urandom((17 << 20) + 5)),
        b"",
        memoryview(os.urandom(1 << 20)),
        b"tail",
    ]
    record = store.write_file(tmp_path / "file", chunks)
    written = (tmp_path / "file").read_bytes()
    assert written == b"".join(chunks)
    assert record == manifest.FileRecord(len(written), blake3(written).hexdigest())
    assert catalog.checksum_of(tmp_path / "file") == record.blake3
