"""Which rank failed first. When one rank raises, its peers soon raise too, because they lost it;
only the first is the cause. It records that in the store, which still works when the group is
broken; the others print no traceback.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from drumline.base.errors import Place
from drumline.base.processes import parent_of
from drumline.base.rank_environment import FailureRecord
from drumline.rank.sealed_store import SealedStore, decoded

FIRST = "failure/first"
CLAIM_WAIT_S = 2.0
_POLL_S = 0.05

# How long to wait for a failed rank's report, which may be slow on a busy machine.
REPORT_WAIT_S = 10.0


@dataclass(frozen=True)
class Failure:
    """The first failure of a job: where, what (in one line), and the exit code of the whole job."""

    place: Place
    """The rank that failed."""

    error: str
    exit_code: int
    is_own: bool = False
    """Whether the error is the rank's own, and not a result of another process's exit."""

    can_restart: bool = True
    """False: a restart would fail the same way."""

    full_disk: str = ""
    """The folder whose disk, or quota, is full, if that is why."""

    pid: int = field(default_factory=os.getpid)
    raised_by: Place | None = None
    """The rank of this pid, if it is another one: some errors are raised by all ranks together."""

    is_assumed: bool = False
    """Whether no rank has reported it: the ranks that lost a connection conclude it."""

    diagnosis: str = ""
    """The sidecar's sentence about it, where that names the cause, and no rank has reported it."""

    @property
    def origin(self) -> Place:
        """The rank that raised it."""
        return self.raised_by or self.place

    @property
    def sentence(self) -> str:
        """`rank 3 on gpu-02 crashed at step 1841: ValueError: label 7 is out of range`."""
        return self.diagnosis or f"{self.place.clause('crashed')}: {self.error}"

    def record(self) -> FailureRecord:
        """For the launcher."""
        return FailureRecord(
            self.place.rank,
            self.place.step,
            self.error,
            is_own=self.is_own,
            can_restart=self.can_restart,
            full_disk=self.full_disk,
        )


def claim_failure(
    store: SealedStore,
    failure: Failure,
    error: BaseException,
    *,
    rank_0_hosts_store: bool,
) -> Failure | None:
    """Claim to be the first to fail. None: this rank is. Otherwise: the earlier failure."""
    # A lost peer causes a communication error here, and the peer's own claim may arrive later.
    is_secondary = isinstance(error, RuntimeError)
    try:
        earlier = _wait_for_claim(store) if is_secondary else None
        if earlier is not None:
            return _reported(earlier, failure)

        claim = json.dumps(asdict(failure))
        if store.compare_set(FIRST, "", claim).decode() != claim:
            return _reported(_wait_for_claim(store), failure)
    except RuntimeError:
        if rank_0_hosts_store and failure.origin.rank != 0:
            reason = "the connection to the store, which it hosts, was lost"
            return Failure(Place(rank=0), reason, failure.exit_code, is_assumed=True)
        return None

    if rank_0_hosts_store and failure.origin.rank == 0:
        # the store ends with this process; the others must read it first
        time.sleep(CLAIM_WAIT_S)

    return None


def _reported(first: Failure | None, failure: Failure) -> Failure | None:
    """Wait until the first has exited: if this rank exited first, the launcher would end that one
    before its report."""
    if first is None or first.origin.host != failure.origin.host:
        return first

    deadline = time.monotonic() + REPORT_WAIT_S
    while parent_of(first.pid) and time.monotonic() < deadline:
        time.sleep(0.02)

    return first


def _wait_for_claim(store: SealedStore) -> Failure | None:
    """The claim of the rank that failed first, once it is there; None: none comes."""
    deadline = time.monotonic() + CLAIM_WAIT_S
    while time.monotonic() < deadline:
        content = store.peek(FIRST)
        if content is not None:
            return decoded(Failure, content)
        time.sleep(0.02)

    return None


def wait_for_ranks(
    store: SealedStore,
    call: str,
    rank: int,
    world_size: int,
    *,
    limit_s: float,
) -> list[int]:
    """Wait through the store until every rank has reached this call: a collective would time out
    while one of them works for long. Those that have not after this limit; a DistStoreError as soon
    as a rank has failed."""
    here = store.under(call)
    keys = [str(number) for number in range(world_size)]
    deadline = time.monotonic() + limit_s
    here.set(keys[rank], "done")

    while not here.check(keys if rank == 0 else ["all"]):
        if store.check([FIRST]):
            raise dist.DistStoreError(f"another rank failed ({call})")
        if time.monotonic() > deadline:
            return [number for number, key in enumerate(keys) if not here.check([key])]
        time.sleep(max(_POLL_S, world_size / 1000))  # the store answers all ranks

    if rank == 0:
        here.set("all", "done")

    return []
