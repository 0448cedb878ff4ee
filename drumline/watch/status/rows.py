"""A status as rows for people: what each rank does, in words, and who is the odd one out; on 256 ranks too."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from drumline.terminal import one_line

LONG_S = 3.0
"""In one phase, before anything is said of it."""
OUT = ("leaving", "left")
IDLE = 0.1
"""Of a core."""
WAITING = ("backward", "user")


class Level(IntEnum):
    """How much a row matters."""

    GOOD = 0
    ODD = 1
    BAD = 2


@dataclass(frozen=True)
class Row:
    """One rank, or several that are alike."""

    host: str
    rank: str
    step: str
    phase: str
    age: str
    rate: str
    state: str
    level: Level = Level.GOOD

    @property
    def cells(self) -> tuple[str, ...]:
        cells = self.host, self.rank, self.step, self.phase, self.age, self.rate, self.state
        return tuple(map(one_line, cells))


HEADINGS = Row("host", "rank", "step", "phase", "beat", "steps/s", "state")


def all_rows(status: Mapping[str, Any]) -> list[Row]:
    """One for each rank that is heard, in order, and one for each host that is not."""
    ranks = status["ranks"]
    waiting = sum(_waits(row) for row in ranks)
    return [*(_silent(one) for one in status["silent"]), *(_row(row, waiting, ranks) for row in ranks)]


def fitting_rows(status: Mapping[str, Any], *, room: int) -> list[Row]:
    """Of many ranks those that matter, and the rest by host: never more rows than there is room for."""
    rows = all_rows(status)
    if len(rows) <= room:
        return rows
    odd = sorted((row for row in rows if row.level), key=lambda row: -row.level)
    shown = odd[: max(1, room // 2)]
    rest = [row for row in rows if row not in shown]
    left = room - len(shown)
    hosts = {
        host: [row for row in rest if row.host == host] for host in dict.fromkeys(row.host for row in rest)
    }
    by_host = [_together(host, group) for host, group in hosts.items()]
    if len(by_host) <= left:
        return [*shown, *by_host]
    kept = max(0, left - 1)
    others = [row for host in list(hosts)[kept:] for row in hosts[host]]
    return [*shown, *by_host[:kept], _together(f"{len(by_host) - kept} hosts", others)][:room]


def in_a_line(status: Mapping[str, Any]) -> str:
    """`step 812, 3.1 steps/s: 8 ranks on 2 hosts`, and how many of them are odd."""
    rows, ranks = all_rows(status), status["ranks"]
    hosts = {row["host"] for row in ranks} | {one["host"] for one in status["silent"]}
    rates = sorted(row["rate"] for row in ranks if row["rate"] is not None)
    speed = f", {_rate(rates[len(rates) // 2])} steps/s" if rates else ""
    odd = sum(row.level > Level.GOOD for row in rows)
    many = f"{_count(status['world_size'], 'rank')} on {_count(len(hosts), 'host')}"
    return f"step {_span(row['step'] for row in ranks)}{speed}: {many}" + (f", {odd} odd" if odd else "")


def _row(row: Mapping[str, Any], waiting: int, ranks: Sequence[Mapping[str, Any]]) -> Row:
    state, level = _in_words(row, waiting, ranks)
    rate = "" if row["rate"] is None else _rate(row["rate"])
    return Row(
        row["host"], str(row["rank"]), str(row["step"]), row["phase"], _age(row["age_s"]), rate, state, level
    )


def _in_words(row: Mapping[str, Any], waiting: int, ranks: Sequence[Mapping[str, Any]]) -> tuple[str, Level]:
    phase, state = row["phase"], row["state"]
    if row["exit"] is not None:
        return _ended(row["exit"]), Level.BAD if row["exit"] else Level.GOOD
    if phase == "failed":
        return f"failed: {row['failure']}", Level.BAD
    if state in ("X", "Z"):
        return "gone", Level.BAD
    if state == "T":
        return "stopped by a signal", Level.BAD
    if state == "t":
        return "held by a debugger", Level.ODD
    if phase in OUT:
        is_alone = any(other["phase"] not in OUT for other in ranks)
        return ("has left the loop; others have not", Level.ODD) if is_alone else ("done", Level.GOOD)
    if row["age_s"] < LONG_S or phase == "start":
        return {"start": "starts", "evaluation": "evaluates", "save": "saves"}.get(
            phase, "trains"
        ), Level.GOOD
    return _at_it_for_long(row, waiting)


def _at_it_for_long(row: Mapping[str, Any], waiting: int) -> tuple[str, Level]:
    if _waits(row):
        return "waits for others", Level.GOOD
    does = {"data": "loads data", "evaluation": "evaluates", "save": "saves"}.get(row["phase"], "computes")
    if row["state"] == "D":
        does = "waits for storage or a device (state D)"
    elif row["cpu"] < IDLE and row["phase"] != "save":
        does = f"stands still in {row['phase']}"
    return (f"{does}, {_count(waiting, 'rank')} waiting", Level.ODD) if waiting else (does, Level.GOOD)


def _waits(row: Mapping[str, Any]) -> bool:
    """For others, as far as that can be told: in backward, for long, and with little to do."""
    is_well = row["exit"] is None and row["state"] in ("S", "R")
    return is_well and row["phase"] in WAITING and row["age_s"] >= LONG_S and row["cpu"] < 0.5


def _ended(code: int) -> str:
    name = str(-code)
    with suppress(ValueError):
        name = signal.Signals(-code).name
    return f"ended by {name}" if code < 0 else f"ended with exit code {code}" if code else "done"


def _silent(one: Mapping[str, Any]) -> Row:
    how = f": {one['how']}" if one["how"] else ""
    ranks = _span(one["ranks"])
    return Row(one["host"], ranks, "", "", "", "", f"not heard for {one['silent_s']:.0f} s{how}", Level.BAD)


def _together(host: str, rows: Sequence[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    phases, states = {row.phase for row in rows}, Counter(row.state for row in rows)
    rates = sorted((row.rate for row in rows if row.rate), key=float)
    return Row(
        host,
        _count(len(rows), "rank"),
        _span(int(row.step) for row in rows if row.step),
        phases.pop() if len(phases) == 1 else "",
        "",
        rates[len(rates) // 2] if rates else "",
        _most(states),
        max(row.level for row in rows),
    )


def _most(states: Counter[str]) -> str:
    (first, _), *others = states.most_common()
    return f"{first}; {sum(count for _, count in others)} do otherwise" if others else first


def _span(numbers: Iterable[int]) -> str:
    known = sorted(numbers)
    if not known:
        return "-"
    return str(known[0]) if known[0] == known[-1] else f"{known[0]}-{known[-1]}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _rate(steps_per_s: float) -> str:
    return f"{steps_per_s:.1f}" if steps_per_s >= 1 or not steps_per_s else f"{steps_per_s:.2g}"


def _age(seconds: float) -> str:
    if seconds < 0.95:
        return f"{max(0.0, seconds) * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 99.5 else f"{seconds / 60:.0f} min"
