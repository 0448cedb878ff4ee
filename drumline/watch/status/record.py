"""How a run stands, in one small file: RUN/watch/status.json, which the chief of the sidecars replaces once a second.

`drumline watch RUN` reads it, on any machine that sees the folder; so may other programs. Times are Unix seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drumline.untrusted import parse_json, read_regular
from drumline.watch.facts import Picture, RankFacts

FORM = 1
"""Of the record; another one is not read."""
PLACE = Path("watch") / "status.json"
"""In a run folder."""
_Types = Mapping[str, tuple[type, ...]]
_NUMBER, _NONE = (int, float), type(None)
_OF_ROW: _Types = {
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
_OF_SILENT: _Types = {"host": (str,), "ranks": (list,), "silent_s": _NUMBER, "how": (str, _NONE)}
_OF_STATUS: _Types = {
    "time": _NUMBER,
    "chief": (str,),
    "world_size": (int,),
    "hang_s": (*_NUMBER, _NONE),
    "ranks": (list,),
    "silent": (list,),
    "words": (list,),
    "has_ended": (bool,),
}


def status_record(
    picture: Picture,
    *,
    now: float,
    world_size: int,
    hang_s: float | None,
    rates: Mapping[int, float] | None = None,
    words: Sequence[str] = (),
    has_ended: bool = False,
) -> dict[str, Any]:
    """`now`: Unix seconds. `rates`: steps a second, by rank. `words`: the sentences that were said of this run, the
    newest last. `has_ended`: all ranks have left, and this is the last record."""
    chief = next((node.host for node in picture.nodes if node.node == picture.me), "")
    return {
        "form": FORM,
        "time": now,
        "chief": chief,
        "world_size": world_size,
        "hang_s": hang_s,
        "ranks": [_row(facts, (rates or {}).get(facts.rank)) for facts in picture.ranks],
        "silent": [
            {"host": one.host, "ranks": list(one.ranks), "silent_s": round(one.silent_s, 1), "how": one.how}
            for one in picture.silent
        ],
        "words": list(words)[-5:],
        "has_ended": has_ended,
    }


def _row(facts: RankFacts, rate: float | None) -> dict[str, Any]:
    return {
        "rank": facts.rank,
        "host": facts.host,
        "step": facts.step,
        "phase": facts.phase.name.lower(),
        "age_s": round(facts.age_s, 3),
        "rate": None if rate is None else round(rate, 3),
        "state": facts.state,
        "cpu": round(facts.cpu, 2),
        "exit": facts.exit,
        "failure": facts.failure,
    }


def read_status(path: Path) -> dict[str, Any] | None:
    """The record in this file; None when there is none, or none of a form that is known here."""
    try:
        record = parse_json(read_regular(path))
    except (OSError, ValueError):
        return None
    if not _has_types(record, _OF_STATUS) or record.get("form") != FORM:
        return None
    is_whole = (
        all(_has_types(row, _OF_ROW) for row in record["ranks"])
        and all(_has_types(one, _OF_SILENT) for one in record["silent"])
        and all(type(rank) is int for one in record["silent"] for rank in one["ranks"])
        and all(isinstance(words, str) for words in record["words"])
    )
    return record if is_whole else None


def _has_types(record: Any, types: _Types) -> bool:
    return isinstance(record, dict) and all(
        type(record.get(name, ...)) in kinds for name, kinds in types.items()
    )


class StepRates:
    """How many steps a second each rank takes, over the last seconds."""

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, dict[int, tuple[int, int]]]] = deque()

    def look(self, picture: Picture, now: float) -> dict[int, float]:
        """By rank; of one that is new, or was started again, there is none yet."""
        steps = {facts.rank: (facts.pid, facts.step) for facts in picture.ranks}
        self._seen.append((now, steps))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._seconds:
            self._seen.popleft()
        then, before = self._seen[0]
        return {
            rank: (step - before[rank][1]) / (now - then)
            for rank, (pid, step) in steps.items()
            if now > then and rank in before and before[rank][0] == pid and step >= before[rank][1]
        }
