"""`--data.dir s3://...` on a real S3 endpoint (moto over HTTP): fetched once, checked at every
start, complete or not used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="pip install 'drumline[dev]' brings it")

from drumline.base.errors import DataError, UsageError
from drumline.data import bucket_copy
from drumline.data.bucket_copy import BucketCopy
from drumline.storage.backends import StoreError
from drumline.storage.object_store import ObjectStore
from tests.multinode.needs import missing
from tests.store_server import Bucket, Proxy, environment, use_endpoint

CONTENT = {
    "train/0/a.png": b"a" * 100,
    "train/1/b.png": b"b" * 200,
    "eval/0/c.png": b"",
    "labels": b"0 1",
}


@pytest.fixture(name="url")
def fill_bucket(bucket: Bucket) -> str:
    for name, content in CONTENT.items():
        bucket.put(f"digits/{name}", content)
    bucket.put("digits-other/x", b"x")
    return f"{bucket.root}/digits"


@pytest.fixture(name="proxy")
def make_proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(bucket.server) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        yield proxy


def copy(url: str, tmp_path: Path, **options: Any) -> BucketCopy:
    return BucketCopy(url=url, cache=tmp_path / "cache", **options)


def files(local_copy: BucketCopy) -> dict[str, bytes]:
    paths = (path for path in local_copy.folder.rglob("*") if path.is_file())
    return {str(path.relative_to(local_copy.folder)): path.read_bytes() for path in paths}


def fetched(proxy: Proxy) -> list[str]:
    """The objects that were asked for since the last call."""
    names = [path.partition("/digits/")[2] for method, path in proxy.requests if method == "GET"]
    proxy.requests.clear()
    return sorted(name for name in names if name)


@pytest.mark.parametrize("num_submitted", [1, 3, 4, 5])
def test_data_is_copied_once(
    proxy: Proxy, url: str, tmp_path: Path, num_submitted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_copy, "NUM_SUBMITTED", num_submitted)
    messages: list[str] = []
    local_copy = copy(url, tmp_path, report=messages.append)
    local_copy.update()
    assert files(local_copy) == CONTENT
    assert messages == [f"copying 303 B (4 objects) from {url} to {local_copy.folder}"]
    assert fetched(proxy) == sorted(CONTENT)
    copy(url, tmp_path, report=messages.append).update()
    assert fetched(proxy) == []
    assert len(messages) == 1


def test_what_changed_is_fetched_again_and_what_is_gone_is_removed(
    bucket: Bucket, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    local_copy = copy(url, tmp_path)
    local_copy.update()
    bucket.put("digits/labels", b"1 0")  # of the same size
    bucket.put("digits/train/1/d.png", b"d")
    bucket.delete("digits/eval/0/c.png")
    # of the same size too
    (local_copy.folder / "train/0/a.png").write_bytes(b"x" * 100)
    (local_copy.folder / "train/0/.a.png.partial").touch()
    os.utime(local_copy.folder / "train/1/b.png", (5, 5))  # other times, the same bytes
    fetched(proxy)
    local_copy.update()
    assert fetched(proxy) == ["labels", "train/0/a.png", "train/1/d.png"]
    expected = {**CONTENT, "labels": b"1 0", "train/1/d.png": b"d"}
    assert files(local_copy) == {
        name: content for name, content in expected.items() if name != "eval/0/c.png"
    }
    assert not (local_copy.folder / "eval").exists()
    local_copy.update()
    assert fetched(proxy) == []


def test_an_interrupted_copy_continues(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_copy, "NUM_THREADS", 1)
    proxy.fault = lambda method, path: "cut" if path.endswith("b.png") else None
    local_copy = copy(url, tmp_path)
    with pytest.raises(
        StoreError, match=f"{url}/train/1/b.png is unreachable: the connection failed or was cut"
    ):
        local_copy.update()
    assert not (local_copy.folder / "train/1/b.png").exists()
    first = set(fetched(proxy)) - {"train/1/b.png"}
    assert first, "nothing came before the fault"
    proxy.fault = lambda method, path: None
    local_copy.update()
    assert files(local_copy) == CONTENT
    assert set(fetched(proxy)) == CONTENT.keys() - first


def test_an_interrupted_download_is_not_taken_for_a_complete_one(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while an object is on its way, which arrives after it."""
    monkeypatch.setattr(bucket_copy, "POLL_S", 0.05)
    begun = threading.Event()
    go_on = threading.Event()

    def hold(method: str, path: str) -> None:
        if path.endswith("b.png"):
            begun.set()
            go_on.wait(60)

    def stop(
        store: ObjectStore, original: Callable[[ObjectStore], None] = ObjectStore.stop
    ) -> None:
        original(store)
        go_on.set()

    proxy.fault = hold
    monkeypatch.setattr(ObjectStore, "stop", stop)
    local_copy = copy(
        url, tmp_path, alive=lambda: begun.is_set() and signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        local_copy.update()
    assert "train/1/b.png" not in files(local_copy)
    assert "train/1/b.png" not in json.loads((local_copy.folder.parent / "record.json").read_text())
    assert all(CONTENT[name] == content for name, content in files(local_copy).items())
    fetched(proxy)
    copy(url, tmp_path).update()
    assert files(local_copy) == CONTENT
    assert "train/1/b.png" in fetched(proxy)


@pytest.mark.parametrize("record", ["", "[]", '{"labels": 3}', "\ufffd"])
def test_a_record_that_cannot_be_read_fetches_everything(
    proxy: Proxy, url: str, tmp_path: Path, record: str
) -> None:
    local_copy = copy(url, tmp_path)
    local_copy.update()
    (local_copy.folder.parent / "record.json").write_text(record)
    fetched(proxy)
    local_copy.update()
    assert fetched(proxy) == sorted(CONTENT)


def test_two_jobs_on_a_machine_copy_one_after_the_other(
    proxy: Proxy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_copy, "POLL_S", 0.05)
    begun = threading.Event()
    go_on = threading.Event()

    def hold(method: str, path: str) -> None:
        if path.endswith("labels"):
            begun.set()
            go_on.wait(60)

    proxy.fault = hold
    first = threading.Thread(target=copy(url, tmp_path).update)
    first.start()
    assert begun.wait(60)
    marks: list[str] = []

    def alive() -> None:
        marks.append("alive")
        go_on.set()

    second = copy(url, tmp_path, report=marks.append, alive=alive)
    second.update()
    first.join()
    assert marks[:2] == [f"waiting for another process that copies {url} on this machine", "alive"]
    assert fetched(proxy) == sorted(CONTENT), "something was fetched twice"
    assert files(second) == CONTENT


def test_refusals(bucket: Bucket, url: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        BucketCopy(url="s3://no-such/digits", cache=tmp_path).update()
    assert (error.value.what, error.value.next_step) == (
        "data.dir: there is no bucket no-such",
        "correct the name, or make it: aws s3 mb s3://no-such",
    )
    (tmp_path / "points.npy").write_bytes(b"x")
    for empty_url in (
        f"{bucket.root}/digit",
        f"{url}/labels",
        f"file://{tmp_path}/points.npy",
    ):  # the last two: an object
        with pytest.raises(DataError) as error:
            BucketCopy(url=empty_url, cache=tmp_path).update()
        assert (error.value.what, error.value.next_step) == (
            f"data.dir: there are no objects below {empty_url}/",
            "name the folder that holds the data, as in s3://bucket/folder: a single object is not copied",
        )
    with pytest.raises(UsageError, match="s3:// names no bucket"):
        BucketCopy(url="s3://", cache=tmp_path).update()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot be copied to .*: .*\n?.*"):
        BucketCopy(url=url, cache=tmp_path / "file").update()


# On a disk of its own: tmpfs in a mount namespace.
FULL = """
import sys
from pathlib import Path
from drumline.data.bucket_copy import BucketCopy
from drumline.base.errors import DataError
try:
    BucketCopy(url=sys.argv[1], cache=Path(sys.argv[2])).update()
except DataError as error:
    print(error.what, error.next_step, sep="\\n")
"""


def test_data_that_does_not_fit_is_refused_before_it_is_fetched(
    bucket: Bucket, url: str, tmp_path: Path
) -> None:
    if why := missing():
        pytest.skip(why)
    bucket.put("digits/large", bytes(2 << 20))
    script = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "bash",
        "-c",
        script,
        "bash",
        sys.executable,
        "-c",
        FULL,
        url,
        str(tmp_path),
    ]
    variables = {**os.environ, **environment(bucket.server)}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    what, step = done.stdout.splitlines()
    assert what.startswith(
        f"data.dir: 2.1 MB (5 objects) of {url} do not fit into {tmp_path}/{bucket.name}-digits-"
    )
    assert what.endswith(" are free there")
    assert step == "free some space, or give a folder on a larger disk with --data.cache"
