"""The status of a run in a small file: RUN/watch/status.json, which the leader of the sidecars replaces once a second.

`drumline watch RUN` reads it, on any machine that sees the folder; so may other programs. Times are Unix seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drumline.untrusted import parse_json, read_regular
from drumline.watch.cluster_state import ClusterState, RankState

VERSION = 2
"""Of the record; another one is not read."""
STATUS_FILE = Path("watch") / "status.json"
"""In a run folder."""
MAX_NOTICES = 5
_Types = Mapping[str, tuple[type, ...]]
_NUMBER, _NONE = (int, float), type(None)
_RANK_TYPES: _Types = {
    "rank": (int,),
    "host": (str,),
    "step": (int,),
    "phase": (str,),
    "age_s": _NUMBER,
    "rate": (*_NUMBER, _NONE),
    "state": (str,),
    "cpu": _NUMBER,
    "exit": (int, _NONE),
    "failure": (str, _NONE),
}
_LOST_TYPES: _Types = {"host": (str,), "ranks": (list,), "no_heartbeat_s": _NUMBER, "how": (str, _NONE)}
_NOTICE_TYPES: _Types = {"kind": (str,), "message": (str,)}
_STATUS_TYPES: _Types = {
    "time": _NUMBER,
    "leader": (str,),
    "world_size": (int,),
    "hang_s": (*_NUMBER, _NONE),
    "ranks": (list,),
    "lost": (list,),
    "notices": (list,),
    "has_ended": (bool,),
}


class Notice(NamedTuple):
    """What the watchdog has reported."""

    kind: str
    """`hang`, `failure`, `stall`, `recovery`, `straggler`, `difference` or `warning`."""
    message: str


def status_record(
    cluster: ClusterState,
    *,
    now: float,
    world_size: int,
    hang_s: float | None,
    rates: Mapping[int, float] | None = None,
    notices: Sequence[Notice] = (),
    has_ended: bool = False,
) -> dict[str, Any]:
    """`rates`: steps a second, by rank. `notices`: the newest last. `has_ended`: all ranks have left, and this is the
    last record."""
    return {
        "version": VERSION,
        "time": now,
        "leader": next((node.host for node in cluster.nodes if node.node == cluster.me), ""),
        "world_size": world_size,
        "hang_s": hang_s,
        "ranks": [_rank_record(rank, (rates or {}).get(rank.rank)) for rank in cluster.ranks],
        "lost": [
            {"host": one.host, "ranks": list(one.ranks), "no_heartbeat_s": round(one.no_heartbeat_s, 1), "how": one.how}
            for one in cluster.lost
        ],
        "notices": [notice._asdict() for notice in notices[-MAX_NOTICES:]],
        "has_ended": has_ended,
    }


def _rank_record(rank: RankState, rate: float | None) -> dict[str, Any]:
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


def read_status(path: Path) -> dict[str, Any] | None:
    """None when there is no record, or one of another version."""
    try:
        record = parse_json(read_regular(path))
    except (OSError, ValueError):
        return None
    if not _has_types(record, _STATUS_TYPES) or record.get("version") != VERSION:
        return None
    is_whole = (
        all(_has_types(rank, _RANK_TYPES) for rank in record["ranks"])
        and all(_has_types(one, _LOST_TYPES) for one in record["lost"])
        and all(type(rank) is int for one in record["lost"] for rank in one["ranks"])
        and all(_has_types(notice, _NOTICE_TYPES) for notice in record["notices"])
    )
    return record if is_whole else None


def _has_types(record: Any, types: _Types) -> bool:
    return isinstance(record, dict) and all(type(record.get(name, ...)) in allowed for name, allowed in types.items())


class StepRates:
    """How many steps a second each rank takes, over the last seconds."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, dict[int, tuple[int, int]]]] = deque()

    def update(self, cluster: ClusterState, now: float) -> dict[int, float]:
        """By rank; without those that are new or were restarted."""
        steps = {rank.rank: (rank.pid, rank.step) for rank in cluster.ranks}
        self._seen.append((now, steps))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._seconds:
            self._seen.popleft()
        then, before = self._seen[0]
        return {
            rank: (step - before[rank][1]) / (now - then)
            for rank, (pid, step) in steps.items()
            if now > then and rank in before and before[rank][0] == pid and step >= before[rank][1]
        }
