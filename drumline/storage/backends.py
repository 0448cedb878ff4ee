"""How each kind of store is reached: S3 with boto3, all others with fsspec; and the error that their
failures become."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import closing, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any, Literal
from urllib.parse import urlsplit

from drumline.base.background import T, in_background
from drumline.base.errors import DrumlineError, MissingExtraError, UsageError, did_you_mean
from drumline.base.text import without_credentials
from drumline.base.untrusted import replacing

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
PIECE_BYTES = 8 << 20
"""How much of an object is read at a time."""
Kind = Literal[
    "missing", "denied", "credentials", "unreachable", "busy", "corrupt", "disk", "other"
]


class StoreError(DrumlineError):
    """A store refused or failed; `kind` is why. Where the disk here refused, the OSError is its
    cause."""

    def __init__(self, what: str, *, next_step: str, kind: Kind = "other") -> None:
        super().__init__(what, next_step=next_step)
        self.kind = kind

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later, without anything done about it."""
        return self.kind in ("unreachable", "busy")

    @property
    def is_bad_copy(self) -> bool:
        """Whether this object is missing or corrupt, and another one may be used in its place."""
        return self.is_missing or self.kind == "corrupt"

    @property
    def is_missing(self) -> bool:
        """Whether there is no such object."""
        return self.kind == "missing"


def corrupt(where: str, reason: str) -> StoreError:
    what = f"{where} is corrupt: {reason}"
    return StoreError(what, next_step="upload it again, or use an earlier copy", kind="corrupt")


CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
MAX_ATTEMPTS = 4
_DELETED_AT_ONCE = 1000
# What an answer of S3 means, by its code (an answer to HEAD has only the number): what is wrong,
# what to do, and the kind of error.
_ANSWERS: dict[str, tuple[str, str, Kind]] = {
    "NoSuchBucket": (
        "there is no bucket {bucket}",
        "correct the name, or make it: aws s3 mb s3://{bucket}",
        "missing",
    ),
    "NoSuchKey": (
        "there is no object {where}",
        "list what there is with aws s3 ls --recursive",
        "missing",
    ),
    "AccessDenied": (
        "access to {where} was denied",
        "give this user or role the right {right} there",
        "denied",
    ),
    "InvalidAccessKeyId": (
        "S3 does not accept the credentials for {where} ({code})",
        "renew them: aws configure, or aws sso login",
        "credentials",
    ),
    "PermanentRedirect": (
        "the bucket {bucket} is in another region",
        "set AWS_REGION to the bucket's",
        "other",
    ),
    "RequestTimeTooSkewed": (
        "the clock of this machine is wrong, and S3 refuses {where}",
        "set it, with NTP",
        "other",
    ),
    "SlowDown": (
        "{where}: S3 answered {status} ({code}) to {attempts} attempts",
        "try again later",
        "busy",
    ),
    "other": (
        "S3 refused {right} for {where}: {message} ({code})",
        "correct what it names",
        "other",
    ),
}
_SAME_AS = {
    "404": "NoSuchKey",
    "403": "AccessDenied",
    "AllAccessDisabled": "AccessDenied",
    "ExpiredToken": "InvalidAccessKeyId",
    "InvalidToken": "InvalidAccessKeyId",
    "SignatureDoesNotMatch": "InvalidAccessKeyId",
    "301": "PermanentRedirect",
    "AuthorizationHeaderMalformed": "PermanentRedirect",
    "RequestTimeout": "SlowDown",
}
# The right that a call needs, where its name differs.
_RIGHTS = {
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}


