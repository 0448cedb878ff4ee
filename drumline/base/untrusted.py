"""Files and text that another user, another process or a bad disk may have written: opened and
decoded within limits.

A refused file raises the same errors as a missing or damaged one: OSError for the file, ValueError
for its content. So a reader needs no extra case for it. No torch here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeVar

T = TypeVar("T")

MAX_DEPTH = 200
"""How deep objects and lists may be nested: far below Python's recursion limit."""
MAX_DIGITS = 300
MAX_BITS = 990
"""How long an integer may be: any such number can be printed, converted to a float, and read
again."""
TEXT_BYTES = 1 << 19
"""The most for a file that people write: settings, hostfiles, env files."""
DOCUMENT_BYTES = 8 << 20
"""The most for a JSON document that Drumline writes."""

OWN_PIPES = (Path("/dev/fd"), Path("/proc/self/fd"))
PAGE_BYTES = 1 << 16

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_HUGE = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
# A dotted key of more than a hundred parts: tomllib takes quadratic time over them.
_LONG_KEY = re.compile(
    r"""(?<![\w"'.-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}"""
)


# Files


def open_regular(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file to read; anything else is refused without blocking. A link in the last
    part of the path is followed only with `follow_links`, which is for a file that the user
    named."""
    return os.fdopen(descriptor_of(path, os.O_RDONLY, follow_links=follow_links), "rb")


def read_regular(path: Path, *, most: int = DOCUMENT_BYTES, follow_links: bool = False) -> bytes:
    """The bytes of a regular file that has no more than `most` of them."""
    if follow_links and path.parent in OWN_PIPES:  # `--env-file <(decrypt secrets)`
        with path.open("rb") as pipe:
            content = pipe.read(most + 1)
    else:
        with open_regular(path, follow_links=follow_links) as file:
            size = os.fstat(file.fileno()).st_size
            # Not `most`: a read allocates its memory first. Some file systems report no size.
            content = file.read(min(size or PAGE_BYTES, most) + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def size_of(path: Path) -> int:
    status = path.lstat()
    _check_regular(status, path)
    return status.st_size


def open_append(path: Path) -> BinaryIO:
    """Open a regular file of this user to append to, without a buffer; it is created if it does not
    exist."""
    return os.fdopen(descriptor_of(path, APPEND), "ab", buffering=0)


def open_log(path: Path) -> TextIO:
    """The same for text, line by line; invalid characters are escaped."""
    return os.fdopen(
        descriptor_of(path, APPEND), "a", 1, encoding="utf-8", errors="backslashreplace"
    )


def replace_text(path: Path, text: str, *, writer: str = "") -> None:
    """Replace a file atomically, so that a full disk never leaves a part of it, or no file.
    `writer`: as of `replacing`."""
    with replacing(path, writer=writer) as file:
        file.write(text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """The same with bytes."""
    with replacing(path) as file:
        file.write(content)


@contextmanager
def replacing(path: Path, *, writer: str = "") -> Iterator[BinaryIO]:
    """A new file under a hidden name, which takes the place of this one when it is complete.
    `writer`: a part of the hidden name, where several processes may replace the file at the same
    time."""
    suffix = f".{writer}.partial" if writer else ".partial"
    partial = path.with_name(f".{path.name}{suffix}")
    try:
        # a link placed there would be followed, or block us
        partial.unlink(missing_ok=True)
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_own_folder(folder: Path, *, follow_links: bool = False) -> None:
    """Create a folder and its parents if needed; an OSError if it is not a folder, or belongs to
    another user, who could redirect what is written."""
    folder.mkdir(parents=True, exist_ok=True)
    check_own_folder(folder, follow_links=follow_links)


def check_own_folder(folder: Path, *, follow_links: bool = False) -> None:
    """The same for an existing folder. With `follow_links` it may be a link of this user."""
    status = folder.lstat()
    if follow_links and stat.S_ISLNK(status.st_mode):
        _check_owner(status, folder, folder.parent)
        status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a file")
        raise NotADirectoryError(errno.ENOTDIR, f"it is {kind}, not a folder", str(folder))
    _check_owner(status, folder, folder)


def check_own_file(path: Path) -> None:
    """An OSError if it is a link, a FIFO or the like, or belongs to another user. A missing file is
    fine, and so is a folder, which cannot be written to as a file."""
    with suppress(FileNotFoundError, IsADirectoryError):
        status = path.lstat()
        _check_regular(status, path)
        _check_owner(status, path, path.parent)


def descriptor_of(path: Path, flags: int, *, follow_links: bool = False) -> int:
    """Like `os.open`, for regular files only; to be written, the file must not belong to another
    user."""
    try:
        # Before it is opened: opening a FIFO or a device has side effects.
        _check_regular(path.stat(follow_symlinks=follow_links), path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    flags |= os.O_CLOEXEC | os.O_NONBLOCK
    if not follow_links:
        flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    try:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        if flags & (os.O_WRONLY | os.O_RDWR):
            _check_owner(status, path, path.parent)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _check_owner(status: os.stat_result, path: Path, folder: Path) -> None:
    """Root is accepted, as it can do anything. A network file system may give all files one owner,
    whoever writes them (root, nobody, the owner of the mount): there the owner of a new file in the
    folder counts as this user."""
    owner = status.st_uid
    if owner in (os.geteuid(), 0):
        return
    import tempfile

    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        if owner == os.fstat(file.fileno()).st_uid:
            return
    raise PermissionError(
        errno.EPERM, f"it belongs to user id {owner}, and this is user id {os.geteuid()}", str(path)
    )


# Text


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text in UTF-8; a ValueError if it is malformed, nested too deeply or has
    a huge number."""
    plain = text if isinstance(text, str) else text.decode("utf-8-sig")
    if _HUGE.search(plain):
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    try:
        document = json.loads(plain)
    except RecursionError:
        raise _too_deep() from None
    may_be_deep = plain.count("[") + plain.count("{") > MAX_DEPTH
    if may_be_deep and any(depth > MAX_DEPTH for depth, _ in enumerate(_levels(document))):
        raise _too_deep()
    return document


def read_json(kind: type[T], path: Path) -> T | None:
    """What another process wrote to this file; None: it is not there, or is something else."""
    try:
        return from_json(kind, parse_json(path.read_bytes()))
    except (OSError, ValueError):
        return None


def read_record(kind: type[T], path: Path, *, follow_links: bool = False) -> T:
    """What a JSON file holds, as `from_json` makes it. Raises OSError, too."""
    return from_json(kind, parse_json(read_regular(path, follow_links=follow_links)))


def from_json(kind: type[T], value: Any) -> T:
    """A dataclass, from `asdict` of one, a TypedDict, or a NamedTuple, which is a list in JSON.
    Raises ValueError for anything else; names that it does not declare are left out."""
    import msgspec  # not before: most processes do without

    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def read_toml(path: Path, *, follow_links: bool = False) -> dict[str, Any]:
    """What a TOML file holds. Raises OSError, and ValueError for a file that is something else."""
    return parse_toml(read_regular(path, most=TEXT_BYTES, follow_links=follow_links).decode())


def parse_toml(text: str) -> dict[str, Any]:
    """The value of a TOML text; a ValueError as for JSON."""
    import tomllib

    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 100 parts")
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    for level in _levels(document):
        if any(isinstance(value, int) and value.bit_length() > MAX_BITS for value in level):
            raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    return document


def whole_number(text: str) -> int | None:
    """The number that these digits stand for; None for anything else, and for too many digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _levels(document: Any) -> Iterator[list[Any]]:
    """The document, then the values in its objects and lists, level by level."""
    level = [document]
    while level:
        yield level
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level = inner


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
