"""The mirror of a run folder in a real S3 endpoint (moto over HTTP), and behind a proxy that is
slow or fails."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.base.errors import CheckpointError, UsageError
from drumline.checkpoint import mirror, store
from drumline.checkpoint.mirror import Mirror, restore_run
from drumline.checkpoint.mirrored_run import MARKER, MirroredRun, object_name
from drumline.checkpoint.retention import Retention
from drumline.runs import catalog
from drumline.storage import backends, object_store
from drumline.storage.backends import StoreError
from drumline.storage.object_store import open_store
from tests.ranks import server_context
from tests.store_server import Bucket, Proxy, environment, use_endpoint

LIMIT_S = 60.0
PARTS = ("model.safetensors", "optimizer.safetensors", "progress.json")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(mirror, "FIRST_PAUSE_S", 0.2)
    monkeypatch.setattr(mirror, "PROGRESS_S", 0.2)
    caplog.set_level(logging.WARNING)


class Folder:
    """A run folder that is saved to and mirrored, as the saver of a run does it."""

    def __init__(self, url: str, folder: Path, *, keep_last: int = 2, keep_best: int = 0) -> None:
        self.path = folder
        self.root = folder / "checkpoints"
        self.notes = list[str]()
        self.newest = list[int]()
        self.marks: list[int] = []
        self.root.mkdir(parents=True, exist_ok=True)
        self.run = MirroredRun(open_store(url))
        self.mirror = Mirror(
            self.run,
            folder,
            retention=Retention(keep_last, keep_best, "loss", higher_is_better=False),
            note=self.notes.append,
            mirrored=self.newest.append,
            alive=lambda: self.marks.append(0),
        )

    def save(
        self, step: int, *, value: float | None = None, size: int = 4, **metrics: float
    ) -> Path:
        path = write(self.root, step, value=value, size=size, **metrics)
        self.mirror.saved(path)
        return path

    def close(self, limit_s: float = LIMIT_S) -> None:
        self.mirror.close(limit_s)

    @property
    def steps(self) -> list[int]:
        return catalog.list_steps(self.root)

    @property
    def mirrored(self) -> list[int]:
        return sorted(self.run.checkpoints().complete)


def write(
    root: Path, step: int, *, value: float | None = None, size: int = 4, **metrics: float
) -> Path:
    weights = torch.full((size,), float(step if value is None else value))
    tensors = {"model": {"w": weights}, "optimizer": {"m": weights}}
    progress = {"step": step, "cursor": {"epoch": 0, "position": step}}
    return store.write(
        root, step, tensors=tensors, documents={"progress": progress}, metrics=metrics
    )


def wait_until(is_done: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Uploads


def test_a_save_is_mirrored_with_the_manifest_last(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "events").mkdir(parents=True)
    (tmp_path / "run" / "events" / "rank-00000.jsonl").write_text('{"kind":"start"}\n{"kind":"tr')
    (tmp_path / "run" / "config.toml").write_text("x = 1\n")
    with Proxy(bucket.server) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path / "run")
        path = folder.save(7)
        folder.close()
    for file in path.iterdir():
        assert bucket.read(f"runs/a/checkpoints/step-00000007/{file.name}") == file.read_bytes()
    put = [path.rpartition("/")[2] for method, path in proxy.requests if method == "PUT"]
    assert put[0] == "mirror.json"
    assert set(put[1:4]) == set(PARTS)
    assert put[4:] == ["rank-00000.jsonl", "config.toml", "manifest.json"]
    events = bucket.read("runs/a/events/rank-00000.jsonl")
    assert events == b'{"kind":"start"}\n'  # complete lines
    assert "runs/a/config.toml" in bucket.sizes()
    assert f"mirrored step 7 to {bucket.url}" in [note.partition(" (")[0] for note in folder.notes]


@pytest.mark.soak
def test_a_file_that_grows_is_uploaded_in_pieces_and_restored(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that one of any size takes little memory, and each save uploads the end of it only."""
    monkeypatch.setattr(mirror, "PIECE_BYTES", 10)
    events = tmp_path / "a" / "events" / "rank-00000.jsonl"
    events.parent.mkdir(parents=True)
    with Proxy(bucket.server) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path / "a")
        put = []
        # In the second the line that is being written begins in the piece before.
        contents = [
            "1234\n67\n9",
            "1234\n67\n90123",
            "1234\n67\n90123\n" + "56\n" * 8,
            "1234\n67\n90123\n" + "56\n" * 9,
        ]
        for step, content in enumerate(contents, 1):
            proxy.requests.clear()
            events.write_text(content)
            folder.save(step)
            folder.mirror.finish(LIMIT_S)
            put.append(
                [
                    path[-5:]
                    for method, path in proxy.requests
                    if method == "PUT" and "events" in path
                ]
            )
            restore_run(folder.run, tmp_path / str(step))
            whole = {1: 8, 2: 10}.get(step, len(content))
            assert (tmp_path / str(step) / "events" / events.name).read_text() == content[:whole]
        folder.close()
    assert put == [["jsonl"], ["jsonl", "00001"], ["00001", "00002", "00003"], ["00003", "00004"]]


