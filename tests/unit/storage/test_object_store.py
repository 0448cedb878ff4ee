"""Objects in a real S3 endpoint (moto over HTTP), and in fsspec's own stores."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from blake3 import blake3

from drumline.base.errors import UsageError
from drumline.storage import backends, object_store
from drumline.storage.backends import PIECE_BYTES, StoreError
from drumline.storage.object_store import ObjectStore, is_store_url, open_store
from tests.store_server import Bucket, Proxy, use_endpoint

CONTENT = bytes(range(256)) * 40


@pytest.fixture(params=["s3", "file", "memory"], name="store")
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        return open_store(f"{request.getfixturevalue('bucket').url}/")
    return open_store(f"{request.param}://{tmp_path}/store")


def test_objects_are_put_listed_read_and_deleted(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(CONTENT)
    store.put("steps/1/weights", tmp_path / "weights")
    store.put("steps/1/manifest", b"{}")
    store.put("steps-other", b"x")
    assert store.sizes() == {
        "steps/1/weights": len(CONTENT),
        "steps/1/manifest": 2,
        "steps-other": 1,
    }
    assert store.sizes("steps") == {"steps/1/weights": len(CONTENT), "steps/1/manifest": 2}
    assert store.sizes("nothing") == {}
    assert store.read("steps/1/manifest") == b"{}"
    store.put("steps/1/manifest", b"new")
    assert store.read("steps/1/manifest") == b"new"
    store.delete(["steps/1/manifest", "steps/1/absent", "steps-other"])
    store.delete_unfinished()
    assert list(store.sizes()) == ["steps/1/weights"]


def test_a_file_appears_when_it_is_complete_and_as_recorded(
    store: ObjectStore, tmp_path: Path
) -> None:
    store.put("weights", CONTENT)
    to = tmp_path / "to" / "weights"
    checksum = blake3(CONTENT).hexdigest()
    to.parent.mkdir()
    with pytest.raises(
        StoreError, match=rf"{store}/weights is corrupt: its checksum differs .*\n  try: upload it"
    ):
        store.fetch("weights", to, size=len(CONTENT), checksum="0" * 64)
    with pytest.raises(StoreError, match="is corrupt: it has more than 7 bytes"):
        store.fetch("weights", to, size=7)
    with pytest.raises(StoreError, match=rf"there is no object {store}/absent") as caught:
        store.fetch("absent", to)
    assert caught.value.kind == "missing"
    assert list(to.parent.iterdir()) == []
    store.fetch("weights", to, size=len(CONTENT), checksum=checksum)
    assert to.read_bytes() == CONTENT
    assert list(to.parent.iterdir()) == [to]


def test_what_the_store_holds_is_compared_with_the_checksum(store: ObjectStore) -> None:
    store.put("weights", CONTENT)
    store.check("weights", size=len(CONTENT), checksum=blake3(CONTENT).hexdigest())
    with pytest.raises(StoreError, match="is corrupt: it has more than 7 bytes"):
        store.check("weights", size=7, checksum="")
    with pytest.raises(StoreError, match="there is no object"):
        store.check("absent", size=7, checksum="")


def test_a_checksum_that_this_client_did_not_send_proves_nothing(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 computes one itself for whatever arrives without."""
    bucket.client.put_object(
        Bucket=bucket.name, Key="weights", Body=CONTENT, ChecksumAlgorithm="CRC32"
    )
    open_store(bucket.root).check("weights", size=len(CONTENT), checksum="0" * 64)
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    with pytest.raises(StoreError, match="its checksum differs"):
        open_store(bucket.root).check("weights", size=len(CONTENT), checksum="0" * 64)


