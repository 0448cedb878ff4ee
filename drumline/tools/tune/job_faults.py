"""What lines of a job's log report as wrong: messages that are known, exceptions, time-outs of
collectives, and lines that look like an error and are not known; and which rank waited
for which in a collective, as torch's watchdog reports it: ranks that are in different collectives,
and ranks that did not join.

    [rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12, OpType=ALLREDUCE,
             NumelIn=1048576, NumelOut=1048576, Timeout(ms)=600000) ran for 600012 milliseconds

says that rank 1 waited in its 12th collective, an all-reduce, and that another rank did not join.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from drumline.base.text import duration, join_names, named_ranks, plural
from drumline.tools.doctor.finding import Finding
from drumline.tools.tune.known_messages import (
    FaultContext,
    LinePlace,
    ReadMessage,
    Role,
    known_messages,
)

# Waits in collectives

WATCHDOG = re.compile(
    r"aught collective operation timeout: WorkNCCL\((?:SeqNum=(?P<number>\d{1,12}), )?"
    r"OpType=(?P<operation>\w{1,60})(?:, NumelIn=(?P<elements>\d{1,15}))?"
    r".{0,200}?Timeout\(ms\)=(?P<limit_ms>\d{1,12})"
)
STATUS = re.compile(
    r"PG (?:ID )?(?P<group>\w{1,20})\b.{0,120}? at work(?: sequence id)?: (?P<number>\d{1,12})"
)
MAX_SHOWN = 3
BETWEEN_TWO = {"SEND", "RECV", "COALESCED"}  # their numbers are those of each pair
# Ranks may have different numbers of elements in them.
UNEVEN_SIZES = {"SCATTER", "GATHER", "ALLTOALL", "ALLTOALL_BASE"}
# What a collective is most often part of.
USES = {
    "_ALLGATHER_BASE": "parameters of FSDP or ZeRO-3, or a checkpoint",
    "_REDUCE_SCATTER_BASE": "gradients of FSDP or ZeRO",
    "ALLGATHER": "gathered results or objects",
    "GATHER": "gathered results or objects",
    "ALLTOALL_BASE": "experts or sequence parallel",
    "COALESCED": "stages of a pipeline",
    "SEND": "stages of a pipeline",
    "RECV": "stages of a pipeline",
}
# a collective with this number or a lower one is among the first of its group
EARLY = 3

LONG_WORK = (
    "work of its own that took longer (evaluating, generating, saving a checkpoint, compiling, loading "
    "or preparing data on one rank alone)"
)
FIRST_OF_ALL = (
    "; as it is among the first collectives, it may be that no data passes between them (P2P "
    "between GPUs, the network between hosts)"
)
SAME_WORK = (
    "let every rank do that work or call that collective, with the same number of batches on each "
    "(drop_last=True), or do it before the job; if it is only "
    "long, raise the timeout (init_process_group(timeout=...), ddp_timeout); drumline launch "
    "--watch names what the rank does instead"
)
CHECK_PATHS = (
    "give the logs of all ranks; try NCCL_P2P_DISABLE=1 on one host (PCIe ACS or an IOMMU), and "
    "NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=1 and drumline doctor --hosts A,B between hosts; dmesg | "
    "grep -i xid on each; a newer NCCL and driver; drumline launch --watch names a rank that does "
    "something else"
)
SAME_COLLECTIVES = (
    "let every rank call the same collectives in the same order: the same number of batches, no "
    "collective inside `if rank == 0`; drumline launch --watch names rank and line"
)


@dataclass(frozen=True, kw_only=True)
class CollectiveWait:
    """A rank that waited in a collective until its time-out."""

    rank: int | None
    number: int | None
    """Of the collective in its group."""
    operation: str
    elements: int | None
    limit_s: float

    @property
    def name(self) -> str:
        """`_ALLGATHER_BASE #12 (parameters of FSDP or ZeRO-3, or a checkpoint)`."""
        number = "" if self.number is None else f" #{self.number}"
        # torch's barrier is an all-reduce of one element.
        is_barrier = self.operation == "ALLREDUCE" and self.elements == 1
        use = "a barrier" if is_barrier else USES.get(self.operation)
        used_for = f" ({use})" if use else ""

        return f"{self.operation}{number}{used_for}"

    @property
    def is_early(self) -> bool:
        """Whether it is one of the first collectives of its group."""
        return self.number is not None and self.number <= EARLY

    @property
    def details(self) -> str:
        """The same with the number of elements, where it is known."""
        return self.name if self.elements is None else f"{self.name} ({self.elements:,} elements)"


class WaitExplanation(NamedTuple):
    """What the waits of one group show."""

    finding: Finding
    is_cause: bool
    """Ranks are in different collectives."""
    is_early: bool
    """It may be that no data passes between the ranks."""


class CollectiveWaits:
    """All time-outs of collectives, and what those of a process group show together."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int | None, int | None, str], CollectiveWait] = {}
        self._group_of: dict[tuple[int | None, int], str] = {}

    def read(self, line: str, rank: int | None) -> bool:
        """Whether a line is a time-out of the watchdog; other lines of it name the group:

        [rank1]: [PG ID 0 PG GUID 0 Rank 1] failure detected ... at work sequence id: 12
        """
        status = STATUS.search(line) if " at work" in line else None
        if status is not None:
            self._group_of[rank, int(status["number"])] = status["group"]

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

    @property
    def is_first(self) -> bool:
        """Whether one of the first collectives of a group timed out."""
        return any(wait.is_early for wait in self._waits.values())

    def explanations(self, ranks: set[int], work: str) -> Iterator[WaitExplanation]:
        """One for each group. `ranks`: all that the logs show; `work`: the last long work."""
        waiting = {wait.rank for wait in self._waits.values()}
        for waits in self._by_group().values():
            of_rank = {wait.rank: wait for wait in waits if wait.rank is not None}
            if _differ(of_rank):
                yield _different_collectives(of_rank)
            else:
                yield _late_ranks(waits, ranks - waiting, work)

    def _by_group(self) -> dict[str, list[CollectiveWait]]:
        """The waits of each process group, `{'0': [...], '1': [...]}`; of an unknown group under an empty
        name."""
        groups: dict[str, list[CollectiveWait]] = {}
        for (rank, number, _), wait in self._waits.items():
            group = "" if number is None else self._group_of.get((rank, number), "")
            groups.setdefault(group, []).append(wait)

        # Of some ranks the line that names the group may be missing: with only one group it is clear.
        if len(groups) == 2 and "" in groups:
            return {"": list(self._waits.values())}

        return groups


