"""Of what kind an error is, by its type, its errno, or what torch, gloo, NCCL and the kernel
write."""

from __future__ import annotations

import errno

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from drumline.base.errors import CheckpointError
from drumline.watch.failure_kind import FailureKind, failure_kind
from tests.unit.watch.diagnosis.sample_ranks import CLOSED


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def full_disk() -> CheckpointError:
    error = CheckpointError("cannot save in /run: any text")
    error.__cause__ = OSError(errno.ENOSPC, "any text")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyboardInterrupt(), FailureKind.INTERRUPTED),
        (RuntimeError(CLOSED.partition(": ")[2]), FailureKind.LOST_PEER),
        (RuntimeError("NCCL error: ncclRemoteError: A call failed"), FailureKind.LOST_PEER),
        (DistNetworkError("any text"), FailureKind.LOST_PEER),
        (DistStoreError("any text"), FailureKind.LOST_PEER),
        # A dataset's own connection, and the second line of a text.
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), FailureKind.OTHER),
        (RuntimeError("mine\nConnection reset by peer"), FailureKind.OTHER),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc] op.preamble.length <= op.nbytes. 8 vs 4"),
            FailureKind.MISMATCH,
        ),
        (RuntimeError("Detected mismatch between collectives on ranks"), FailureKind.MISMATCH),
        (OSError(errno.ENOSPC, "any text"), FailureKind.DISK_FULL),
        (OSError(errno.EDQUOT, "any text"), FailureKind.DISK_FULL),
        (full_disk(), FailureKind.DISK_FULL),
        (RuntimeError("I/O error: No space left on device"), FailureKind.DISK_FULL),
        (PermissionError(errno.EACCES, "any text"), FailureKind.OTHER),
        (OutOfMemoryError("Tried to allocate 2 GiB"), FailureKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), FailureKind.OUT_OF_MEMORY),
        (MemoryError(), FailureKind.OUT_OF_MEMORY),
        (
            RuntimeError("DataLoader worker (pid 812) is killed by signal: Killed."),
            FailureKind.WORKER_DIED,
        ),
        (ValueError("bad label 17"), FailureKind.OTHER),
    ],
)
def test_the_kind_of_an_error(error: BaseException, kind: FailureKind) -> None:
    assert failure_kind(error) is kind
