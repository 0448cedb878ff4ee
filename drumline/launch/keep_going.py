"""With `drumline launch --keep-going`: when the next start begins, after a preemption, and after a
disk was full."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from pathlib import Path

from drumline.base.text import file_size, print_message
from drumline.net.dial import WaitNotice

LONG_RUN_S = 60.0
FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
MIN_BYTES = 1 << 20
SPACE_POLL_S = 2.0


def next_pause_s(pause_s: float, ran_s: float) -> float:
    """The pause after a start that ran for `ran_s` and began after a pause of `pause_s`: a notice
    that is still there preempts each start soon."""
    if ran_s > LONG_RUN_S:
        return 0.0
    return min(MAX_PAUSE_S, 2 * pause_s + FIRST_PAUSE_S)


def needed_bytes(run: str | Path | None) -> int:
    """Twice the largest checkpoint of the run: a new one is complete before an older one is
    removed."""
    sizes = [0]
    with contextlib.suppress(OSError):
        for checkpoint in Path(run, "checkpoints").iterdir() if run is not None else ():
            files = [path for path in checkpoint.rglob("*") if path.is_file()]
            sizes.append(sum(path.stat().st_size for path in files))

    return max(MIN_BYTES, 2 * max(sizes))


def has_space(folder: str | Path, size: int) -> bool:
    """Whether a file of this size can be made there, which counts quotas too. True where that
    cannot be tried: the run itself then reports why."""
    try:
        # It has no name: nothing stays if this process is killed.
        with tempfile.TemporaryFile(dir=folder) as probe:
            os.posix_fallocate(probe.fileno(), 0, size)
    except OSError as error:
        return error.errno not in FULL

    return True


def wait_for_space(folder: str, size: int) -> None:
    """Returns when there is space; reports at growing intervals that it waits."""
    notice = WaitNotice()
    print_message(waiting_sentence(folder, size))
    while not has_space(folder, size):
        if notice.is_due():
            print_message(
                f"waiting for {file_size(size)} on the disk of {folder}, {notice.waited_s:.0f} s so far"
            )
        time.sleep(SPACE_POLL_S)


def waiting_sentence(folder: str, size: int | None = None, host: str = "") -> str:
    """What is waited for, and what to do."""
    where = f"{folder} on {host}" if host else folder
    space = "there is space" if size is None else f"{file_size(size)} are free"
    return f"warning: the disk of {where} is full; the run resumes when {space} there. Try: free some space"
