"""The status of a run in a small file: RUN/watch/status.json, which the leader of the sidecars
replaces once a second.

`drumline watch RUN` reads it, on any machine that sees the folder; so may other programs. Times are
Unix seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from drumline.base.untrusted import from_json, parse_json, read_regular
from drumline.runs.step_times import StepTimes
from drumline.watch.cluster_state import ClusterState, LostNode, RankState

VERSION = 3  # the version of the record; another one is not read
STATUS_FILE = Path("watch") / "status.json"  # in a run folder
MAX_NOTICES = 5
RATES_S = 10.0


class RankStatus(TypedDict):
    """What one rank does."""

    rank: int
    host: str
    step: int
    phase: str
    age_s: float
    rate: float | None
    state: str
    cpu: float
    exit: int | None
    failure: str | None


class LostHost(TypedDict):
    """One that sends no heartbeats."""

    host: str
    ranks: list[int]
    no_heartbeat_s: float
    how: str | None


@dataclass(frozen=True)
class Notice:
    """What the watchdog has reported."""

    kind: str
    """`hang`, `failure`, `stall`, `straggler`, `difference` or `warning`."""

    message: str


@dataclass(frozen=True)
class RunPace:
    """How fast the run is."""

    rates: Mapping[int, float]
    """Steps a second over the last seconds, by rank."""

    step_times: StepTimes | None
    """Of all steps, on the leader's node."""


class StatusRecord(TypedDict):
    """The content of the file."""

    version: int
    time: float
    leader: str
    world_size: int
    hang_s: float | None
    ranks: list[RankStatus]
    lost: list[LostHost]
    notices: list[Notice]
    step_times: StepTimes | None
    has_ended: bool


def status_record(
    cluster: ClusterState,
    *,
    now: float,
    world_size: int,
    hang_s: float | None,
    pace: RunPace,
    notices: Sequence[Notice] = (),
    has_ended: bool = False,
) -> dict[str, Any]:
    """A StatusRecord. `notices`: the newest last. `has_ended`: it is the last one."""
    return {
        "version": VERSION,
        "time": now,
        "leader": cluster.this_node.host,
        "world_size": world_size,
        "hang_s": hang_s,
        "ranks": [_rank_status(rank, pace.rates.get(rank.rank)) for rank in cluster.ranks],
        "lost": list(map(_lost_host, cluster.lost)),
        "notices": [asdict(notice) for notice in notices[-MAX_NOTICES:]],
        "step_times": pace.step_times and asdict(pace.step_times),
        "has_ended": has_ended,
    }


def _rank_status(rank: RankState, rate: float | None) -> RankStatus:
    """`rate`: steps a second; None: not known."""
    return {
        "rank": rank.rank,
        "host": rank.host,
        "step": rank.step,
        "phase": rank.phase.name.lower(),
        "age_s": round(rank.age_s, 3),
        "rate": None if rate is None else round(rate, 3),
        "state": rank.state,
        "cpu": round(rank.cpu, 2),
        "exit": rank.exit,
        "failure": rank.failure,
    }


def _lost_host(node: LostNode) -> LostHost:
    """The part of it that people read."""
    return {
        "host": node.host,
        "ranks": list(node.ranks),
        "no_heartbeat_s": round(node.no_heartbeat_s, 1),
        "how": node.how,
    }


def read_status_file(path: Path) -> dict[str, Any] | None:
    """A StatusRecord; None when there is none, or one of another version."""
    try:
        record: dict[str, Any] = parse_json(read_regular(path))
        return record if from_json(StatusRecord, record)["version"] == VERSION else None
    except (OSError, ValueError):
        return None


def read_step_times(run: Path) -> StepTimes | None:
    """Of the last start of a run; None: its status does not have them."""
    record = read_status_file(run / STATUS_FILE)
    times = None if record is None else record["step_times"]

    return None if times is None else from_json(StepTimes, times)


class StepRates:
    """How many steps a second each rank takes, over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[int, tuple[int, int]]]] = deque()

    def update(self, cluster: ClusterState, now: float) -> dict[int, float]:
        """By rank; without those that are new or were restarted."""
        steps = {rank.rank: (rank.pid, rank.step) for rank in cluster.ranks}
        self._seen.append((now, steps))
        while len(self._seen) > 2 and self._seen[1][0] <= now - RATES_S:
            self._seen.popleft()

        then, before = self._seen[0]
        rates = {}
        for rank, (pid, step) in steps.items():
            pid_then, step_then = before.get(rank, (0, 0))
            if now > then and pid == pid_then and step >= step_then:
                rates[rank] = (step - step_then) / (now - then)
        return rates