def test_a_host_that_is_lost_after_an_upload_leaves_the_ledger_of_its_steps(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(method: str, path: str) -> int | None:
        """Once the manifest is in the store."""
        return (
            503 if any(path.endswith("manifest.json") for _, path in proxy.requests[:-1]) else None
        )

    with Proxy(bucket.server, lose) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path / "a")
        (folder.path / "ledger.jsonl").write_text("1\n2\n")
        folder.save(2)
        wait_until(lambda: folder.mirror._failure)
        folder.close(0.1)
    use_endpoint(monkeypatch, bucket.server)
    assert restore_run(MirroredRun(open_store(bucket.url)), tmp_path / "b")[0].startswith(
        "restored step 2 "
    )
    assert (tmp_path / "b" / "ledger.jsonl").read_text() == "1\n2\n"


def test_the_ledger_in_the_store_is_never_ahead_of_the_events(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run takes a step, and saves, while the events are being uploaded."""
    files = [tmp_path / "events" / "rank-00000.jsonl", tmp_path / "ledger.jsonl"]
    contents = list[bytes]()

    def train(method: str, path: str) -> None:
        if method == "PUT" and "/events/" in path and not contents:
            for file in files:
                file.write_text("1\n2\n")
        if method == "PUT" and path.endswith("manifest.json"):
            contents.extend(bucket.read(f"runs/a/{file.relative_to(tmp_path)}") for file in files)

    with Proxy(bucket.server, train) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path)
        files[0].parent.mkdir()
        for file in files:
            file.write_text("1\n")
        folder.save(1)
        folder.close()
    assert contents == [b"1\n", b"1\n"]
    assert bucket.read("runs/a/ledger.jsonl") == b"1\n2\n"


def test_when_saves_pile_up_the_newest_is_next(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT" and "step-" in path:
            gate.wait(LIMIT_S)

    with Proxy(bucket.server, hold) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path)
        folder.save(1)
        wait_until(
            lambda: any(
                "step-00000001" in path for method, path in proxy.requests if method == "PUT"
            )
        )
        for step in (2, 3, 4):
            folder.save(step)  # returns while the endpoint does not answer
        # nothing is removed before it, or a newer one, is in the store
        assert folder.steps == [1, 2, 3, 4]
        gate.set()
        folder.close()
        assert folder.steps == folder.mirrored == [3, 4]
        uploaded = [note.split()[2] for note in folder.notes if note.startswith("mirrored")]
        assert uploaded == ["1", "4", "3"]


def test_a_step_that_is_saved_again_replaces_the_earlier_one(
    bucket: Bucket, tmp_path: Path
) -> None:
    folder = Folder(bucket.url, tmp_path)
    folder.save(1, value=1.0)
    folder.mirror.finish(LIMIT_S)
    folder.save(1, value=2.0)
    folder.close()
    restored = tmp_path / "other"
    restore_run(folder.run, restored)
    assert torch.equal(
        store.read(restored / "checkpoints/step-00000001").tensors["model"]["w"],
        torch.full((4,), 2.0),
    )


def test_a_checkpoint_that_a_save_has_removed_meanwhile_is_not_reported(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reached = threading.Event()
    gate = threading.Event()

    def hold(method: str, path: str) -> None:
        """The listing for retention in the store."""
        is_listing = (method, path.strip("/")) == ("GET", bucket.name)
        if is_listing and any(
            path.endswith("manifest.json") for method, path in proxy.requests if method == "PUT"
        ):
            reached.set()
            gate.wait(LIMIT_S)

    with Proxy(bucket.server, hold) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path, keep_last=1)
        folder.save(1)
        assert reached.wait(LIMIT_S)
        folder.save(2)
        assert folder.steps == [2]  # the first is in the store
        gate.set()
        folder.close()
        assert folder.mirrored == [2]
    assert [record.getMessage() for record in caplog.records if record.name == "drumline"] == []


# Endpoints that fail


@pytest.mark.parametrize("fault", [503, 500, "close"])
def test_a_failing_endpoint_is_reported_once_and_tried_again(
    bucket: Bucket,
    fault: int | str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Proxy(bucket.server, lambda method, path: fault) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path, keep_last=1)
        for step in (1, 2, 3):
            folder.save(step)
        wait_until(lambda: len(proxy.requests) >= 3)
        assert folder.steps == [1, 2, 3]
        warnings = [record.getMessage() for record in caplog.records if record.name == "drumline"]
        assert len(warnings) == 1
        assert warnings[0].startswith(f"the mirror failed: {bucket.url}")
        assert "training continues, and checkpoints stay here until it works. Try: " in warnings[0]
        proxy.fault = lambda method, path: None
        folder.close()
        assert folder.steps == folder.mirrored == [3]
        assert f"the mirror {bucket.url} works again" in folder.notes


def test_a_local_checkpoint_stays_until_the_store_has_confirmed_the_manifest_of_a_newer_one(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(method: str, path: str) -> int | None:
        return 503 if method == "HEAD" and path.endswith("step-00000002/manifest.json") else None

    with Proxy(bucket.server, refuse) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path, keep_last=1)
        for step in (1, 2):
            folder.save(step)
        wait_until(
            lambda: any(path.endswith("step-00000002/manifest.json") for _, path in proxy.requests)
        )
        wait_until(lambda: folder.mirror._failure)
        assert folder.steps == [1, 2]
        proxy.fault = lambda method, path: None
        folder.close()
        assert folder.steps == folder.mirrored == [2]


def test_an_endpoint_that_is_slow_does_not_delay_a_save(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the end the run waits, reports how far it is, and after a limit what is not mirrored."""
    gate = threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("optimizer.safetensors"):
            gate.wait(LIMIT_S)

    with Proxy(bucket.server, hold) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path)
        folder.save(1)
        wait_until(
            lambda: any(path.endswith("optimizer.safetensors") for _, path in proxy.requests)
        )
        folder.mirror.finish(1.0)
        assert folder.marks  # for the watchdog
        assert folder.notes
        assert folder.notes[-1].startswith(f"waiting for the mirror {bucket.url}: step 1, ")
        assert (
            f"the checkpoint of step 1 is not in the mirror {bucket.url}: step 1, " in caplog.text
        )
        count = len(folder.notes)
        folder.close()  # does not wait again
        gate.set()
        wait_until(lambda: not folder.mirror._thread.is_alive())
        # another mirror of this run may have begun: it uploads all of it
        assert folder.mirrored == []
        # the files of a run that has ended are closed
        assert len(folder.notes) == count


