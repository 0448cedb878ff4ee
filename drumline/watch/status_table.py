"""A status as rows of a table: what each rank does, and which need attention; also for hundreds of
ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import IntEnum
from typing import Any

from drumline.base.text import duration, one_line, plural, signal_name

LONG_S = 3.0  # in one phase, before its state is shown
OUT = ("leaving", "left")
IDLE = 0.1  # of a core
WAITING = ("backward", "user", "compiled")  # phases in which a rank may wait for others
SHORT_WORK = {"start": "starts", "evaluation": "evaluates", "save": "saves"}
LONG_WORK = {"data": "loads data", "evaluation": "evaluates", "save": "saves"}


class RowLevel(IntEnum):
    """How much a row matters."""

    GOOD = 0
    SUSPECT = 1  # others wait for it
    BAD = 2  # it cannot continue by itself


HELD = {
    "X": ("exited", RowLevel.BAD),
    "Z": ("exited", RowLevel.BAD),
    "T": ("stopped by a signal", RowLevel.BAD),
    "t": ("paused by a debugger", RowLevel.SUSPECT),
}
"""By the state of a process that makes no progress by itself."""


@dataclass(frozen=True)
class StatusRow:
    """One rank, or several that are alike."""

    host: str
    rank: str
    step: str = ""
    phase: str = ""
    age: str = ""
    rate: str = ""
    state: str = ""
    level: RowLevel = RowLevel.GOOD

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(map(one_line, astuple(self)[:-1]))


HEADINGS = StatusRow("host", "rank", "step", "phase", "for", "steps/s", "state")


def all_rows(status: Mapping[str, Any]) -> list[StatusRow]:
    """One for each lost host, then one for each rank of the others, in order."""
    ranks = status["ranks"]
    num_waiting = sum(map(_waits, ranks))
    lost_rows = [_lost_row(host) for host in status["lost"]]
    rank_rows = [
        StatusRow(
            rank["host"],
            str(rank["rank"]),
            str(rank["step"]),
            rank["phase"],
            duration(max(0.0, rank["age_s"])),
            "" if rank["rate"] is None else _rate(rank["rate"]),
            *_state(rank, num_waiting, ranks),
        )
        for rank in ranks
    ]

    return lost_rows + rank_rows


def _lost_row(host: Mapping[str, Any]) -> StatusRow:
    state = f"no heartbeat for {host['no_heartbeat_s']:.0f} s"
    if host["how"]:
        state += f": {host['how']}"
    return StatusRow(host["host"], _span(host["ranks"]), state=state, level=RowLevel.BAD)


def fitting_rows(status: Mapping[str, Any], *, max_rows: int) -> list[StatusRow]:
    """At most `max_rows`: ranks that need attention, and the rest by host."""
    rows = all_rows(status)
    if len(rows) <= max_rows:
        return rows
    shown = sorted((row for row in rows if row.level), key=lambda row: -row.level)
    shown = shown[: max(1, max_rows // 2)]
    by_host: dict[str, list[StatusRow]] = {}
    for row in rows:
        if row not in shown:
            by_host.setdefault(row.host, []).append(row)

    room = max_rows - len(shown)
    if len(by_host) > room:
        unshown = list(by_host)[max(0, room - 1) :]
        by_host[plural(len(unshown), "host")] = [
            row for host in unshown for row in by_host.pop(host)
        ]

    merged = [_merged(host, group) for host, group in by_host.items()]

    return [*shown, *merged][:max_rows]


def summary_line(status: Mapping[str, Any]) -> str:
    """`step 812, 3.1 steps/s: 8 ranks on 2 hosts, 1 needs attention`."""
    rows = all_rows(status)
    ranks = status["ranks"]
    hosts = {rank["host"] for rank in ranks} | {lost_host["host"] for lost_host in status["lost"]}
    rates = sorted(rank["rate"] for rank in ranks if rank["rate"] is not None)
    speed = f", {_rate(rates[len(rates) // 2])} steps/s" if rates else ""
    marked = sum(row.level > RowLevel.GOOD for row in rows)
    many = f"{plural(status['world_size'], 'rank')} on {plural(len(hosts), 'host')}"
    end = f", {marked} need{'s' if marked == 1 else ''} attention" if marked else ""

    return f"step {_span(rank['step'] for rank in ranks)}{speed}: {many}{end}"


def _state(
    rank: Mapping[str, Any],
    num_waiting: int,
    ranks: Sequence[Mapping[str, Any]],
) -> tuple[str, RowLevel]:
    """What a rank does in words, and how much that matters."""
    code = rank["exit"]
    if code:
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        return how, RowLevel.BAD
    if code == 0:
        return "done", RowLevel.GOOD
    if rank["phase"] == "failed":
        return f"crashed: {rank['failure']}", RowLevel.BAD
    if rank["state"] in HELD:
        return HELD[rank["state"]]

    if rank["phase"] in OUT:
        if all(peer["phase"] in OUT for peer in ranks):
            return "done", RowLevel.GOOD
        return "left the loop; others have not", RowLevel.SUSPECT
    return _work(rank, num_waiting)


def _work(rank: Mapping[str, Any], num_waiting: int) -> tuple[str, RowLevel]:
    """What a rank does in the loop."""
    phase = rank["phase"]
    waiting = f", {plural(num_waiting, 'rank')} waiting" if num_waiting else ""
    if phase == "compile":
        return f"compiles{waiting}", RowLevel.GOOD
    if rank["age_s"] < LONG_S or phase == "start":
        return SHORT_WORK.get(phase, "trains"), RowLevel.GOOD
    if _waits(rank):
        return "waits for others", RowLevel.GOOD

    does = LONG_WORK.get(phase, "computes")
    if rank["state"] == "D":
        does = "waits for storage or a device (state D)"
    elif rank["cpu"] < IDLE and phase != "save":
        does = f"blocked in {phase}"
    return f"{does}{waiting}", RowLevel.SUSPECT if num_waiting else RowLevel.GOOD


def _waits(rank: Mapping[str, Any]) -> bool:
    """Whether it waits for others, as far as known: long in a phase in which ranks wait, and with
    little CPU time."""
    is_well = rank["exit"] is None and rank["state"] in ("S", "R")
    return is_well and rank["phase"] in WAITING and rank["age_s"] >= LONG_S and rank["cpu"] < 0.5


def _merged(host: str, rows: Sequence[StatusRow]) -> StatusRow:
    """Several ranks of a host as one row."""
    if len(rows) == 1:
        return rows[0]
    phases = {row.phase for row in rows}
    rates = sorted((row.rate for row in rows if row.rate), key=float)
    (state, count), *_ = Counter(row.state for row in rows).most_common()

    return StatusRow(
        host,
        plural(len(rows), "rank"),
        _span(int(row.step) for row in rows if row.step),
        phases.pop() if len(phases) == 1 else "",
        "",
        rates[len(rates) // 2] if rates else "",
        state if count == len(rows) else f"{state}; {len(rows) - count} differ",
        max(row.level for row in rows),
    )


def _span(numbers: Iterable[int]) -> str:
    """`3-7`, `3`, or `-` without numbers."""
    ordered = sorted(numbers)
    if not ordered:
        return "-"
    return str(ordered[0]) if ordered[0] == ordered[-1] else f"{ordered[0]}-{ordered[-1]}"


def _rate(steps_per_s: float) -> str:
    return f"{steps_per_s:.1f}" if steps_per_s >= 1 or not steps_per_s else f"{steps_per_s:.2g}"