def test_in_a_folder_an_object_is_replaced_when_the_next_is_complete(tmp_path: Path) -> None:
    """A process that is killed meanwhile leaves the earlier one."""
    store = open_store(f"file://{tmp_path}/store")
    pipe = tmp_path / "pipe"
    store.put("ledger", b"earlier")
    os.mkfifo(pipe)
    upload = threading.Thread(target=store.put, args=("ledger", pipe))
    upload.start()
    with pipe.open("wb") as file:
        # until the second piece is being read
        file.write(bytes(PIECE_BYTES + (1 << 20)))
        assert store.read("ledger") == b"earlier"
    upload.join()
    assert store.sizes() == {"ledger": PIECE_BYTES + (1 << 20)}


def test_a_large_object_is_uploaded_in_parts_and_a_killed_upload_is_cleaned_up(
    bucket: Bucket, tmp_path: Path
) -> None:
    store = open_store(bucket.url)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(70 << 20)
    store.put("large", tmp_path / "large")
    assert bucket.sizes() == {"runs/a/large": 70 << 20}
    for key in ("runs/a/killed", "runs/another/one"):
        bucket.begin_upload(key)
    store.delete_unfinished()
    assert bucket.unfinished() == ["runs/another/one"]


def test_a_name_that_leads_out_of_a_folder_is_not_listed(bucket: Bucket) -> None:
    for key in ("runs/a/../../etc/passwd", "runs/a//x", "runs/a/folder/", "runs/a/good"):
        bucket.put(key, b"")
    assert open_store(bucket.url).sizes() == {"good": 0}