def _number(text: str | None) -> int | None:
    """What a group of a pattern matched; None: nothing."""
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
    """Which rank waits in which collective:

    ranks wait in different collectives: rank 0 in ALLREDUCE #7 (4 elements), rank 1 in ...
    """
    ranks_in: dict[str, list[int]] = {}
    for rank, wait in sorted(waits.items()):
        ranks_in.setdefault(wait.details, []).append(rank)

    places = [f"{named_ranks(ranks)} in {details}" for details, ranks in ranks_in.items()]
    what = (
        f"ranks wait in different collectives: {join_names(places, most=MAX_SHOWN)}; some got a "
        "different number of batches (uneven data), or ran code that not all ranks run (a branch that "
        "depends on the data, `if rank == 0`, other settings)"
    )
    where = named_ranks(sorted(waits))
    finding = Finding("problem", "mismatch", where, what, SAME_COLLECTIVES)

    return WaitExplanation(finding, is_cause=True, is_early=False)


def _late_ranks(waits: list[CollectiveWait], late_ranks: set[int], work: str) -> WaitExplanation:
    """Which ranks wait in a collective, and which did not join it."""
    wait = waits[0]
    waiting = sorted({wait.rank for wait in waits if wait.rank is not None})
    late_ranks = late_ranks | _gaps(waiting)
    is_first = wait.number is not None and wait.number <= 1
    where = named_ranks(waiting) if waiting else "a rank"
    what = _why_it_waits(wait, waiting, sorted(late_ranks), work)
    fix = SAME_WORK if late_ranks or (len(waiting) < 2 and not wait.is_early) else CHECK_PATHS
    finding = Finding("problem", "collective timeout", where, what, fix)
    is_early = is_first or (not late_ranks and wait.is_early)

    return WaitExplanation(finding, is_cause=False, is_early=is_early)


def _gaps(waiting: list[int]) -> set[int]:
    """Ranks between those that wait, where most of them wait; and rank 0: where 0, 1 and 3 wait, rank 2."""
    if len(waiting) < 2:
        return set()

    ranks_below = set(range(waiting[-1])) - set(waiting)
    return ranks_below if len(ranks_below) < len(waiting) else ranks_below & {0}