def test_a_store_that_never_answers_holds_up_neither_the_start_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").mkdir()
    os.mkfifo(tmp_path / "store" / MARKER)  # who opens it waits for the other side
    url = f"file://{tmp_path}/store"
    run = MirroredRun(open_store(url))
    folder = Folder(url, tmp_path / "run")
    monkeypatch.setattr(backends, "ANSWER_S", 2.0)
    monkeypatch.setattr(object_store, "RETRY_AFTER_S", ())
    try:
        with pytest.raises(
            StoreError, match=rf"cannot be read: {url}/\S+ is unreachable: no answer for 2 s\n"
        ):
            restore_run(run, tmp_path / "empty")
        folder.save(1)
        folder.close(0.3)
        assert f"the checkpoint of step 1 is not in the mirror {url}: " in caplog.text
    finally:
        os.close(os.open(tmp_path / "store" / MARKER, os.O_RDWR | os.O_NONBLOCK))


def test_a_store_that_refuses_is_not_waited_for_and_the_next_start_uploads(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Proxy(bucket.server, lambda method, path: 403 if method == "PUT" else None) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        folder = Folder(bucket.url, tmp_path)
        for step in (1, 2):
            folder.save(step)
        folder.close(1e9)
    assert "Try: give this user or role the right s3:PutObject there" in caplog.text
    assert (
        f"the checkpoint of step 1 and 2 is not in the mirror {bucket.url}: access to {bucket.url}/"
        in caplog.text
    )
    use_endpoint(monkeypatch, bucket.server)
    again = Folder(bucket.url, tmp_path)
    again.mirror.start()
    again.close()
    assert again.mirrored == [1, 2]


def test_a_disk_that_fills_up_loses_no_checkpoint_that_is_not_mirrored(
    small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, bucket: Bucket
) -> None:
    """The save fails, as without a mirror. Once the store works again, there is room."""
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    folder = Folder(bucket.url, small_disk("size=2m") / "run", keep_last=1)

    def fill() -> None:
        for step in range(1, 9):
            folder.save(step, size=40_000)  # 320 kB each

    with pytest.raises(CheckpointError) as caught:
        fill()
    folder.close(0.1)
    last = folder.steps[-1]
    assert last >= 3
    assert folder.steps == list(range(1, last + 1))
    assert all(
        catalog.verify(folder.root / catalog.folder_name(step)).step == step
        for step in folder.steps
    )
    what = str(caught.value)
    assert what.startswith(
        f"the checkpoint {folder.root / catalog.folder_name(last + 1)} could not be saved: the disk"
    )
    assert (
        f"the last good checkpoint, {folder.root / catalog.folder_name(last)}, is untouched\n  try: free some"
        in what
    )
    use_endpoint(monkeypatch, bucket.server)
    again = Folder(bucket.url, folder.path, keep_last=1)
    again.mirror.start()
    again.mirror.finish(LIMIT_S)
    assert again.steps == again.mirrored == [last]
    again.save(last + 1, size=40_000)
    again.close()
    assert again.steps == again.mirrored == [last + 1]


# Retention


def test_retention_is_the_same_on_both_sides(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("runs/a/notes.txt", b"of the user")
    folder = Folder(bucket.url, tmp_path, keep_last=2, keep_best=1)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)):
        folder.save(step, loss=loss)
        folder.mirror.finish(LIMIT_S)
    folder.close()
    assert folder.steps == folder.mirrored == [2, 3, 4]
    names = {name.split("/")[3] for name in bucket.sizes() if "/checkpoints/" in name}
    assert names == {"step-00000002", "step-00000003", "step-00000004"}
    assert "runs/a/notes.txt" in bucket.sizes()


