"""S3, and whatever speaks its protocol (AWS_ENDPOINT_URL), with boto3: botocore retries with
back-off, and sends a checksum with every upload, which S3 compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drumline.base.errors import MissingExtraError
from drumline.base.text import without_credentials
from drumline.storage.backend import PIECE_BYTES, StoreError, corrupt

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
MAX_ATTEMPTS = 4
_DELETED_AT_ONCE = 1000
# The right that a call needs, where its name differs.
_RIGHTS = {
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
}
# Codes of S3, by what they mean. An answer to HEAD has only the number.
_NOT_ALLOWED = {"AccessDenied", "AllAccessDisabled", "403"}
_BAD_CREDENTIALS = {"ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
_BUSY = {
    "SlowDown",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "429",
    "503",
}
_CHANGED = {"PreconditionFailed", "ConditionalRequestConflict"}
_OTHER_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "301"}


class S3Backend:
    """A bucket, or a prefix in one. Its methods raise what boto3 raises, and `explain` puts that
    into words."""

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
        except Exception as error:  # a profile that does not exist, an endpoint that is no URL
            raise self.explain(error, f"s3://{bucket}") from None
        # In the caller's thread alone: it leaves the processor to training, and threads of a pool
        # delay an exit.
        self._transfer = TransferConfig(
            use_threads=False, multipart_threshold=64 << 20, multipart_chunksize=32 << 20
        )

    def entries(self, under: str) -> Iterator[tuple[str, int, str]]:
        """The objects whose names begin with `under/`, or all: name, size, and a tag that changes
        with the content."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._under(under)
        )
        for page in pages:
            for entry in page.get("Contents", ()):
                yield (
                    entry["Key"].removeprefix(self._prefix),
                    entry["Size"],
                    str(entry.get("ETag", "")),
                )

    def put(self, name: str, source: Path | bytes) -> None:
        key = self._prefix + name
        if isinstance(source, bytes):
            self._client.put_object(Bucket=self._bucket, Key=key, Body=source)
        else:
            self._client.upload_file(str(source), self._bucket, key, Config=self._transfer)

    def put_after(self, previous: bytes | None, name: str, content: bytes) -> None:
        from botocore.exceptions import ClientError

        target = {"Bucket": self._bucket, "Key": self._prefix + name}
        condition = {"IfNoneMatch": "*"}
        try:
            if previous is not None:
                current = self._client.get_object(**target)
                if current["Body"].read() != previous:
                    return
                condition = {"IfMatch": current["ETag"]}
            self._client.put_object(**target, Body=content, **condition)
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in ("NotImplemented", "501"):  # a service that is not AWS
                self._client.put_object(**target, Body=content)
            elif code not in _CHANGED:
                raise

    def has_checked(self, name: str, size: int) -> bool:
        """Whether the object has this size, and S3 compared a checksum when it received it. If this
        client sends none (AWS_REQUEST_CHECKSUM_CALCULATION), the one that S3 has is of what
        arrived."""
        if self._client.meta.config.request_checksum_calculation != "when_supported":
            return False
        head = self._client.head_object(
            Bucket=self._bucket, Key=self._prefix + name, ChecksumMode="ENABLED"
        )
        has_checksum = any(field.startswith("ChecksumCRC") for field in head)
        return has_checksum and bool(head["ContentLength"] == size)

    def chunks(self, name: str) -> Iterator[bytes]:
        answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        with closing(answer["Body"]) as body:
            yield from body.iter_chunks(PIECE_BYTES)

    def delete(self, names: list[str]) -> None:
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
        listing = self._client.get_paginator("list_multipart_uploads")
        pages = listing.paginate(Bucket=self._bucket, Prefix=self._under(under))
        # Listed before the first is deleted, which would change the pages.
        uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )

    def explain(self, error: Exception, where: str) -> StoreError:
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
            what = f"{error.filename} could not be uploaded to {where}: {error.strerror}"
            return StoreError(what, next_step="check the disk of this file", kind="disk")
        if any(word in name for word in ("Credential", "Token", "SSO", "Profile")):
            step = "run aws configure or aws sso login, or give the instance a role"
            return StoreError(
                f"no usable AWS credentials for {where} ({name})",
                next_step=step,
                kind="credentials",
            )
        if isinstance(error, ValueError):  # its text may hold a password
            what = f"{where}: boto3 does not accept its settings"
            return StoreError(what, next_step="correct AWS_ENDPOINT_URL", kind="other")
        if isinstance(error, exceptions.BotoCoreError):
            reason = without_credentials(str(error))
            next_step = "correct the address, s3://bucket/prefix"
            if "://" in reason:
                next_step = "correct AWS_ENDPOINT_URL"
            return StoreError(f"{where}: {reason}", next_step=next_step, kind="other")
        raise error

    def _unreachable(self, error_name: str, where: str) -> StoreError:
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
        return f"{self._prefix}{name}/" if name else self._prefix

    def _refused(self, error: Any, where: str) -> StoreError:
        answer = error.response.get("Error", {})
        code = str(answer.get("Code", ""))
        message = str(answer.get("Message", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        right = f"s3:{_RIGHTS.get(error.operation_name, error.operation_name)}"
        if code == "NoSuchBucket":
            return StoreError(
                f"there is no bucket {self._bucket}",
                next_step=f"correct the name, or make it: aws s3 mb s3://{self._bucket}",
                kind="missing",
            )
        if code in ("NoSuchKey", "404"):
            return StoreError(
                f"there is no object {where}",
                next_step="list what there is with aws s3 ls --recursive",
                kind="missing",
            )
        if code in _NOT_ALLOWED:
            return StoreError(
                f"access to {where} was denied",
                next_step=f"give this user or role the right {right} there",
                kind="denied",
            )
        if code in _BAD_CREDENTIALS:
            return StoreError(
                f"S3 does not accept the credentials for {where} ({code})",
                next_step="renew them: aws configure, or aws sso login",
                kind="credentials",
            )
        if code in _OTHER_REGION:
            return StoreError(
                f"the bucket {self._bucket} is in another region",
                next_step="set AWS_REGION to the bucket's",
                kind="other",
            )
        if code == "RequestTimeTooSkewed":
            return StoreError(
                f"the clock of this machine is wrong, and S3 refuses {where}",
                next_step="set it, with NTP",
                kind="other",
            )
        if code in _BUSY or status >= 500:
            return StoreError(
                f"{where}: S3 answered {status} ({code}) to {MAX_ATTEMPTS} attempts",
                next_step="try again later",
                kind="busy",
            )
        return StoreError(
            f"S3 refused {right} for {where}: {message} ({code})",
            next_step="correct what it names",
            kind="other",
        )
