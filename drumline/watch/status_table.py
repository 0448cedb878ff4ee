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
    """How long it has been in its phase."""

    rate: str = ""
    """In steps a second."""

    state: str = ""
    """What it does, in words."""

    level: RowLevel = RowLevel.GOOD

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts, in the order of the columns."""
        return tuple(map(one_line, astuple(self)[:-1]))


HEADINGS = StatusRow("host", "rank", "step", "phase", "for", "steps/s", "state")


def all_rows(status: Mapping[str, Any]) -> list[StatusRow]:
    """One for each lost host, then one for each rank of the others, in order."""
    ranks = status["ranks"]
    num_waiting = sum(map(_waits, ranks))
    lost_rows = [_lost_row(host) for host in status["lost"]]
    return lost_rows + [_rank_row(rank, num_waiting, ranks) for rank in ranks]


def _rank_row(
    rank: Mapping[str, Any], num_waiting: int, ranks: Sequence[Mapping[str, Any]]
) -> StatusRow:
    """One rank of those in a status."""
    state, level = _state(rank, num_waiting, ranks)
    return StatusRow(
        host=rank["host"],
        rank=str(rank["rank"]),
        step=str(rank["step"]),
        phase=rank["phase"],
        age=duration(max(0.0, rank["age_s"])),
        rate="" if rank["rate"] is None else _rate(rank["rate"]),
        state=state,
        level=level,
    )


def _lost_row(host: Mapping[str, Any]) -> StatusRow:
    """A host whose sidecar sends nothing."""
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
        unshown_rows = [row for host in unshown for row in by_host.pop(host)]
        by_host[plural(len(unshown), "host")] = unshown_rows

    merged = [_merged(host, group) for host, group in by_host.items()]
    return [*shown, *merged][:max_rows]


def summary_line(status: Mapping[str, Any]) -> str:
    """`step 812, 3.1 steps/s: 8 ranks on 2 hosts, 1 needs attention`."""
    ranks = status["ranks"]
    line = f"step {_span(rank['step'] for rank in ranks)}"
    rates = sorted(rank["rate"] for rank in ranks if rank["rate"] is not None)
    if rates:
        line += f", {_rate(rates[len(rates) // 2])} steps/s"

    hosts = {place["host"] for place in (*ranks, *status["lost"])}
    line += f": {plural(status['world_size'], 'rank')} on {plural(len(hosts), 'host')}"

    num_marked = sum(row.level > RowLevel.GOOD for row in all_rows(status))
    if num_marked:
        line += f", {num_marked} need{'s' if num_marked == 1 else ''} attention"
    return line


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

    level = RowLevel.SUSPECT if num_waiting else RowLevel.GOOD
    return f"{does}{waiting}", level


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
    if count < len(rows):
        state += f"; {len(rows) - count} differ"

    return StatusRow(
        host=host,
        rank=plural(len(rows), "rank"),
        step=_span(int(row.step) for row in rows if row.step),
        phase=phases.pop() if len(phases) == 1 else "",
        rate=rates[len(rates) // 2] if rates else "",
        state=state,
        level=max(row.level for row in rows),
    )


def _span(numbers: Iterable[int]) -> str:
    """`3-7`, `3`, or `-` without numbers."""
    ordered = sorted(numbers)
    if not ordered:
        return "-"

    low = ordered[0]
    high = ordered[-1]
    return str(low) if low == high else f"{low}-{high}"


def _rate(steps_per_s: float) -> str:
    """`3.1`, `0.042`, or `0.0`."""
    if 0 < steps_per_s < 1:
        return f"{steps_per_s:.2g}"
    return f"{steps_per_s:.1f}"