def test_what_the_mirror_did_not_make_is_not_deleted(bucket: Bucket, tmp_path: Path) -> None:
    """Objects and unfinished uploads of others, also below an address that they use, too."""
    foreign_names = [
        "checkpoints/epoch-3.pt",
        "checkpoints/step-5/model.pt",
        "checkpoints/step-00000009/notes/a.txt",
    ]
    for name in foreign_names:
        bucket.put(name, b"theirs")
    checkpoint_file = "checkpoints/step-00000001/model.safetensors"
    for key in ("other-job/model.pt", checkpoint_file):
        bucket.begin_upload(key)
    folder = Folder(bucket.root, tmp_path)
    folder.save(1)
    folder.close()
    assert folder.mirrored == [1]
    assert set(foreign_names) <= bucket.sizes().keys()
    assert bucket.unfinished() == ["other-job/model.pt"]


def test_the_best_in_the_mirror_stays_when_a_run_continues_elsewhere(
    bucket: Bucket, tmp_path: Path
) -> None:
    first = Folder(bucket.url, tmp_path / "a", keep_last=1, keep_best=1)
    for step, loss in ((1, 0.1), (2, 0.9)):
        first.save(step, loss=loss)
        first.mirror.finish(LIMIT_S)
    first.close()
    restore_run(first.run, tmp_path / "b")
    second = Folder(bucket.url, tmp_path / "b", keep_last=1, keep_best=1)
    assert second.steps == [2]
    second.save(3, loss=0.5)
    second.close()
    assert second.mirrored == [1, 3]


