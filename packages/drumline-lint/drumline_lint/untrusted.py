"""Opens and decodes untrusted files, within limits of size, depth and time.

What is refused raises as a missing or damaged file does: OSError for the file, ValueError for its
content.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

MAX_DEPTH = 200
"""Of nested objects and lists: far below Python's recursion limit."""
MAX_DIGITS = 300
"""Of an integer: it can be printed and converted to a float."""
SETTINGS_BYTES = 1 << 19
PAGE_BYTES = 1 << 16

_KINDS = {
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


def read_regular(path: Path, *, most: int) -> bytes:
    """The bytes of a regular file that has at most `most` of them; anything else is refused without
    waiting for it."""
    _check_regular(path.stat(), path)  # first: to open a FIFO or a device has effects of its own
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_regular(status, path)
        os.set_blocking(descriptor, True)
        # Not `most`: a read takes its memory first. Some file systems give no size.
        content = file.read(min(status.st_size or PAGE_BYTES, most) + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def _check_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        what = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {what}, not a regular file", str(path))


def parse_json(text: bytes) -> Any:
    """Parse UTF-8 JSON; raises ValueError where it is malformed, nested too deeply or has a huge
    number."""
    plain = text.decode("utf-8-sig")
    if _HUGE.search(plain):
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    try:
        document = json.loads(plain)
    except RecursionError:
        raise _too_deep() from None
    level: list[Any] = [[document]]
    for _ in range(MAX_DEPTH + 2):
        inner = [value for values in level for value in values]
        level = [
            container.values() if isinstance(container, dict) else container
            for container in inner
            if isinstance(container, dict | list)
        ]
        if not level:
            return document
    raise _too_deep()


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raises ValueError as `parse_json` does."""
    import tomllib

    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 100 parts")
    if _HUGE.search(text) or re.search(rf"\b0[xob]\w{{{MAX_DIGITS}}}", text):
        raise ValueError(f"a number has more than {MAX_DIGITS} digits")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
