"""What a rank's last words and its exit code say: an error of its own, the echo of another rank's end, or a request."""

from __future__ import annotations

import signal

from drumline.watch.cluster_state import RankState

# What a launcher sends to the rest when one rank is gone, or to all when its user has enough.
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ON_REQUEST = (*(-number for number in _REQUESTS), *(128 + number for number in _REQUESTS))
_TORCHS_ERRORS = ("RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER = (
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
    "it has ended, and the store with it",
)
_MISMATCHED = ("preamble.length", "collective mismatch", "detected mismatch between collectives")


def is_lost_peer(failure: str) -> bool:
    """Whether an error is only the echo of another rank's end. A dataset may lose connections of its own: those are
    Python's errors, not torch's."""
    kind, _, text = failure.partition(":")
    if kind in ("DistNetworkError", "DistStoreError"):
        return True
    text = (text if kind in _TORCHS_ERRORS else failure if "gloo/transport" in failure else "").lower()
    return any(sign in text for sign in _LOST_PEER) and not is_mismatch(failure)


def is_mismatch(failure: str) -> bool:
    return any(sign in failure.lower() for sign in _MISMATCHED)


def ended_on_request(rank: RankState) -> bool:
    return rank.exit in _ON_REQUEST or rank.failure.startswith("KeyboardInterrupt")
