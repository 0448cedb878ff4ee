"""A diagnosis: what is wrong, on which rank or host, and what to do; and the text for ranks and
collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from drumline.base.text import number_ranges
from drumline.watch.cluster_state import Collective, RankState
from drumline.watch.heartbeat import Phase

PHASES = {
    Phase.START: "at startup",
    Phase.DATA: "in the DataLoader",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the optimizer step",
    Phase.BETWEEN: "between steps",
    Phase.EVALUATION: "in evaluation",
    Phase.SAVE: "in a save",
    Phase.USER: "in user code",
    Phase.LEFT: "after the loop",
    Phase.LEAVING: "in teardown",
    Phase.FAILED: "after its error",
    Phase.COMPILE: "in torch.compile",
    Phase.COMPILED: "waiting for other ranks to compile",
}
_MAX_HOSTS = 4


class Cause(StrEnum):
    """What can be wrong."""

    KILLED = "killed"
    ENDED = "ended"  # by drumline itself
    OUT_OF_MEMORY = "out_of_memory"
    EXCEPTION = "exception"
    STOPPED = "stopped"
    DEBUGGED = "debugged"
    DATASET = "dataset"  # in the rank itself, or in one of its DataLoader workers
    USER_CODE = "user_code"
    GIL = "gil"  # a call into C holds the GIL and does not return

    # the rank did not enter a collective that others are in
    NOT_ENTERED = "not_entered"
    MISMATCH = "mismatch"  # ranks are in different collectives, or in one with different shapes
    LEFT_EARLY = "left_early"
    TEARDOWN = "teardown"
    UNREACHABLE = "unreachable"
    STORAGE = "storage"
    COMPILING = "compiling"
    SLOW = "slow"  # it computes, and takes long
    UNKNOWN = "unknown"


class Alarm(StrEnum):
    """What a diagnosis means for the run."""

    STALL = "stall"  # no progress, but it may continue by itself: reported only
    HANG = "hang"  # it cannot continue by itself, or took too long
    FAILURE = "failure"  # a rank has exited


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong with one rank, or with one host."""

    cause: Cause
    host: str
    rank: int | None
    """None: the whole host."""

    step: int | None
    what: str
    next_step: str
    is_certain: bool
    """Whether it cannot continue by itself."""

    since_s: float
    """How long ago it began, as far as known."""

    may_return: bool = False
    """Whether it is a host that is only unreachable: TCP survives a cut."""

    num_blocked: int = 0
    """How many ranks are blocked in a collective."""

    is_ranks_error: bool = (
        False  # whether it repeats the error of that rank, which reports it with its traceback
    )

    def sentence(self, alarm: str) -> str:
        """The line that people read."""
        return f"{alarm}: {self.what.rstrip('.')}. Try: {self.next_step}"


@dataclass(frozen=True, kw_only=True)
class RaisedAlarm:
    """An alarm, and what is done about it."""

    alarm: Alarm
    diagnosis: Diagnosis
    action: str
    """`restart`, `stop`, `report` or `none`."""

    @property
    def sentence(self) -> str:
        return self.diagnosis.sentence(self.alarm)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a rank makes no progress, before other ranks are considered."""

    cause: Cause
    text: str
    """The sentence after the rank's name."""

    next_step: str
    is_certain: bool = False


def name(rank: RankState) -> str:
    """`rank 3 on node-b`."""
    return f"rank {rank.rank} on {rank.host}"


def names(ranks: Sequence[RankState]) -> str:
    """`rank 3 on node-b`, `ranks 0-2 on node-a, 5 on node-b`; for many hosts only their number."""
    if len(ranks) == 1:
        return name(ranks[0])

    hosts: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        hosts[rank.host].append(rank.rank)

    if len(hosts) > _MAX_HOSTS:
        return f"{len(ranks)} ranks on {len(hosts)} hosts ({name(ranks[0])}, ...)"

    return "ranks " + ", ".join(
        f"{number_ranges(numbers)} on {host}" for host, numbers in hosts.items()
    )


def collective_name(collective: Collective, *, with_sizes: bool = False) -> str:
    """`all_reduce #4410`, and ` of [77290]`."""
    text = f"{collective.op} #{collective.number}"
    if not with_sizes or not collective.sizes:
        return text

    sizes = " and ".join(str(list(size)) for size in collective.sizes[:3])

    return f"{text} of {sizes}{' and more' if collective.sizes[3:] else ''}"