def _why_it_waits(
    wait: CollectiveWait,
    waiting: list[int],
    late: list[int],
    work: str,
) -> str:
    """What the finding says: with late ranks, with several that wait, or with one:

    rank 3 did not join ALLREDUCE #12 within 10 min: it failed, is in another collective, ...
    ALLREDUCE #12 timed out after 10 min although ranks 0 to 3 all joined it: data does not pass ...
    ALLREDUCE #12 timed out: another rank did not join it within 10 min: ...
    """
    limit = duration(wait.limit_s)
    last_work = f"; the last work in the log: {work}" if work else ""
    if late:
        ranks = named_ranks(late) if len(late) <= MAX_SHOWN else plural(len(late), "rank")
        return (
            f"{ranks} did not join {wait.name} within {limit}: it failed, is in another "
            "collective (a branch that depends on its data), had fewer batches (uneven data), or "
            f"was still in {LONG_WORK}{last_work}"
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
        f"in another collective (a branch that depends on its data: images, experts), had fewer batches "
        f"(uneven data), or is in {LONG_WORK}, most often "
        f"rank 0{no_path}{last_work}"
    )


# Tracebacks

FRAME = re.compile(r'File "([^"]{1,200})", line (\d{1,7}), in (\S{1,80})')
IN_PACKAGES = (
    "site-packages",
    "dist-packages",
    "/lib/python",
    "<frozen",
    "<string>",
    "/bin/",
)
CHAIN = "above exception"  # between the exceptions of a chain
MAX_SOURCE = 80


@dataclass
class TracebackReader:
    """What the tracebacks of one process say beside their exceptions: the program's own frame, and
    which exceptions belong to one chain.

      File "/home/me/train.py", line 41, in step
        loss = model(batch)
      File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl

    is, in a message: `/home/me/train.py, line 41, in step: loss = model(batch)`."""

    frame: str = ""
    """The last frame of the program itself."""
    is_chained: bool = False
    """The next exception follows from the last one."""
    _source_column: int | None = None
    """Of a frame; its source text follows."""
    _is_in_program: bool = False

    def read(self, text: str) -> bool:
        """A line; most are no part of a traceback. Whether it is a frame or its code, which are no
        messages."""
        source = "" if self._source_column is None else text[self._source_column :]
        self._source_column = None
        if source.startswith("  "):
            if self._is_in_program:
                self.frame += f": {source.strip()[:MAX_SOURCE]}"

            return True

        if 'File "' in text and (frame := FRAME.search(text)):
            self._read_frame(frame)
            return True

        if "Traceback (most recent" in text:
            self.frame = ""
        elif CHAIN in text:
            self.is_chained = True

        return False

    def _read_frame(self, frame: re.Match[str]) -> None:
        """A frame of a package is skipped: the last frame of the program stays."""
        path, line, function = frame.groups()
        self._source_column = frame.start()
        self._is_in_program = not any(folder in path for folder in IN_PACKAGES)
        if self._is_in_program:
            self.frame = f"{path}, line {line}, in {function}"

    def end(self) -> None:
        """An exception was read: the next traceback begins."""
        self.frame = ""
        self.is_chained = False


# What is wrong in a log

