"""The kind of an error, decided by the rank that raised it and stored as a typed field beside its
text.

Most kinds follow from the exception's type or errno. torch reports the others only as text, so only
this module matches texts, all from torch, gloo, NCCL and the kernel. It does not import torch.
"""

from __future__ import annotations

import errno
from enum import StrEnum


class FailureKind(StrEnum):
    """Their order is in heartbeat files; new ones go to the end."""

    OTHER = "other"
    LOST_PEER = (
        "lost_peer"  # a connection to another rank broke: most likely that one failed before
    )

    # ranks entered different collectives, or one with different sizes
    MISMATCH = "mismatch"
    DISK_FULL = "disk_full"  # or over its quota
    OUT_OF_MEMORY = "out_of_memory"
    WORKER_DIED = "worker_died"  # of a DataLoader
    INTERRUPTED = "interrupted"


_LOST_PEER_TYPES = ("DistNetworkError", "DistStoreError")  # torch.distributed
_TORCH_TYPES = ("RuntimeError", "DistError", "DistBackendError")

# gloo's, NCCL's, c10d's and the kernel's texts, within one of torch's errors.
_LOST_PEER_TEXTS = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "caused pair closure",
    "remote process exited",
    "ncclremoteerror",
    "ncclsystemerror",
    "watchdog caught",
    "wait timeout",
    "timed out waiting",
    "socket closed",
    "failed to recv",
)

# gloo's, and two of torch's debug mode (TORCH_DISTRIBUTED_DEBUG).
_MISMATCH_TEXTS = (
    "preamble.length",
    "collective mismatch",
    "detected mismatch between collectives",
)

# The kernel's, in errors of libraries that drop the errno.
_DISK_FULL_TEXTS = ("no space left", "disk quota")


def failure_kind(error: BaseException) -> FailureKind:
    """The kind of this error. Only the first line of its text is matched."""
    kind = type(error).__name__
    text = f"{error}".strip().partition("\n")[0].lower()
    if isinstance(error, KeyboardInterrupt):
        return FailureKind.INTERRUPTED
    if kind in _LOST_PEER_TYPES:
        return FailureKind.LOST_PEER
    if _has(text, _MISMATCH_TEXTS):
        return FailureKind.MISMATCH

    # A dataset may lose its own connections: those are Python's errors, not torch's.
    if (kind in _TORCH_TYPES or "gloo/transport" in text) and _has(text, _LOST_PEER_TEXTS):
        return FailureKind.LOST_PEER

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)

    numbers = [cause.errno for cause in causes if isinstance(cause, OSError)]
    if errno.ENOSPC in numbers or errno.EDQUOT in numbers or _has(text, _DISK_FULL_TEXTS):
        return FailureKind.DISK_FULL
    if (
        isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "out of memory" in text
    ):  # torch's, CUDA's
        return FailureKind.OUT_OF_MEMORY

    return FailureKind.WORKER_DIED if "dataloader worker" in text else FailureKind.OTHER  # torch's


def _has(text: str, signs: tuple[str, ...]) -> bool:
    return any(sign in text for sign in signs)