class S3Backend:
    """A bucket of S3, or of whatever speaks its protocol (AWS_ENDPOINT_URL), or a prefix in one.
    botocore retries with back-off, and sends a checksum with every upload, which S3 compares. The
    methods raise what boto3 raises, and `explain` puts that into words."""

    def __init__(self, bucket: str, prefix: str) -> None:
        try:
            import boto3
            from boto3.s3.transfer import TransferConfig
            from botocore.config import Config
        except ImportError as error:
            raise MissingExtraError("s3://", extra="storage") from error

        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        config = Config(
            retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            user_agent_extra="drumline",
        )
        try:
            self._client = boto3.Session().client("s3", config=config)
        except Exception as error:
            # a profile that does not exist, an endpoint that is no URL
            raise self.explain(error, f"s3://{bucket}") from None

        # In the caller's thread alone: it leaves the processor to training, and threads of a pool
        # delay an exit.
        self._transfer = TransferConfig(
            use_threads=False,
            multipart_threshold=64 << 20,
            multipart_chunksize=32 << 20,
        )

    def entries(self, under: str) -> Iterator[tuple[str, int, str]]:
        """The objects whose names begin with `under/`, or all: name, size, and a tag that changes
        with the content."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._under(under)
        )
        for page in pages:
            for entry in page.get("Contents", ()):
                name = entry["Key"].removeprefix(self._prefix)
                yield name, entry["Size"], str(entry.get("ETag", ""))

    def put(self, name: str, source: Path | bytes) -> None:
        """Upload an object, in parts if it is large."""
        key = self._prefix + name
        if isinstance(source, bytes):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=source)
        else:
            self._client.upload_file(str(source), self._bucket, key, Config=self._transfer)

    def has_checked(self, name: str, size: int) -> bool:
        """Whether the object has this size, and S3 compared a checksum when it received it. If this
        client sends none (AWS_REQUEST_CHECKSUM_CALCULATION), the one that S3 has is of what
        arrived."""
        if self._client.meta.config.request_checksum_calculation != "when_supported":
            return False

        head = self._client.head_object(
            Bucket=self._bucket,
            Key=self._prefix + name,
            ChecksumMode="ENABLED",
        )
        has_checksum = any(field.startswith("ChecksumCRC") for field in head)
        return has_checksum and bool(head["ContentLength"] == size)

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of an object, piece by piece."""
        answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        with closing(answer["Body"]) as body:
            yield from body.iter_chunks(PIECE_BYTES)

    def delete(self, names: list[str]) -> None:
        """Delete objects; one that is missing is no error."""
        from botocore.exceptions import ClientError

        for start in range(0, len(names), _DELETED_AT_ONCE):
            batch = names[start : start + _DELETED_AT_ONCE]
            objects = [{"Key": self._prefix + name} for name in batch]
            answer = self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
            if refused := answer.get("Errors"):
                raise ClientError({"Error": refused[0]}, "DeleteObject")

    def delete_unfinished(self, under: str) -> None:
        """Delete the parts of uploads that were killed."""
        listing = self._client.get_paginator("list_multipart_uploads")
        pages = listing.paginate(Bucket=self._bucket, Prefix=self._under(under))
        # Listed before the first is deleted, which would change the pages.
        uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            self._client.abort_multipart_upload(
                Bucket=self._bucket,
                Key=upload["Key"],
                UploadId=upload["UploadId"],
            )

    def explain(self, error: Exception, where: str) -> StoreError:
        """The error to raise for what boto3 has raised."""
        from boto3.exceptions import S3UploadFailedError
        from botocore import exceptions

        if isinstance(error, S3UploadFailedError) and isinstance(error.__context__, Exception):
            error = error.__context__  # boto3 keeps only its text

        name = type(error).__name__
        network_errors = (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
        )
        if isinstance(error, exceptions.ClientError):
            return self._refused(error, where)

        if isinstance(error, exceptions.FlexibleChecksumError):
            return corrupt(where, "its checksum differs from the one that S3 has")

        if isinstance(error, network_errors):
            return self._unreachable(name, where)

        if isinstance(error, OSError):  # of the file that was to be uploaded
            return StoreError(
                f"{error.filename} could not be uploaded to {where}: {error.strerror}",
                next_step="check the disk of this file",
                kind="disk",
            )

        if any(word in name for word in ("Credential", "Token", "SSO", "Profile")):
            return StoreError(
                f"no usable AWS credentials for {where} ({name})",
                next_step="run aws configure or aws sso login, or give the instance a role",
                kind="credentials",
            )

        if isinstance(error, ValueError):  # its text may hold a password
            return StoreError(
                f"{where}: boto3 does not accept its settings",
                next_step="correct AWS_ENDPOINT_URL",
            )

        if isinstance(error, exceptions.BotoCoreError):
            reason = without_credentials(str(error))
            next_step = "correct the address, s3://bucket/prefix"
            if "://" in reason:
                next_step = "correct AWS_ENDPOINT_URL"
            return StoreError(f"{where}: {reason}", next_step=next_step)

        raise error

    def _unreachable(self, error_name: str, where: str) -> StoreError:
        """The error when there is no answer."""
        reason = "the connection failed or was cut"
        if "Timeout" in error_name:
            reason = "timed out"
        elif error_name == "SSLError":
            reason = "TLS failed"

        host = urlsplit(self._client.meta.endpoint_url).hostname
        return StoreError(
            f"{where} is unreachable: {reason} ({host})",
            next_step="check the network, a proxy and AWS_ENDPOINT_URL",
            kind="unreachable",
        )

    def _under(self, name: str) -> str:
        """The beginning of the keys below that name."""
        return f"{self._prefix}{name}/" if name else self._prefix

    def _refused(self, error: Any, where: str) -> StoreError:
        """The error for an answer with a code."""
        answer = error.response.get("Error", {})
        code = str(answer.get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        operation = error.operation_name
        facts = {
            "where": where,
            "bucket": self._bucket,
            "right": f"s3:{_RIGHTS.get(operation, operation)}",
            "code": code,
            "message": answer.get("Message", ""),
            "status": status,
            "attempts": MAX_ATTEMPTS,
        }
        is_busy = status == HTTPStatus.TOO_MANY_REQUESTS or status >= 500
        meaning = "SlowDown" if is_busy else _SAME_AS.get(code, code)
        what, next_step, kind = _ANSWERS.get(meaning, _ANSWERS["other"])
        return StoreError(what.format(**facts), next_step=next_step.format(**facts), kind=kind)


ANSWER_S = 300.0
"""How long a store may take for a listing, or a piece of an object: few of these packages have time
limits."""
# What kinds of stores call it.
_TAGS = ("ETag", "etag", "md5Hash", "mtime", "last_modified", "LastModified", "created")


class FsspecBackend:
    """A folder of a store that fsspec knows (`gs://`, `az://`, `sftp://`, `file://` and more, each
    with a package of its own), with the methods of `S3Backend`."""

    def __init__(self, scheme: str, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise MissingExtraError(f"{scheme}://", extra="storage") from error

        self._is_local = scheme in ("file", "local")
        try:
            # Listings are not cached: another process may write.
            options = {"use_listings_cache": False, "skip_instance_cache": True}
            self._files, self._root = _answered(lambda _: fsspec.core.url_to_fs(url, **options))
            self._has_folders = not self._files.async_impl  # buckets do not
        except ImportError as error:  # fsspec names the package
            raise UsageError(
                f"{scheme}:// needs a package: {error}", next_step="install it with pip"
            ) from error
        except ValueError as error:
            schemes = [*fsspec.available_protocols(), "s3"]
            raise UsageError(
                f"there is no kind of store {scheme}://; {did_you_mean(scheme, schemes)}",
                next_step="correct the address",
            ) from error
        except Exception as error:
            raise self.explain(error, url) from None

    def entries(self, under: str) -> Iterator[tuple[str, int, str]]:
        with suppress(FileNotFoundError):
            listing = _answered(lambda _: self._files.find(self._path(under), detail=True))
            for path, entry in listing.items():
                tag = next((str(entry[name]) for name in _TAGS if entry.get(name)), "")
                yield path.removeprefix(self._root).lstrip("/"), entry["size"], tag

    def put(self, name: str, source: Path | bytes) -> None:
        _answered(partial(self._put, self._path(name), source))

    def _put(self, path: str, source: Path | bytes, moved: Callable[[], None]) -> None:
        """Copy the bytes piece by piece, and call `moved` after each."""
        if self._has_folders:
            self._files.makedirs(self._files._parent(path), exist_ok=True)

        reading = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
        # fsspec would truncate the earlier object first.
        writing = replacing(Path(path)) if self._is_local else self._files.open(path, "wb")
        with reading as source_file, writing as target_file:
            while piece := source_file.read(PIECE_BYTES):
                target_file.write(piece)
                moved()

    def has_checked(self, name: str, size: int) -> bool:
        return False  # not known of any

    def chunks(self, name: str) -> Iterator[bytes]:
        with _answered(lambda _: self._files.open(self._path(name), "rb")) as file:
            while chunk := _answered(lambda _: file.read(PIECE_BYTES)):
                yield chunk

    def delete(self, names: list[str]) -> None:
        _answered(partial(self._delete, names))

    def _delete(self, names: list[str], moved: Callable[[], None]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))
            moved()

    def delete_unfinished(self, under: str) -> None:
        """Nothing is known of them."""

    def explain(self, error: Exception, where: str) -> StoreError:
        """The error to raise for what fsspec, or the package of the store, has raised."""
        # Only the name of the exception: its text may hold a signed address.
        name = type(error).__name__
        if isinstance(error, FileNotFoundError):
            return StoreError(
                f"there is no object {where}",
                next_step="correct the address",
                kind="missing",
            )

        if isinstance(error, PermissionError):
            return StoreError(
                f"access to {where} was denied",
                next_step="give this user the right to list, read, write and delete there",
                kind="denied",
            )

        if getattr(error, "errno", None) in DISK_FULL:
            return StoreError(
                f"there is no room left for {where}",
                next_step="free some space there",
                kind="busy",
            )

        if isinstance(error, OSError) or "Timeout" in name:
            reason = getattr(error, "strerror", None) or name
            return StoreError(
                f"{where} is unreachable: {reason}",
                next_step="check the network, and what the package of this store needs",
                kind="unreachable",
            )

        return StoreError(
            f"{where} failed: {name}",
            next_step="check the address and the credentials that the package of this store uses",
        )

    def _path(self, name: str) -> str:
        """The path of an object as fsspec takes it."""
        return f"{self._root.rstrip('/')}/{name}" if name else str(self._root)


def _answered(call: Callable[[Callable[[], None]], T]) -> T:
    """Call it with a function that reports progress; a TimeoutError if there is neither progress
    nor an answer."""
    moved = Event()
    work = in_background(lambda: call(moved.set))
    while not wait([work], timeout=ANSWER_S).done:
        if not moved.is_set():
            raise TimeoutError(errno.ETIMEDOUT, f"no answer for {ANSWER_S:g} s")
        moved.clear()

    return work.result()