RANK = re.compile(r"\[rank(?P<prefix>\d{1,7})\]|\[(?:[^\]]{0,80} )?Rank (?P<rank>\d{1,7})\]")
MAX_UNEXPLAINED = 200
MAX_TEXT = 200
MAX_PLACES = 1000  # of lines that say the same
NUM_END_LINES = 60
# in torchrun's summary, before the rank
ROOT_CAUSE = "Root Cause (first observed failure)"
ROOT_RANK = re.compile(r"\brank {1,20}: (\d{1,7}) \(local_rank")
EXCEPTION = re.compile(
    r"(?:^|[\s\]:|)(])(?<!except )(?P<name>(?:[A-Za-z_]\w{0,40}\.){0,8}"
    r"(?:[A-Z]\w{0,60}Error|(?:[A-Z]\w{0,60})?Exception|StopIteration|TimeoutExpired|BrokenProcessPool)"
    r"|(?:[A-Za-z_]\w{0,40}\.){1,8}(?:Error|Timeout|Unsupported|Empty)|what\(\))"
    r"(?:: *(?:(?P<text>\S.{0,300}).*)?)?$"
)
EXCEPTION_NAMES = (
    "Error", "Exception", "StopIteration", "TimeoutExpired", "BrokenProcessPool", ".Timeout", ".Unsupported", ".Empty",
    "what()",
)  # fmt: skip
WARNING_BEFORE = re.compile(r"\b(?:WARN(?:ING)?|\w*Warning)\b|\[W\d|^W\d{4}")
LOOKS_WRONG = re.compile(
    r"\[[EF]\d{3,4} |\[[EF] [\w.]+:\d|(?:^|[\s\]])[EF]\d{4} \d\d:"  # of torch and glog: `[E1105 `, `E1105 `
    r"|\b(?:ERROR|FATAL|CRITICAL|WARN|Fatal|fatal|panic)\b|<warn>"
    r"|\b[Ee]rror:(?!:| *-?[\d.]+\b)"  # with a number it is a metric, with a colon C++
    r"|\b(?:[Tt]imed[ -]out|[Tt]ime-?out (?:after|exceeded|expired|waiting|while|error))\b"
)
WRONG_STEMS = (
    "[E", "[F", "E0", "E1", "F0", "F1", "ERROR", "rror:", "FATAL", "CRITICAL", "WARN", "<warn>",
    "atal", "panic", "imed", "imeout ", "ime-out ",
)  # fmt: skip
DIGITS = str.maketrans("123456789", "000000000")
STAMP = re.compile(
    r"(?:\d{4}-(?P<month>\d\d)-(?P<day>\d\d)[ T]|\b[EWIF](?P<glog_month>\d{1,2})(?P<glog_day>\d\d) )"
    r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?"
)
STAMP_WITHIN = 100  # characters at the begin of a line
# Long work that one rank may do alone, as programs announce it.
WORK = re.compile(
    r"\b(?:running tokenizer|tokeniz(?:ing|er on)|pre-?process(?:ing)?"
    r"|(?:running |start(?:ing)? (?:of )?)?(?:evaluation|validation)|evaluating|validating"
    r"|generating|predictions?|sav(?:ing|ed?) (?:\S{1,20} ){0,2}(?:checkpoint|model|state|weights)|downloading"
    r"|(?:loading|building) extension|loading checkpoint|building (?:the )?(?:index|dataset)"
    r"|map(?:ping)?(?= \(num_proc|:)|filter(?:ing)?(?= \(num_proc|:)|extracting|compiling|converting"
    r"|caching)\b.{0,60}",
    re.IGNORECASE,
)
NO_TIME = (0, 0, 0.0)
WORK_STEMS = (
    "okeniz", "rocess", "valuat", "alidat", "enerat", "redict", "sav", "Sav", "ownload", "oading", "uilding", "aching",
    "Map", "ilter", "xtract", "ompiling", "onvert",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class LogMoment:
    """When a line was written: its time or that of the line before, and its place."""

    time: tuple[int, int, float]
    number: int


@dataclass(kw_only=True)
class LoggedFault:
    """A message that is known, of one process."""

    read: ReadMessage
    origin: str
    """A key of its process, or where it is, for lines that name no process."""
    moment: LogMoment
    frame: str
    """Of the program, for an exception."""
    is_info: bool
    """NCCL went on after it."""
    places: list[LinePlace] = field(default_factory=list)
    """Of its line, and of some that say the same."""
    last_line: int = 0


@dataclass(kw_only=True)
class PlainFault:
    """An exception or a line that is not explained, as it is."""

    text: str
    origin: str
    moment: LogMoment
    is_exception: bool
    is_warning: bool
    """Of NCCL."""
    places: list[LinePlace]
    frame: str = ""
    """Of the program, for an exception."""
    num_like_it: int = 1


@dataclass(kw_only=True)
class LogLine:
    """A line, and what is known of the process that wrote it."""

    text: str
    file: str
    source: str = ""
    """Of NCCL's warnings, its source file, which is part of some messages."""
    process: str = ""
    """Its origin, for lines of NCCL."""
    is_info: bool = False
    setting: str = ""
    """Of its process, which some messages show."""

    @cached_property
    def rank(self) -> int | None:
        """The rank that torch writes before or into a line."""
        if "ank" not in self.text:
            return None

        match = RANK.search(self.text)
        return None if match is None else int(match["prefix"] or match["rank"])

    @property
    def origin(self) -> str:
        """Whose line it is, as far as it is known."""
        if self.process:
            return self.process
        return self.file if self.rank is None else f"rank {self.rank}"


class JobFaults:
    """What the lines of the logs of a job report."""

    def __init__(self) -> None:
        self.messages: dict[tuple[str, str, str], LoggedFault] = {}
        self.plain: dict[str, PlainFault] = {}
        self.waits = CollectiveWaits()
        self.first_wait: LogMoment | None = None
        self.wait_places: list[LinePlace] = []
        self.context = FaultContext()
        self.ranks: set[int] = set()
        """All that torch's lines name."""
        self.failed_first: set[str] = set()
        """Origins, as torchrun says."""
        self._tracebacks: defaultdict[str, TracebackReader] = defaultdict(TracebackReader)
        """Of each origin."""
        self._last_exceptions: dict[str, PlainFault] = {}
        self._is_root_cause = False
        """The next rank of torchrun's summary is."""
        self._num_lines_of: Counter[str] = Counter()
        """Of each process and file."""
        self._num_lines = 0
        self._time = NO_TIME

    def begin_file(self) -> None:
        """Lines without a time come before the first one that has one."""
        self._time = NO_TIME

    def read(self, line: LogLine) -> None:
        """Add a line: a time-out, a known message, or one that may be wrong."""
        self._num_lines += 1
        self._read_time(line.text)
        if line.rank is not None:
            self.ranks.add(line.rank)

        self._num_lines_of.update({line.origin, line.file})
        places = self._places(line)
        self.context.read(line.text, places[0])

        if self.waits.read(line.text, line.rank):
            self.first_wait = self.first_wait or self._moment()
            if len(self.wait_places) < MAX_PLACES:
                self.wait_places.extend(places)

        elif not self._read_traceback(line):
            self._read_root_cause(line.text)
            self._read_text(line, places)

    def _read_text(self, line: LogLine, places: list[LinePlace]) -> None:
        """A known message, or another line. What is harmless may have an exception that is not."""
        text = line.source + line.text
        read = known_messages().read(text, is_info=line.is_info, setting=line.setting)
        is_harmless = read is not None and read.message.role == "harmless"

        if read is None or (is_harmless and EXCEPTION.search(line.text)):
            self._read_unknown(line, places)
        elif not is_harmless:
            self._read_known(line, read, places)
            if read.message.at_end:
                self._read_work(line.text)

    def _places(self, line: LogLine) -> list[LinePlace]:
        """Among the lines of its process, and of its file: not all lines name their process."""
        names = dict.fromkeys((line.origin, line.file))
        return [LinePlace(name, self._num_lines_of[name]) for name in names]

    def _read_known(self, line: LogLine, read: ReadMessage, places: list[LinePlace]) -> None:
        """The same message of the same process counts once, with some of its places."""
        frame = self._tracebacks[line.origin].frame if _exception_in(line.text) else ""
        self._end_traceback(line, read)
        new_fault = LoggedFault(
            read=read,
            origin=line.origin,
            moment=self._moment(),
            frame=frame,
            is_info=line.is_info,
        )
        fault = self.messages.setdefault((read.message.kind, read.what, line.origin), new_fault)
        fault.last_line = self._num_lines

        if len(fault.places) < MAX_PLACES:
            fault.places.extend(places)

    def _read_traceback(self, line: LogLine) -> bool:
        """Whether it is a part of a traceback. It may also be what follows an exception that ends in a
        colon, as in

        RuntimeError: Error(s) in loading state_dict for Net:
            size mismatch for head.weight: ...
        """
        if self._tracebacks[line.origin].read(line.text):
            return True

        exception = self._last_exceptions.get(line.origin)
        if exception is not None and exception.text.endswith(":"):
            exception.text = f"{exception.text} {line.text.strip()}"[:MAX_TEXT]

        return False

    def _read_root_cause(self, text: str) -> None:
        """Which rank torchrun saw fail first:

        Root Cause (first observed failure):
        [0]:
          time      : 2025-06-12_10:00:00
          rank      : 3 (local_rank: 1)
        """
        if ROOT_CAUSE in text:
            self._is_root_cause = True
        elif self._is_root_cause and (rank := ROOT_RANK.search(text)):
            self.failed_first.add(f"rank {rank[1]}")
            self._is_root_cause = False

    def _end_traceback(self, line: LogLine, read: ReadMessage) -> None:
        """What is explained says more than the exception that it follows from."""
        if read.message.role not in ("cause", "failure"):
            return

        earlier = self._last_exceptions.pop(line.origin, None)
        if earlier is not None and self._tracebacks[line.origin].is_chained:
            earlier.is_exception = False

        self._tracebacks[line.origin].end()

    def _read_unknown(self, line: LogLine, places: list[LinePlace]) -> None:
        """An exception, a warning of NCCL, a line that looks like an error, or none of them."""
        if line.is_info:
            return

        exception = _exception_in(line.text)
        if exception:
            text = exception
        elif line.source:
            text = f"NCCL warns: {line.text}"
        elif _has_stem(line.text, WRONG_STEMS) and LOOKS_WRONG.search(line.text):
            text = line.text
        else:
            self._read_work(line.text)
            return

        if exception and self._joins_chain(line.origin, exception):
            return

        shape = f"{line.origin}\n{text.translate(DIGITS)}"
        if shape in self.plain:
            self.plain[shape].num_like_it += 1
        elif len(self.plain) < MAX_UNEXPLAINED:
            self.plain[shape] = PlainFault(
                text=text[:MAX_TEXT],
                origin=line.origin,
                moment=self._moment(),
                is_exception=exception is not None,
                is_warning=line.source != "",
                places=places,
                frame=self._tracebacks[line.origin].frame if exception else "",
            )

        if exception and shape in self.plain:
            self._last_exceptions[line.origin] = self.plain[shape]
            self._tracebacks[line.origin].end()

    def _joins_chain(self, origin: str, exception: str) -> bool:
        """Add an exception to the one that it follows from: `KeyError: 'label', then RuntimeError: bad batch`."""
        cause = self._last_exceptions.get(origin)
        if cause is None or not self._tracebacks[origin].is_chained:
            return False

        self._tracebacks[origin].end()
        if exception not in cause.text:
            cause.text = f"{cause.text}, then {exception}"[: 2 * MAX_TEXT]

        return True

    def _read_work(self, text: str) -> None:
        """Long work before the first time-out, which may be what others wait for: `Saving model checkpoint to
        /data/run`."""
        if self.first_wait is None and _has_stem(text, WORK_STEMS):
            work = WORK.search(text)
            if work is not None:
                self.context.work = work[0].strip()

    def _moment(self) -> LogMoment:
        """When the line was written that was read last."""
        return LogMoment(self._time, self._num_lines)

    def _read_time(self, text: str) -> None:
        """The time of a line, without the year, which not all stamps have: `2025-06-12 10:00:00,123`,
        or `E0612 10:00:00.123` as glog writes it."""
        stamp = STAMP.search(text, 0, STAMP_WITHIN)
        if stamp is None:
            return

        part = float(f"0.{stamp['part'] or 0}")
        clock = int(stamp["hour"]) * 3600 + int(stamp["minute"]) * 60 + int(stamp["second"])
        month = int(stamp["month"] or stamp["glog_month"])
        day = int(stamp["day"] or stamp["glog_day"])
        self._time = (month, day, clock + part)

    def kinds(self) -> set[str]:
        """Of all faults that are not only conditions."""
        names = self._kinds_of("cause", "failure", "symptom", "disconnect", "outcome", "echo")
        if self.first_wait:
            names.add("collective timeout")
        if self.waits.is_first:
            names.add("first collective")

        return names | self.failures()

    def last_wait(self) -> LoggedFault | None:
        """In what a log ends that says nothing of a failure."""
        has_failed = self.failures() or self._kinds_of("symptom") or "wrapped" in self.kinds()
        if self.first_wait or has_failed:
            return None

        first_end_line = self._num_lines - NUM_END_LINES
        waits = [
            fault
            for fault in self.messages.values()
            if fault.read.message.at_end and fault.last_line > first_end_line
        ]
        return max(waits, key=lambda fault: fault.last_line, default=None)

    def failures(self) -> set[str]:
        """Of the faults that do not only follow from others."""
        names = self._kinds_of("cause", "failure")
        if any(fault.is_exception for fault in self.plain.values()):
            names.add("exception")

        return names

    def _kinds_of(self, *roles: Role) -> set[str]:
        """Of the messages that have one of these roles."""
        messages = (fault.read.message for fault in self.messages.values())
        return {message.kind for message in messages if message.role in roles}


def _has_stem(text: str, stems: tuple[str, ...]) -> bool:
    """A search of a pattern takes long, and few lines have one of its words."""
    return any(stem in text for stem in stems)


def _exception_in(text: str) -> str | None:
    """An exception that ended something: one of a warning was handled.

    `[rank0]: KeyError: 'label'` has `KeyError: 'label'`."""
    exception = EXCEPTION.search(text) if _has_stem(text, EXCEPTION_NAMES) else None
    if exception is None or WARNING_BEFORE.search(text, 0, exception.start()):
        return None

    name = exception["name"]
    if exception["text"]:
        return f"{name}: {exception['text']}"

    # A log's label for what follows says nothing itself.
    is_label = name == "Exception" and exception.start("name") > 0
    return None if is_label else name
