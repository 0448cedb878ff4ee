"""Opens and decodes untrusted files, within limits of size and time.

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

SETTINGS_BYTES = 1 << 19
PAGE_BYTES = 1 << 16
# A dotted key of more than a hundred parts: tomllib takes quadratic time over them.
_LONG_KEY = re.compile(
    r"""(?<![\w"'.-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){100}"""
)


def read_regular(path: Path, *, most: int) -> bytes:
    """The bytes of a regular file that has at most `most` of them; anything else is refused without
    waiting for it."""
    status = path.stat()  # first: to open a FIFO or a device has effects of its own
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    with path.open("rb") as file:
        # Not `most`: a read takes its memory first. Some file systems give no size.
        content = file.read(min(status.st_size or PAGE_BYTES, most) + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def parse_json(text: bytes) -> Any:
    """Parse UTF-8 JSON; raises ValueError where it is malformed or nested too deeply."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; raises ValueError as `parse_json` does."""
    import tomllib

    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 100 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
