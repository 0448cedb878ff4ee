"""Diagnoses in the run folder: `diagnoses/0001-stopped.json` for programs, and the same name with
`.txt` for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

from drumline.base.text import columns, duration, named_ranks, one_line, signal_name
from drumline.base.untrusted import (
    from_json,
    make_own_folder,
    parse_json,
    read_regular,
    replace_text,
)
from drumline.watch.cluster_state import ClusterState, Collective, LostNode, RankState
from drumline.watch.diagnosis.diagnosis import Diagnosis, RaisedAlarm, collective_name, names
from drumline.watch.diagnosis.evidence import Evidence, pending

_NAME = re.compile(r"(\d{4,})-[a-z_]+\.(json|txt)")
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel (D)",
    "T": "stopped (T)",
    "t": "debugged (t)",
    "Z": "exited",
    "X": "exited",
}
_ACTIONS = {
    "restart": "the job is killed, and restarted from its newest checkpoint if its launcher does so",
    "stop": "the job is killed, and not restarted",
    "report": "none, it is only reported",
    "none": "none",
}
_HEADINGS = ("", "rank", "host", "state", "phase", "step", "for", "CPU", "collective")
_RIGHT = (1, 5, 6, 7)


class DiagnosisRecord(TypedDict):
    """The fields of the `.json` file that are read."""

    alarm: str
    sentence: str
    action: str
    launch: str
    time: float
    diagnosis: Diagnosis


def write_diagnosis(
    folder: Path,
    raised: RaisedAlarm,
    cluster: ClusterState,
    *,
    launch: str,
    unix_s: float,
) -> Path:
    """Write both files; returns the `.json` file. `unix_s`: the time. Raises OSError if the storage
    fails."""
    make_own_folder(folder)
    number = _next_number(folder)
    while True:  # in a network partition each side has a leader, and both write
        path = folder / f"{number:04d}-{raised.diagnosis.cause}.json"
        try:
            path.with_suffix(".txt").touch(exist_ok=False)
            break
        except FileExistsError:
            number += 1

    record = {
        "number": number,
        **asdict(raised),
        "sentence": raised.sentence,
        "launch": launch,
        "time": unix_s,
        "cluster": asdict(cluster),
    }
    try:
        # The file for programs is written last: if it exists, both exist.
        text = diagnosis_text(raised, cluster, unix_s=unix_s)
        replace_text(path.with_suffix(".txt"), text)
        replace_text(path, json.dumps(record, indent=1) + "\n")
    except OSError:
        path.with_suffix(".txt").unlink(missing_ok=True)
        raise

    return path


def _next_number(folder: Path) -> int:
    """Of a diagnosis; the first is 1."""
    matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    numbers = [int(match[1]) for match in matches if match]
    return max(numbers, default=0) + 1


def read_diagnoses(folder: Path) -> list[dict[str, Any]]:
    """All records, in order, with the fields of a DiagnosisRecord; other files are ignored."""
    records = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            record = parse_json(read_regular(path))
            from_json(DiagnosisRecord, record)
            if _NAME.fullmatch(path.name):
                records.append(record)

    return records


def diagnosis_text(raised: RaisedAlarm, cluster: ClusterState, *, unix_s: float) -> str:
    """The file for people: the sentence, a table of the ranks, remarks, stacks and collectives."""
    when = datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    action = _ACTIONS.get(raised.action, raised.action)
    parts = [
        [raised.sentence],
        [f"{when}. Action: {action}."],
        _table(raised.diagnosis, cluster),
        list(_remarks(cluster)),
        *_sections("Stacks, the innermost call first", _stacks(raised.diagnosis, cluster)),
        *_sections("Last collectives, the newest last", _collectives(cluster)),
    ]
    paragraphs = ["\n".join(map(one_line, part)) for part in parts if part]
    return "\n\n".join(paragraphs) + "\n"


def _table(diagnosis: Diagnosis, cluster: ClusterState) -> list[str]:
    """One row for each rank; those that the diagnosis names are marked."""
    has_steps = Evidence(cluster).has_steps
    rows = [_row(diagnosis, rank, has_steps) for rank in cluster.ranks]
    return columns([_HEADINGS, *rows], right=_RIGHT)


def _row(diagnosis: Diagnosis, rank: RankState, has_steps: bool) -> tuple[str, ...]:
    """The cells of one rank, as in `_HEADINGS`."""
    is_host_named = diagnosis.rank is None and rank.host == diagnosis.host
    is_named = rank.rank == diagnosis.rank or is_host_named

    state = _STATES.get(rank.state, rank.state)
    if rank.exit is not None:
        state = f"killed: {signal_name(-rank.exit)}" if rank.exit < 0 else f"exited: {rank.exit}"

    where = f"after #{rank.collective}" if rank.collective else "-"
    if (blocked_in := pending(rank)) is not None:
        where = f"in {collective_name(blocked_in)}"
    elif rank.collectives:
        where = f"after {collective_name(rank.collectives[-1])}"

    return (
        ">" if is_named else " ",
        str(rank.rank),
        rank.host,
        state,
        rank.phase.name.lower(),
        str(rank.step) if has_steps else "-",
        duration(rank.age_s),
        f"{rank.cpu:.1f}",
        where,
    )


def _remarks(cluster: ClusterState) -> Iterator[str]:
    """Facts that do not fit into a column."""
    for lost in cluster.lost:
        ranks = named_ranks(lost.ranks)
        yield f"{lost.host}, {ranks}: no heartbeat for {duration(lost.no_heartbeat_s)}{_how(lost)}"

    for lost in cluster.never_seen:
        yield f"{lost.host}: never seen, in {duration(lost.no_heartbeat_s)}{_how(lost)}"

    for node in cluster.nodes:
        if node.link:
            yield f"{node.host}: {node.link}"
        for line in node.kernel:
            yield f"{node.host}, kernel: {line}"

    for rank in cluster.ranks:
        if rank.failure:
            yield f"rank {rank.rank}, error: {rank.failure}"
        if rank.memory:
            yield f"rank {rank.rank}, memory: {rank.memory}"
        if rank.answers is False:
            yield f"rank {rank.rank}: Python does not answer"


def _how(lost: LostNode) -> str:
    """What a new connection showed, as in ` (connection refused)`."""
    return f" ({lost.how})" if lost.how else ""


def _stacks(diagnosis: Diagnosis, cluster: ClusterState) -> Iterator[tuple[str, Sequence[str]]]:
    """The stack of the named rank first, then the others, then their workers."""
    ranks = sorted(cluster.ranks, key=lambda rank: (rank.rank != diagnosis.rank, rank.rank))
    for stack, holders in _equal((rank.stack, rank) for rank in ranks):
        process = f" (process {holders[0].pid})" if len(holders) == 1 else ""
        yield f"{names(holders)}{process}", stack

    for rank in ranks:
        for worker in rank.workers:
            process = f"process {worker.pid}, {_STATES.get(worker.state, worker.state)}"
            head = f"worker {worker.number} of rank {rank.rank} on {rank.host} ({process})"
            yield head, worker.stack or ("no stack",)


def _collectives(cluster: ClusterState) -> Iterator[tuple[str, Sequence[str]]]:
    """The latest collectives, once for all ranks that have the same ones."""
    lines_by_rank = ((tuple(map(_line, rank.collectives)), rank) for rank in cluster.ranks)
    for lines, ranks in _equal(lines_by_rank):
        yield names(ranks), lines


def _line(collective: Collective) -> str:
    """The collective, with what is not usual about it."""
    line = collective_name(collective, with_sizes=True)
    if not collective.is_done:
        line += "  <- not done"
    if collective.group != "default_pg":
        line += f"  (group {collective.group})"
    return line


def _equal(
    entries: Iterable[tuple[tuple[str, ...], RankState]],
) -> Iterator[tuple[tuple[str, ...], list[RankState]]]:
    """Ranks grouped by equal content, without empty ones."""
    groups: dict[tuple[str, ...], list[RankState]] = {}
    for key, rank in entries:
        if key:
            groups.setdefault(key, []).append(rank)

    yield from groups.items()


def _sections(title: str, entries: Iterable[tuple[str, Sequence[str]]]) -> list[list[str]]:
    """Entries under a title, each with its indented lines; empty without entries."""
    sections = []
    for head, lines in entries:
        indented_lines = [f"  {line}" for line in lines]
        sections.append([f"{head}:", *indented_lines])

    if not sections:
        return []
    return [[title, "-" * len(title)], *sections]