def test_the_mirror_of_another_run_is_refused(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Folder(bucket.url, tmp_path / "a")
    first.save(1)
    first.close()
    before = bucket.sizes()
    second_folder = Folder(bucket.url, tmp_path / "b")
    second_folder.save(9)
    second_folder.close()
    assert bucket.sizes() == before
    text = f"{bucket.url} has checkpoints, and they are not of the run in {tmp_path / 'b'}"
    assert text in caplog.text
    with pytest.raises(
        UsageError, match=f"{text}\n  try: give --checkpoint.mirror a prefix of its own, or resume"
    ):
        restore_run(second_folder.run, second_folder.path)


def test_a_run_that_has_continued_elsewhere_is_resumed_from_there(
    bucket: Bucket, tmp_path: Path
) -> None:
    """As when the node of rank 0 changes, and changes back. What the old folder holds is kept."""
    ledger = "ledger.jsonl"
    first = Folder(bucket.url, tmp_path / "a")
    (first.path / ledger).write_text("1\n")
    old = first.save(1)
    first.close()
    restore_run(first.run, tmp_path / "b")
    # nothing has happened there yet
    assert restore_run(first.run, first.path) == ("", [])
    second = Folder(bucket.url, tmp_path / "b")
    with (second.path / ledger).open("a") as file:
        file.write("2\n")
    second.save(2)
    second.close()
    assert restore_run(first.run, second.path) == ("", [])
    note, _ = restore_run(first.run, first.path)
    aside = next(first.path.glob("before-*"))
    assert note.startswith(f"restored step 2 from {bucket.url} in ")
    assert note.endswith(f": the run has continued elsewhere; what was here is in {aside}")
    assert (first.steps, (first.path / ledger).read_text()) == ([2], "1\n2\n")
    assert (catalog.list_steps(aside / "checkpoints"), (aside / ledger).read_text()) == ([1], "1\n")
    assert catalog.verify(aside / "checkpoints" / old.name).step == 1
    again = Folder(bucket.url, first.path)
    again.save(3)
    again.close()
    assert again.mirrored == [2, 3]
    # and once more
    assert restore_run(first.run, second.path)[0].startswith("restored step 3 ")


def test_two_that_have_continued_apart_are_not_mixed(bucket: Bucket, tmp_path: Path) -> None:
    first = Folder(bucket.url, tmp_path / "a")
    first.save(1)
    first.close()
    write(first.root, 5)  # its upload failed
    restore_run(first.run, tmp_path / "b")
    second = Folder(bucket.url, tmp_path / "b")
    second.save(2)
    second.close()
    with pytest.raises(UsageError) as caught:
        restore_run(first.run, first.path)
    assert str(caught.value) == (
        f"the run in {first.path} has continued elsewhere, up to step 2 in {bucket.url}; step 5 here is not there\n"
        "  try: move this folder away to resume from there, or continue from here with another --checkpoint.mirror"
    )
    assert first.steps == [1, 5]


def test_of_two_runs_that_start_with_one_mirror_the_later_has_it(
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The upload of the earlier one is on its way when the later one begins."""
    reached = threading.Event()
    gate = threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("optimizer.safetensors"):
            reached.set()
            gate.wait(LIMIT_S)

    with Proxy(bucket.server, hold) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        first = Folder(bucket.url, tmp_path / "a")
        first.save(7)
        assert reached.wait(LIMIT_S)
        use_endpoint(monkeypatch, bucket.server)
        second = Folder(bucket.url, tmp_path / "b")
        second.save(3)
        second.close()
        gate.set()
        first.close()
    assert second.mirrored == [3]
    assert (
        f"the mirror failed: {bucket.url} has become the mirror of another run folder; training continues"
        in caplog.text
    )
    assert (
        "Try: stop one of the two runs, or give one of them another --checkpoint.mirror"
        in caplog.text
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"ids": 3}'])
def test_a_marker_in_the_store_that_cannot_be_read_is_replaced(
    bucket: Bucket, tmp_path: Path, content: bytes
) -> None:
    bucket.put(f"runs/a/{MARKER}", content)
    folder = Folder(bucket.url, tmp_path)
    folder.save(1)
    folder.close()
    assert folder.mirrored == [1]
    run_id = json.loads((tmp_path / MARKER).read_text())["id"]
    assert json.loads(bucket.read(f"runs/a/{MARKER}")) == {"ids": [run_id]}


# Killed uploads


def upload(variables: dict[str, str], url: str, folder: Path) -> None:
    os.environ.update(variables)
    mirrored = Folder(url, folder)
    mirrored.save(2)
    mirrored.close()


def test_a_killed_upload_is_no_checkpoint_and_is_cleaned_up(bucket: Bucket, tmp_path: Path) -> None:
    """The process is killed by SIGKILL while its second object is on its way."""
    folder = Folder(bucket.url, tmp_path / "a")
    folder.save(1)
    folder.close()
    reached = threading.Event()
    killed = threading.Event()

    def hold(method: str, path: str) -> Any:
        if method == "PUT" and path.endswith("step-00000002/optimizer.safetensors"):
            reached.set()
            killed.wait(LIMIT_S)
            return "close"
        return None

    with Proxy(bucket.server, hold) as proxy:
        process = server_context.Process(
            target=upload, args=(environment(proxy.url), bucket.url, folder.path)
        )
        process.start()
        assert reached.wait(LIMIT_S)
        process.kill()
        process.join()
        killed.set()
    assert object_name(2, "model.safetensors") in folder.run.store.sizes()
    assert folder.mirrored == [1]
    assert restore_run(folder.run, tmp_path / "b")[0].startswith(
        f"restored step 1 from {bucket.url} in "
    )
    elsewhere = Folder(bucket.url, tmp_path / "b")  # the host with step 2 is gone
    elsewhere.save(3)
    elsewhere.close()
    names = {name.split("/")[1] for name in folder.run.store.sizes("checkpoints")}
    assert names == {"step-00000001", "step-00000003"}


# Restores


def test_an_empty_folder_is_restored_to_the_bit(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "a" / "events").mkdir(parents=True)
    (tmp_path / "a" / "events" / "rank-00000.jsonl").write_text('{"kind":"start"}\n')
    (tmp_path / "a" / "ledger.jsonl").write_text("{}\n")
    folder = Folder(bucket.url, tmp_path / "a")
    for step in (1, 2):
        path = folder.save(step)
    folder.close()
    note, skipped = restore_run(folder.run, tmp_path / "b")
    assert (note.partition(" in ")[0], skipped) == (f"restored step 2 from {bucket.url}", [])
    restored_path = tmp_path / "b" / "checkpoints" / path.name
    assert {file.name: file.read_bytes() for file in restored_path.iterdir()} == {
        file.name: file.read_bytes() for file in path.iterdir()
    }
    for record in ("ledger.jsonl", "events/rank-00000.jsonl"):
        assert (tmp_path / "b" / record).read_bytes() == (tmp_path / "a" / record).read_bytes()
    assert restore_run(folder.run, tmp_path / "b") == ("", [])  # now it has one


def corrupt(bucket: Bucket, key: str, content: bytes | None = None) -> None:
    if content is None:
        damaged = bytearray(bucket.read(key))
        damaged[-1] ^= 1
        content = bytes(damaged)
    bucket.put(key, content)


def test_a_corrupt_object_is_named_and_the_one_before_is_restored(
    bucket: Bucket, tmp_path: Path
) -> None:
    folder = Folder(bucket.url, tmp_path / "a", keep_last=4)
    for step in (1, 2, 3, 4):
        folder.save(step)
    folder.close()
    corrupt(bucket, "runs/a/checkpoints/step-00000002/model.safetensors")
    bucket.delete("runs/a/checkpoints/step-00000003/model.safetensors")
    corrupt(bucket, "runs/a/checkpoints/step-00000004/manifest.json", b"{}")
    note, skipped = restore_run(folder.run, tmp_path / "b")
    assert note.startswith("restored step 1 from")
    assert (
        catalog.newest_valid(tmp_path / "b" / "checkpoints").path
        == tmp_path / "b/checkpoints/step-00000001"
    )
    url = bucket.url
    assert skipped == [
        f"step 4 of {url} was skipped: manifest.json: its digest differs from its content",
        f"step 3 of {url} was skipped: there is no object {url}/checkpoints/step-00000003/model.safetensors",
        f"step 2 of {url} was skipped: {url}/checkpoints/step-00000002/model.safetensors is corrupt: its checksum "
        "differs from the one that was recorded",
    ]
    corrupt(bucket, "runs/a/checkpoints/step-00000001/progress.json", b"[]")
    with pytest.raises(
        CheckpointError, match=rf"no checkpoint in {bucket.url} can be restored\n  - step 4 of "
    ) as caught:
        restore_run(folder.run, tmp_path / "c")
    assert (
        "try: restore one from a backup, or start a new run with another --checkpoint.mirror"
        in str(caught.value)
    )


def test_a_manifest_that_is_too_large_is_skipped(bucket: Bucket, tmp_path: Path) -> None:
    folder = Folder(bucket.url, tmp_path / "a")
    for step in (1, 2):
        folder.save(step)
    folder.close()
    bucket.put("runs/a/checkpoints/step-00000002/manifest.json", bytes(9 << 20))
    note, skipped = restore_run(folder.run, tmp_path / "b")
    assert note.startswith("restored step 1 ")
    assert len(skipped) == 1
    assert skipped[0].endswith("/manifest.json is corrupt: it has more than 8,388,608 bytes")


def test_one_that_is_not_finite_is_restored_only_if_no_other_is(
    bucket: Bucket, tmp_path: Path
) -> None:
    folder = Folder(bucket.url, tmp_path / "a", keep_last=4)
    write(folder.root, 1)
    tensors = {"model": {"w": torch.ones(1)}}
    path = store.write(
        folder.root, 2, tensors=tensors, documents={}, metrics={"loss": 0.1}, non_finite="model/w"
    )
    folder.mirror.saved(path)
    folder.close()
    assert folder.mirrored == [1, 2]
    assert restore_run(folder.run, tmp_path / "b")[0].startswith("restored step 1 ")


def test_a_full_disk_leaves_nothing_of_a_restore(
    bucket: Bucket, small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "ledger.jsonl").write_text("{}\n")
    folder = Folder(bucket.url, tmp_path)
    folder.save(1, size=400_000)
    folder.close()
    small_folder = small_disk("size=1m") / "run"
    with pytest.raises(CheckpointError) as caught:
        restore_run(folder.run, small_folder)
    root = small_folder / "checkpoints"
    assert str(caught.value).startswith(
        f"step 1 of {bucket.url} could not be restored to {root}: the disk is full (3.2 MB needed, "
    )
    assert f"try: free some space on the disk of {root}" in str(caught.value)
    assert [
        path for path in small_folder.rglob("*") if path.is_file() and path.name != "mirror.json"
    ] == []
    assert list(root.iterdir()) == []


def test_a_mirror_that_cannot_be_read_stops_a_start_without_a_checkpoint_only(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    run = MirroredRun(open_store(bucket.url))
    with pytest.raises(StoreError) as caught:
        restore_run(run, tmp_path)
    assert str(caught.value) == (
        f"the mirror may have a checkpoint to resume from, but cannot be read: {bucket.url}/checkpoints is "
        "unreachable: the connection failed or was cut (127.0.0.1)\n"
        "  try: check the network, a proxy and AWS_ENDPOINT_URL"
    )
    write(tmp_path / "checkpoints", 1)
    assert restore_run(run, tmp_path) == ("", [])
