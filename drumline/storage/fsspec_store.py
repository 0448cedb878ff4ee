"""Stores that fsspec knows: `gs://`, `az://`, `sftp://`, `file://` and more, each with a package of
its own."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event

from drumline.base.background import T, in_background
from drumline.base.errors import MissingExtraError, UsageError, did_you_mean
from drumline.base.untrusted import replacing
from drumline.storage.backend import PIECE_BYTES, StoreError

ANSWER_S = 300.0
"""How long a store may take for a listing, or a piece of an object: few of these packages have time
limits."""
# What kinds of stores call it.
_TAGS = ("ETag", "etag", "md5Hash", "mtime", "last_modified", "LastModified", "created")


class FsspecBackend:
    """A folder of a file system of fsspec, with the methods of `S3Backend`."""

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
            what = f"there is no kind of store {scheme}://; {did_you_mean(scheme, schemes)}"
            raise UsageError(what, next_step="correct the address") from error
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

    def put_after(self, previous: bytes | None, name: str, content: bytes) -> None:
        self.put(name, content)  # no condition is known that all of them have

    def _put(self, path: str, source: Path | bytes, moved: Callable[[], None]) -> None:
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
        # Only the name of the exception: its text may hold a signed address.
        name = type(error).__name__
        if isinstance(error, FileNotFoundError):
            return StoreError(
                f"there is no object {where}", next_step="correct the address", kind="missing"
            )
        if isinstance(error, PermissionError):
            step = "give this user the right to list, read, write and delete there"
            return StoreError(f"access to {where} was denied", next_step=step, kind="denied")
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"there is no room left for {where}"
            return StoreError(what, next_step="free some space there", kind="busy")
        if isinstance(error, OSError) or "Timeout" in name:
            reason = getattr(error, "strerror", None) or name
            step = "check the network, and what the package of this store needs"
            return StoreError(
                f"{where} is unreachable: {reason}", next_step=step, kind="unreachable"
            )
        step = "check the address and the credentials that the package of this store uses"
        return StoreError(f"{where} failed: {name}", next_step=step, kind="other")

    def _path(self, name: str) -> str:
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
