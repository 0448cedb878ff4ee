"""Which rank waited for which in a collective, as torch's watchdog reports it: ranks that are in
different collectives, and ranks that did not join."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drumline.base.text import duration, join_names, named_ranks, plural
from drumline.tools.doctor.finding import Finding

WATCHDOG = re.compile(
    r"aught collective operation timeout: WorkNCCL\((?:SeqNum=(?P<number>\d{1,12}), )?"
    r"OpType=(?P<operation>\w{1,60})(?:, NumelIn=(?P<elements>\d{1,15}))?"
    r".{0,200}?Timeout\(ms\)=(?P<limit_ms>\d{1,12})"
)
STATUS = re.compile(
    r"PG (?:ID )?(?P<group>\w{1,20})\b.{0,120}? at work(?: sequence id)?: (?P<number>\d{1,12})"
)
RANK = re.compile(r"\[rank(?P<prefix>\d{1,7})\]|\[(?:[^\]]{0,80} )?Rank (?P<rank>\d{1,7})\]")
MAX_SHOWN = 3
BETWEEN_TWO = {"SEND", "RECV", "COALESCED"}  # their numbers are those of each pair
# Ranks may have different numbers of elements in them.
UNEVEN_SIZES = {"SCATTER", "GATHER", "ALLTOALL", "ALLTOALL_BASE"}
EARLY = 3  # a collective with this number or a lower one is among the first of its group

LONG_WORK = (
    "work of its own that took longer (evaluating, saving a checkpoint, loading or preparing data on "
    "one rank alone)"
)
FIRST_OF_ALL = (
    "; as it is among the first collectives, it may be that no data passes between them (P2P "
    "between GPUs, the network between hosts)"
)
SAME_WORK = (
    "let every rank do that work or call that collective, or do it before the job; if it is only "
    "long, raise the timeout (init_process_group(timeout=...), ddp_timeout); drumline launch "
    "--watch names what the rank does instead"
)
CHECK_PATHS = (
    "give the logs of all ranks; try NCCL_P2P_DISABLE=1 on one host, and drumline doctor --hosts "
    "A,B between hosts; dmesg | grep -i xid on each; drumline launch --watch names a rank that "
    "does something else"
)
SAME_COLLECTIVES = (
    "let every rank call the same collectives in the same order: the same number of batches, no "
    "collective inside `if rank == 0`; drumline launch --watch names rank and line"
)


@dataclass(frozen=True, kw_only=True)
class CollectiveWait:
    """A rank that waited in a collective until its time-out."""

    rank: int | None
    number: int | None  # of the collective in its group
    operation: str
    elements: int | None
    limit_s: float

    @property
    def name(self) -> str:
        number = "" if self.number is None else f" #{self.number}"
        # torch's barrier is an all-reduce of one element.
        is_barrier = self.operation == "ALLREDUCE" and self.elements == 1
        return f"{self.operation}{number}{' (a barrier)' if is_barrier else ''}"

    @property
    def is_early(self) -> bool:
        return self.number is not None and self.number <= EARLY

    @property
    def details(self) -> str:
        return self.name if self.elements is None else f"{self.name} ({self.elements:,} elements)"


@dataclass(frozen=True, kw_only=True)
class WaitExplanation:
    """What the waits of one group show; of several ranks in different collectives or with a rank
    that is known to be late it is a cause."""

    finding: Finding
    is_cause: bool = False
    is_early: bool = False


class CollectiveWaits:
    def __init__(self) -> None:
        self._waits: dict[tuple[int | None, int | None, str], CollectiveWait] = {}
        self._group_of: dict[tuple[int | None, int], str] = {}

    def __bool__(self) -> bool:
        return bool(self._waits)

    def read(self, line: str, rank: int | None) -> bool:
        """Whether a line is a time-out of the watchdog; other lines of it name the group."""
        if " at work" in line:
            self._read_status(line, rank)
        match = WATCHDOG.search(line) if "aught collective" in line else None
        if match is None:
            return False
        wait = CollectiveWait(
            rank=rank,
            number=_number(match["number"]),
            operation=match["operation"],
            elements=_number(match["elements"]),
            limit_s=int(match["limit_ms"]) / 1000,
        )
        self._waits.setdefault((rank, wait.number, wait.operation), wait)
        return True

    def _read_status(self, line: str, rank: int | None) -> None:
        status = STATUS.search(line)
        if status is not None:
            self._group_of[rank, int(status["number"])] = status["group"]

    @property
    def is_first(self) -> bool:
        """Whether one of the first collectives of a group timed out."""
        return any(wait.is_early for wait in self._waits.values())

    @property
    def ranks(self) -> set[int]:
        return {wait.rank for wait in self._waits.values() if wait.rank is not None}

    def explanations(self, ranks: set[int], work: str) -> Iterator[WaitExplanation]:
        """One for each group. `ranks`: all that the logs show; `work`: the last long work."""
        for waits in self._by_group().values():
            of_rank = {wait.rank: wait for wait in waits if wait.rank is not None}
            if _differ(of_rank):
                yield _different_collectives(of_rank)
            else:
                yield _late_ranks(waits, ranks - self.ranks, work)

    def _by_group(self) -> dict[str, list[CollectiveWait]]:
        groups: dict[str, list[CollectiveWait]] = {}
        for (rank, number, _), wait in self._waits.items():
            group = "" if number is None else self._group_of.get((rank, number), "")
            groups.setdefault(group, []).append(wait)
        # Of some ranks the line that names the group may be missing: with only one group it is clear.
        if len(groups) == 2 and "" in groups:
            waits = [wait for group in groups.values() for wait in group]
            return {"": waits}
        return groups


def rank_in(line: str) -> int | None:
    """The rank that torch writes before or into a line."""
    match = RANK.search(line) if "ank" in line else None
    return None if match is None else int(match["prefix"] or match["rank"])


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _differ(waits: Mapping[int, CollectiveWait]) -> bool:
    """Whether the ranks are in more than one collective. Without numbers the operation decides."""
    operations = {wait.operation for wait in waits.values()}
    if operations <= BETWEEN_TWO:
        return False
    has_sizes = not operations & UNEVEN_SIZES
    collectives = {
        (wait.number, wait.operation, wait.elements if has_sizes else None)
        for wait in waits.values()
    }
    return len(collectives) > 1


def _different_collectives(waits: Mapping[int, CollectiveWait]) -> WaitExplanation:
    ranks_in: dict[str, list[int]] = {}
    for rank, wait in sorted(waits.items()):
        ranks_in.setdefault(wait.details, []).append(rank)
    places = [f"{named_ranks(ranks)} in {details}" for details, ranks in ranks_in.items()]
    what = (
        f"ranks wait in different collectives: {join_names(places, most=MAX_SHOWN)}; some got a "
        "different number of batches (uneven data), or ran code that not all ranks run"
    )
    where = named_ranks(sorted(waits))
    finding = Finding("problem", "mismatch", where, what, SAME_COLLECTIVES)
    return WaitExplanation(finding=finding, is_cause=True)


def _late_ranks(waits: list[CollectiveWait], late_ranks: set[int], work: str) -> WaitExplanation:
    wait = waits[0]
    waiting = sorted({wait.rank for wait in waits if wait.rank is not None})
    late_ranks = late_ranks | _gaps(waiting)
    is_first = wait.number is not None and wait.number <= 1
    where = named_ranks(waiting) if waiting else "a rank"
    what = _why_it_waits(wait, waiting, sorted(late_ranks), work)
    fix = SAME_WORK if late_ranks or (len(waiting) < 2 and not wait.is_early) else CHECK_PATHS
    return WaitExplanation(
        finding=Finding("problem", "collective timeout", where, what, fix),
        is_early=is_first or (not late_ranks and wait.is_early),
    )


def _gaps(waiting: list[int]) -> set[int]:
    """Ranks between those that wait, where most of them wait; and rank 0."""
    if len(waiting) < 2:
        return set()
    ranks_below = set(range(waiting[-1])) - set(waiting)
    return ranks_below if len(ranks_below) < len(waiting) else ranks_below & {0}


def _why_it_waits(wait: CollectiveWait, waiting: list[int], late: list[int], work: str) -> str:
    limit = duration(wait.limit_s)
    last_work = f"; the last work in the log: {work}" if work else ""
    if late:
        ranks = named_ranks(late) if len(late) <= MAX_SHOWN else plural(len(late), "rank")
        return (
            f"{ranks} did not join {wait.name} within {limit}: it failed, is in another "
            f"collective, had fewer batches (uneven data), or was still in {LONG_WORK}{last_work}"
        )
    if len(waiting) > 1:
        return (
            f"{wait.name} timed out after {limit} although {named_ranks(waiting)} all joined it: "
            "data does not pass between them (P2P between GPUs, the network between hosts), or a "
            f"rank that these logs do not show did not join{last_work}"
        )
    no_path = FIRST_OF_ALL if wait.is_early else ""
    return (
        f"{wait.name} timed out: another rank did not join it within {limit}: that one failed, is "
        f"in another collective, had fewer batches (uneven data), or is in {LONG_WORK}, most often "
        f"rank 0{no_path}{last_work}"
    )