def test_a_document_that_is_too_large_is_not_read(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("manifest", CONTENT)
    monkeypatch.setattr(object_store, "DOCUMENT_BYTES", 100)
    with pytest.raises(StoreError, match="is corrupt: it has more than 100 bytes"):
        store.read("manifest")


# Failures: each is a sentence with what to do, and holds no secret


def failure(store: ObjectStore) -> StoreError:
    with pytest.raises(StoreError) as caught:
        store.put("weights", b"x")
    assert_no_secret(caught.value)
    return caught.value


def assert_no_secret(error: StoreError) -> None:
    """Nor in its traceback, which a rank writes to its log."""
    text = "".join(traceback.format_exception(error))
    assert "test-secret" not in text
    assert "test-key-id" not in text


def test_no_such_bucket(bucket: Bucket) -> None:
    error = failure(open_store("s3://absent/runs"))
    assert str(error) == (
        "there is no bucket absent\n  try: correct the name, or make it: aws s3 mb s3://absent"
    )
    assert (error.kind, error.may_pass) == ("missing", False)


def test_no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    error = failure(open_store(bucket.root))
    assert str(error) == (
        f"no usable AWS credentials for {bucket.root}/weights (NoCredentialsError)\n"
        "  try: run aws configure or aws sso login, or give the instance a role"
    )
    assert error.kind == "credentials"


def test_an_endpoint_with_a_password_is_not_shown(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:test-secret@127.0.0.1:9")
    assert failure(open_store(bucket.root)).kind == "unreachable"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "user:test-secret@127.0.0.1:9")
    with pytest.raises(StoreError) as caught:
        open_store(bucket.root)
    assert (
        str(caught.value)
        == f"{bucket.root}: boto3 does not accept its settings\n  try: correct AWS_ENDPOINT_URL"
    )
    assert_no_secret(caught.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "ftp://user:test-secret@127.0.0.1:9")
    assert str(failure(open_store(bucket.root))) == (
        f"{bucket.root}/weights: Custom endpoint `ftp://***@127.0.0.1:9` was not a valid URI\n"
        "  try: correct AWS_ENDPOINT_URL"
    )


def test_a_signed_address_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("GET https://store/weights?signature=test-secret")

    store = open_store(f"memory://{tmp_path}")
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.open", fail)
    assert str(failure(store)).startswith(f"{store}/weights is unreachable: ConnectionError\n")


def test_a_profile_that_does_not_exist(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "absent")
    with pytest.raises(
        StoreError, match=rf"no usable AWS credentials for {bucket.root} \(ProfileNotFound\)"
    ):
        open_store(f"{bucket.root}/runs")


ANSWERS = {
    403: (
        "denied",
        "access to URL/weights was denied\n  try: give this user or role the right s3:PutObject",
    ),
    500: ("busy", r"URL/weights: S3 answered 500 (500) to 2 attempts" "\n  try: try again later"),
    503: ("busy", r"URL/weights: S3 answered 503 (503) to 2 attempts" "\n  try: try again later"),
    400: ("other", "S3 refused s3:PutObject for URL/weights: "),
}


@pytest.mark.parametrize("status", ANSWERS)
def test_refusals(bucket: Bucket, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "MAX_ATTEMPTS", 2)
    with Proxy(bucket.server, lambda method, path: status) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        error = failure(open_store(bucket.root))
    kind, text = ANSWERS[status]
    assert (error.kind, text.replace("URL", bucket.root) in str(error)) == (kind, True), str(error)
    assert len(proxy.requests) == (2 if kind == "busy" else 1)


def test_an_endpoint_that_refuses_or_does_not_answer(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "READ_TIMEOUT_S", 0.2)
    with Proxy(bucket.server, lambda method, path: 1.0) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        error = failure(open_store(bucket.root))
        assert str(error) == (
            f"{bucket.root}/weights is unreachable: timed out (127.0.0.1)\n"
            "  try: check the network, a proxy and AWS_ENDPOINT_URL"
        )
        assert (error.kind, error.may_pass) == ("unreachable", True)
    error = failure(open_store(bucket.root))
    assert "is unreachable: the connection failed or was cut (127.0.0.1)" in str(error)
    use_endpoint(monkeypatch, bucket.server.replace("http:", "https:"))
    assert "is unreachable: TLS failed (127.0.0.1)" in str(failure(open_store(bucket.root)))


@pytest.mark.parametrize("fault", ["close", "cut", 503])
def test_a_fetch_is_repeated_after_a_cut_connection(
    bucket: Bucket, fault: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(bucket.root).put("weights", CONTENT)
    with Proxy(bucket.server) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        proxy.fault = lambda method, path: fault if len(proxy.requests) == 1 else None
        checksum = blake3(CONTENT).hexdigest()
        open_store(bucket.root).fetch("weights", tmp_path / "weights", checksum=checksum)
        assert (tmp_path / "weights").read_bytes() == CONTENT
        assert len(proxy.requests) == 2
        for read in (
            ObjectStore.read,
            partial(ObjectStore.check, size=len(CONTENT), checksum=checksum, reads_all=True),
        ):
            proxy.requests.clear()
            assert read(open_store(bucket.root), "weights") in (None, CONTENT)
            assert len(proxy.requests) == 2
        proxy.fault = lambda method, path: fault
        with pytest.raises(StoreError):
            open_store(bucket.root).fetch("weights", tmp_path / "again", checksum=checksum)
        assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_what_is_stopped_is_not_repeated(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(bucket.server, lambda method, path: 503) as proxy:
        use_endpoint(monkeypatch, proxy.url)
        store = open_store(bucket.root)
        store.stop()
        with pytest.raises(StoreError, match="S3 answered 503"):
            store.fetch("weights", tmp_path / "weights")
    assert len(proxy.requests) == 1


@pytest.mark.parametrize(
    ("code", "status", "kind", "text"),
    [
        (
            "RequestTimeout",
            400,
            "busy",
            "S3 answered 400 (RequestTimeout) to 1 attempts\n  try: try again later",
        ),
        ("InvalidToken", 400, "credentials", "(InvalidToken)\n  try: renew them: aws configure"),
        ("AllAccessDisabled", 403, "denied", "access to WHERE was denied\n  try: give this user"),
        (
            "AuthorizationHeaderMalformed",
            400,
            "other",
            "is in another region\n  try: set AWS_REGION to the bucket's",
        ),
        (
            "RequestTimeTooSkewed",
            403,
            "other",
            "the clock of this machine is wrong, and S3 refuses WHERE\n  try: set it",
        ),
    ],
)
def test_codes_of_s3(bucket: Bucket, code: str, status: int, kind: str, text: str) -> None:
    from botocore.exceptions import ClientError

    answer = {
        "Error": {"Code": code, "Message": "m"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error = backends.S3Backend(bucket.name, "").explain(
        ClientError(answer, "PutObject"), "s3://b/x"
    )
    assert (error.kind, text.replace("WHERE", "s3://b/x") in str(error)) == (kind, True), str(error)


def test_a_store_without_room(small_disk: Callable[[str], Path]) -> None:
    store = open_store(f"file://{small_disk('size=256k')}/store")
    with pytest.raises(StoreError) as caught:
        store.put("large", bytes(1 << 20))
    assert (
        str(caught.value)
        == f"there is no room left for {store}/large\n  try: free some space there"
    )
    assert caught.value.may_pass
    assert store.sizes() == {}


def test_a_full_disk(bucket: Bucket, small_disk: Callable[[str], Path]) -> None:
    folder = small_disk("size=256k")
    store = open_store(bucket.root)
    store.put("large", bytes(1 << 20))
    with pytest.raises(StoreError) as caught:
        store.fetch("large", folder / "large")
    assert str(caught.value) == (
        f"{bucket.root}/large could not be written to {folder / 'large'}: the disk is full\n"
        f"  try: free some space on the disk of {folder}"
    )
    assert list(folder.iterdir()) == []


@pytest.fixture(name="pipe")
def make_pipe(tmp_path: Path) -> Iterator[Path]:
    """In place of an object: who opens it waits for the other side."""
    os.mkfifo(tmp_path / "weights")
    yield tmp_path / "weights"
    os.close(os.open(tmp_path / "weights", os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("puts", [True, False])
def test_a_store_that_never_answers(
    puts: bool, pipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of fsspec's have no time limits of their own."""
    store = open_store(f"file://{pipe.parent}")
    monkeypatch.setattr(backends, "ANSWER_S", 0.5)
    monkeypatch.setattr(object_store, "RETRY_AFTER_S", ())
    with pytest.raises(StoreError) as caught:
        store.put("weights", pipe) if puts else store.fetch("weights", pipe.with_name("to"))
    assert str(caught.value) == (
        f"{store}/weights is unreachable: no answer for 0.5 s\n"
        "  try: check the network, and what the package of this store needs"
    )
    assert caught.value.may_pass
    assert [path.name for path in pipe.parent.iterdir()] == ["weights"]


def test_the_time_limit_is_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "ANSWER_S", 1.0)
    until = time.monotonic() + 1.6

    def upload(moved: Callable[[], None]) -> str:
        while time.monotonic() < until:
            moved()
            time.sleep(0.01)
        return "done"

    assert backends._answered(upload) == "done"


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(
        UsageError,
        match=r"s3:// needs a package .*\n  try: pip install 'boto3>=1.36' 'fsspec>=2024.6'",
    ):
        open_store("s3://bucket/runs")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(
        UsageError, match=r"gs:// needs a package: .*gcsfs.*\n  try: install it with pip"
    ):
        open_store("gs://bucket/runs")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        UsageError,
        match=r"gs:// needs a package .*\n  try: pip install 'boto3>=1.36' 'fsspec>=2024.6'",
    ):
        open_store("gs://bucket/runs")


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/runs",
        "s3://key:sec/secret@bucket",
        "s3://key:123/secret@bucket",
        "s3://key@bucket",
        "gs://bucket/a?token=secret",
    ],
)
def test_an_address_holds_no_credentials(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        open_store(url)
    assert "holds a user, a password or options" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_addresses() -> None:
    assert is_store_url("s3://bucket/prefix")
    assert is_store_url("gs://bucket")
    assert not any(map(is_store_url, ("runs/s3", "/data", "C:/x", "runs/a://b", "")))
    with pytest.raises(
        UsageError, match="s3:///runs names no bucket\n  try: write it as s3://bucket/prefix"
    ):
        open_store("s3:///runs")
    with pytest.raises(
        UsageError, match=r"there is no kind of store s4://; .*\n  try: correct the address"
    ):
        open_store("s4://bucket/runs")
