"""Object stores: whole objects by name under a URL. `s3://` is reached with boto3, any other URL
with fsspec.

Credentials come from the store's own chain (environment, profile, role of the instance), never from
the URL. Every refusal is a StoreError: what, where, what next. What is fetched is bytes; nothing is
unpickled. No torch here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from blake3 import blake3

from drumline.base.background import T
from drumline.base.errors import DrumlineError, UsageError
from drumline.base.text import CREDENTIALS
from drumline.base.untrusted import DOCUMENT_BYTES, replacing
from drumline.storage.backends import DISK_FULL, FsspecBackend, S3Backend, StoreError, corrupt

RETRY_AFTER_S = (1.0, 4.0)
"""Before an object is read again whose connection was cut."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# These have no bucket or host in their addresses.
_LOCAL = ("file", "local", "memory")


def is_store_url(text: str) -> bool:
    """Whether this is the URL of a store, such as `s3://bucket/prefix`, and not a path."""
    return _URL.match(text) is not None


def open_store(url: str) -> ObjectStore:
    """The objects under a URL. Nothing is sent yet."""
    scheme, _, location = url.partition("://")
    host, _, prefix = location.partition("/")
    if CREDENTIALS.search(url):
        raise UsageError(
            f"the {scheme}:// address holds a user, a password or options, which would be written to logs and files",
            next_step="leave them out: the variables, profile or role of the store itself are used",
        )

    if not host and scheme not in _LOCAL:
        raise UsageError(
            f"{url} names no bucket", next_step=f"write it as {scheme}://bucket/prefix"
        )

    url = url.rstrip("/")
    if scheme == "s3":
        return ObjectStore(url, S3Backend(host, prefix.strip("/")))
    return ObjectStore(url, FsspecBackend(scheme, url))


class ObjectStore:
    """Objects by their names below the URL, such as `checkpoints/step-00000023/manifest.json`. Any
    thread may use it."""

    def __init__(self, url: str, backend: S3Backend | FsspecBackend) -> None:
        self.url = url
        self._backend = backend
        self._is_stopped = False

    def __str__(self) -> str:
        return self.url

    def sizes(self, under: str = "") -> dict[str, int]:
        """The size of every object whose name begins with `under/`. A name that is no relative path
        is left out, so that a file of that name is always below the folder that it is fetched
        to."""
        return {name: size for name, (size, _) in self.tags(under).items()}

    def tags(self, under: str = "") -> dict[str, tuple[int, str]]:
        """The same with a tag of the store for each, which changes with the content."""
        with self._explained(under):
            return {
                name: (size, tag)
                for name, size, tag in self._backend.entries(under)
                if _is_relative(name)
            }

    def put(self, name: str, source: Path | bytes) -> None:
        """Upload a whole object, in place of an earlier one. On S3 a reader sees all of it or
        nothing."""
        with self._explained(name):
            self._backend.put(name, source)

    def check(self, name: str, *, size: int, checksum: str, reads_all: bool = False) -> None:
        """Raise unless the store has these bytes. S3 compares a checksum when it receives an
        object; where a store did not, or with `reads_all`, the object is read again, and `checksum`
        (blake3) compared."""
        with self._explained(name):
            if not reads_all and self._backend.has_checked(name, size):
                return

        self._repeated(
            lambda: self._pass_on(
                [name], lambda chunk: None, size=size, checksum=checksum, most=size
            ),
        )

    def read(self, name: str) -> bytes:
        """The bytes of a small object."""
        return self._repeated(lambda: b"".join(self._chunks_up_to(DOCUMENT_BYTES, [name])))

    def fetch(
        self,
        name: str,
        to: Path,
        *,
        size: int | None = None,
        checksum: str | None = None,
        most: int | None = None,
        pieces: Sequence[str] = (),
    ) -> str:
        """Download an object to a file, which appears when it is complete, on disk, and has this
        size and blake3 checksum, which is returned. `most`: how many bytes it may have, if its size
        is not known. `pieces`: objects that follow in the same file. Nothing is left of a download
        that fails."""
        names = [name, *pieces]
        limit = most if size is None else size

        def fetch() -> str:
            with replacing(to) as file:
                digest = self._pass_on(names, file.write, size=size, checksum=checksum, most=limit)
                file.flush()
                os.fsync(file.fileno())
            return digest

        try:
            return self._repeated(fetch)
        except OSError as error:
            reason = error.strerror
            next_step = f"check the disk of {to.parent}"
            if error.errno in DISK_FULL:
                reason = "the disk is full"
                next_step = f"free some space on the disk of {to.parent}"
            raise StoreError(
                f"{self._where(name)} could not be written to {to}: {reason}",
                next_step=next_step,
                kind="disk",
            ) from error

    def stop(self) -> None:
        """Have what other threads download end soon, incomplete."""
        self._is_stopped = True

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; one that is missing is no error."""
        if objects := list(names):
            with self._explained(objects[0]):
                self._backend.delete(objects)

    def delete_unfinished(self, under: str = "") -> None:
        """Delete the parts of large objects whose upload was killed: they cost money and are in no
        listing. Call it while nothing is being uploaded with a name that begins with `under/`."""
        with self._explained(under):
            self._backend.delete_unfinished(under)

    def _pass_on(
        self,
        names: Sequence[str],
        write: Callable[[bytes], object],
        *,
        size: int | None,
        checksum: str | None,
        most: int | None,
    ) -> str:
        """Read these objects and write each chunk; raise unless together they have this size and
        checksum, which is returned."""
        digest = blake3()
        count = 0
        for chunk in self._chunks_up_to(most, names):
            write(chunk)
            digest.update(chunk)
            count += len(chunk)

        if size not in (None, count):
            raise corrupt(self._where(names[0]), f"it has {count:,} bytes in place of {size:,}")
        if checksum not in (None, digest.hexdigest()):
            reason = "its checksum differs from the one that was recorded"
            raise corrupt(self._where(names[0]), reason)

        return digest.hexdigest()

    def _repeated(self, call: Callable[[], T]) -> T:
        """Call it again after a failure that may pass."""
        for delay_s in RETRY_AFTER_S:
            try:
                return call()
            except StoreError as error:
                if not error.may_pass or self._is_stopped:
                    raise
            time.sleep(delay_s)

        return call()

    def _chunks_up_to(self, most: int | None, names: Sequence[str]) -> Iterator[bytes]:
        """The bytes of these objects. Of one that has more than `most` the rest is neither read nor
        written."""
        count = 0
        for chunk in chain.from_iterable(map(self._chunks, names)):
            count += len(chunk)
            if most is not None and count > most:
                raise corrupt(self._where(names[0]), f"it has more than {most:,} bytes")

            yield chunk

    def _chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of one object, piece by piece."""
        chunks = self._backend.chunks(name)
        while True:
            with self._explained(name):
                chunk = next(chunks, None)

            if chunk is None:
                return
            if self._is_stopped:
                raise StoreError(f"{self._where(name)}: stopped", next_step="start again")

            yield chunk

    def _where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Errors in this block become a StoreError."""
        try:
            yield
        except DrumlineError:
            raise
        except Exception as error:
            # Without its cause: a traceback in a log would show addresses with passwords or
            # signatures.
            raise self._backend.explain(error, self._where(name)) from None


def _is_relative(name: str) -> bool:
    """Also false for the empty objects `folder/` that consoles make."""
    return "\0" not in name and not {"", ".", ".."} & set(name.split("/"))
