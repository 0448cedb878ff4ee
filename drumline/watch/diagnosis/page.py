"""A diagnosis for people: the sentence, a line for each rank, then stacks and collectives, alike ones told once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from drumline.terminal import one_line
from drumline.text import number_ranges
from drumline.watch.cluster_state import ClusterState, RankState
from drumline.watch.diagnosis.diagnosis import Diagnosis
from drumline.watch.diagnosis.evidence import Evidence, pending
from drumline.watch.diagnosis.phrases import collective, names, seconds, signal_name

_STATES = {
    "R": "runs",
    "S": "waits",
    "D": "in the kernel (D)",
    "T": "stopped (T)",
    "t": "debugged (t)",
    "Z": "gone",
    "X": "gone",
}
_ACTIONS = {
    "restart": "the job is ended, and started again from its newest checkpoint if its launcher does so",
    "stop": "the job is ended, and not started again",
    "report": "nothing: it is only told",
}
_HEADINGS = ("", "rank", "host", "state", "phase", "step", "in it for", "CPU", "collective")
_RIGHT = (1, 5, 6, 7)


def page(alarm: str, diagnosis: Diagnosis, picture: ClusterState, *, action: str, at: float) -> str:
    """The whole text of a diagnosis's file."""
    when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = [
        [diagnosis.sentence(alarm)],
        [f"{when}. What follows: {_ACTIONS.get(action, action or 'nothing')}."],
        list(_table(diagnosis, picture)),
        list(_remarks(picture)),
        *_sections("Stacks, the innermost call first", _stacks(diagnosis, picture)),
        *_sections("Last collectives, the newest last", _collectives(picture)),
    ]
    return "\n\n".join("\n".join(map(one_line, part)) for part in parts if part) + "\n"


def _table(diagnosis: Diagnosis, picture: ClusterState) -> Iterator[str]:
    has_steps = Evidence(picture).has_steps
    rows = [_HEADINGS, *(_row(diagnosis, rank, has_steps) for rank in picture.ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in _RIGHT else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _row(diagnosis: Diagnosis, rank: RankState, has_steps: bool) -> tuple[str, ...]:
    is_named = rank.rank == diagnosis.rank or (diagnosis.rank is None and rank.host == diagnosis.host)
    waits = pending(rank)
    last = rank.collectives[-1] if rank.collectives else None
    where = f"in {collective(waits)}" if waits else f"after {collective(last)}" if last else ""
    return (
        ">" if is_named else " ",
        str(rank.rank),
        rank.host,
        _state(rank),
        rank.phase.name.lower(),
        str(rank.step) if has_steps else "-",
        seconds(rank.age_s),
        f"{rank.cpu:.1f}",
        where or (f"after #{rank.collective}" if rank.collective else "-"),
    )


def _state(rank: RankState) -> str:
    if rank.exit is not None:
        return f"killed: {signal_name(-rank.exit)}" if rank.exit < 0 else f"ended: {rank.exit}"
    return _STATES.get(rank.state, rank.state)


def _remarks(picture: ClusterState) -> Iterator[str]:
    """What does not fit a column."""
    for one in picture.lost:
        how = f" ({one.how})" if one.how else ""
        yield f"{one.host}, with ranks {number_ranges(one.ranks)}: not heard for {seconds(one.no_heartbeat_s)}{how}"
    for one in picture.never_seen:
        yield f"{one.host}: never heard, in {seconds(one.no_heartbeat_s)}{f' ({one.how})' if one.how else ''}"
    for node in picture.nodes:
        if node.link:
            yield f"{node.host}: {node.link}"
        for line in node.kernel:
            yield f"{node.host}, kernel: {line}"
    for rank in picture.ranks:
        for label, value in (("said", rank.failure), ("memory", rank.memory), ("debugged by", rank.tracer)):
            if value:
                yield f"rank {rank.rank}, {label}: {value}"
        if rank.answers is False:
            yield f"rank {rank.rank}: Python does not answer in it"


def _stacks(diagnosis: Diagnosis, picture: ClusterState) -> Iterator[tuple[str, Sequence[str]]]:
    """By stack, the named rank's first; then those of its workers and the others'."""
    ranks = sorted(picture.ranks, key=lambda rank: (rank.rank != diagnosis.rank, rank.rank))
    alike: dict[tuple[str, ...], list[RankState]] = {}
    for rank in ranks:
        alike.setdefault(rank.stack, []).append(rank)
    for stack, who in alike.items():
        if stack:
            pids = f" (process {who[0].pid})" if len(who) == 1 else ""
            yield f"{names(who)}{pids}", stack
    for rank in ranks:
        for worker in rank.workers:
            state = _STATES.get(worker.state, worker.state)
            head = (
                f"worker {worker.number} of rank {rank.rank} on {rank.host} (process {worker.pid}, {state})"
            )
            yield head, worker.stack or ("no stack",)


def _collectives(picture: ClusterState) -> Iterator[tuple[str, Sequence[str]]]:
    alike: dict[tuple[str, ...], list[RankState]] = {}
    for rank in picture.ranks:
        lines = tuple(
            f"{collective(one, with_sizes=True)}{'' if one.is_done else '  <- not done'}"
            + ("" if one.group == "default_pg" else f"  (group {one.group})")
            for one in rank.collectives
        )
        alike.setdefault(lines, []).append(rank)
    for lines, who in alike.items():
        if lines:
            yield names(who), lines


def _sections(title: str, entries: Iterable[tuple[str, Sequence[str]]]) -> list[list[str]]:
    found = [[f"{head}:", *(f"  {line}" for line in lines)] for head, lines in entries]
    return [[title, "-" * len(title)], *found] if found else []
