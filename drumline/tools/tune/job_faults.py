"""What lines of a job's log report as wrong: messages that are known, exceptions, time-outs of
collectives, and lines that look like an error and are not known."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from drumline.tools.tune.collective_waits import CollectiveWaits, rank_in
from drumline.tools.tune.known_messages import (
    FaultContext,
    KnownMessage,
    LinePlace,
    Role,
    known_messages,
)

MAX_UNEXPLAINED = 200
MAX_TEXT = 200
MAX_WAIT_PLACES = 1000
MAX_FAULT_PLACES = 20  # of lines that say the same
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
WORK_STEMS = (
    "okeniz", "rocess", "valuat", "alidat", "enerat", "redict", "sav", "Sav", "ownload", "oading", "uilding", "aching",
    "Map", "ilter", "xtract", "ompiling", "onvert",
)  # fmt: skip


@dataclass(frozen=True, order=True)
class LogMoment:
    """When a line was written: its time or that of the line before, and its place."""

    time: tuple[int, int, float]
    number: int


@dataclass(frozen=True, kw_only=True)
class LoggedFault:
    message: KnownMessage
    what: str
    fix: str
    origin: str
    """A key of its process, or where it is, for lines that name no process."""
    moment: LogMoment
    places: list[LinePlace] = field(default_factory=list)
    """Of its line, and of some that say the same."""
    is_info: bool = False
    """NCCL went on after it."""


@dataclass(kw_only=True)
class PlainFault:
    """An exception or a line that is not explained, as it is."""

    text: str
    origin: str
    moment: LogMoment
    is_exception: bool
    is_warning: bool  # of NCCL
    places: tuple[LinePlace, ...] = ()
    num_like_it: int = 1


@dataclass(kw_only=True)
class LogLine:
    text: str
    source: str = ""  # NCCL's source file, which is part of some messages
    origin: str = ""  # a key of its process, for lines of NCCL
    file: str = ""
    rank: int | None = None
    is_info: bool = False
    is_warning: bool = False
    setting: str = ""  # of its process, which some messages show


@dataclass
class JobFaults:
    messages: dict[tuple[str, str, str], LoggedFault] = field(default_factory=dict)
    plain: dict[str, PlainFault] = field(default_factory=dict)
    waits: CollectiveWaits = field(default_factory=CollectiveWaits)
    first_wait: LogMoment | None = None
    wait_places: list[LinePlace] = field(default_factory=list)
    context: FaultContext = field(default_factory=FaultContext)
    ranks: set[int] = field(default_factory=set)  # all that torch's lines name
    work: str = ""  # the last long work before the first time-out
    num_unkept: int = 0  # lines that are not explained, beyond those that are kept
    _num_lines: int = 0
    _num_lines_of: Counter[str] = field(default_factory=Counter)  # of a process or a file
    _time: tuple[int, int, float] = (0, 0, 0.0)

    def begin_file(self) -> None:
        self._time = (0, 0, 0.0)

    def read(self, line: LogLine) -> None:
        self._num_lines += 1
        self._read_time(line.text)
        if line.rank is None:
            line.rank = rank_in(line.text)
        if line.rank is not None:
            self.ranks.add(line.rank)
        self._num_lines_of.update({self._origin(line), line.file})
        self.context.read(line.text, self._places(line)[0])
        if self.waits.read(line.text, line.rank):
            self.first_wait = self.first_wait or self._moment()
            if len(self.wait_places) < MAX_WAIT_PLACES:
                self.wait_places.extend(self._places(line))
            return
        read = known_messages().read(
            line.source + line.text, is_info=line.is_info, setting=line.setting
        )
        if read is None or (read.message.is_harmless and EXCEPTION.search(line.text)):
            self._read_unknown(line)
        elif not read.message.is_harmless:
            self._add(LoggedFault(
                message=read.message, what=read.what, fix=read.fix, origin=self._origin(line), moment=self._moment(),
                places=[*self._places(line)], is_info=line.is_info,
            ))  # fmt: skip

    def _places(self, line: LogLine) -> tuple[LinePlace, ...]:
        """Among the lines of its process, and of its file: not all lines name their process."""
        names = dict.fromkeys((self._origin(line), line.file))
        return tuple(LinePlace(name, self._num_lines_of[name]) for name in names)

    def _origin(self, line: LogLine) -> str:
        of_torch = line.file if line.rank is None else f"rank {line.rank}"
        return line.origin or of_torch

    def _add(self, fault: LoggedFault) -> None:
        key = (fault.message.kind, fault.what, fault.origin)
        earlier = self.messages.get(key)
        if earlier is None:
            self.messages[key] = fault
        elif len(earlier.places) < MAX_FAULT_PLACES:
            earlier.places.extend(fault.places)

    def _read_unknown(self, line: LogLine) -> None:
        if line.is_info:
            return
        exception = _exception_in(line.text)
        if exception is not None:
            text = exception["name"] + (f": {exception['text']}" if exception["text"] else "")
            self._add_plain(line, text, is_exception=True)
        elif line.is_warning:
            self._add_plain(line, f"NCCL warns: {line.text}", is_exception=False)
        elif _looks_wrong(line.text):
            self._add_plain(line, line.text, is_exception=False)
        elif not self.first_wait and any(stem in line.text for stem in WORK_STEMS):
            work = WORK.search(line.text)
            self.work = self.work if work is None else work[0].strip()

    def _add_plain(self, line: LogLine, text: str, *, is_exception: bool) -> None:
        origin = self._origin(line)
        shape = f"{origin}\n{text.translate(DIGITS)}"
        fault = self.plain.get(shape)
        if fault is not None:
            fault.num_like_it += 1
        elif len(self.plain) < MAX_UNEXPLAINED:
            self.plain[shape] = PlainFault(
                text=text[:MAX_TEXT],
                origin=origin,
                moment=self._moment(),
                is_exception=is_exception,
                is_warning=line.is_warning,
                places=self._places(line),
            )
        else:
            self.num_unkept += 1

    def _moment(self) -> LogMoment:
        return LogMoment(self._time, self._num_lines)

    def _read_time(self, text: str) -> None:
        """Without the year, which not all stamps have."""
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
        if self.waits:
            names.add("collective timeout")
        if self.waits.is_first:
            names.add("first collective")
        return names | self.failures()

    def failures(self) -> set[str]:
        """Of the faults that do not only follow from others."""
        names = self._kinds_of("cause", "failure")
        if any(fault.is_exception for fault in self.plain.values()):
            names.add("exception")
        return names

    def _kinds_of(self, *roles: Role) -> set[str]:
        return {
            fault.message.kind for fault in self.messages.values() if fault.message.role in roles
        }


def _looks_wrong(text: str) -> bool:
    """A search of the pattern takes long, and few lines have one of its words."""
    return any(stem in text for stem in WRONG_STEMS) and LOOKS_WRONG.search(text) is not None


def _exception_in(text: str) -> re.Match[str] | None:
    """An exception that ended something: one of a warning was handled."""
    if not any(name in text for name in EXCEPTION_NAMES):
        return None
    exception = EXCEPTION.search(text)
    # A log's label for what follows says nothing itself.
    if exception is not None and exception["name"] == "Exception" and not exception["text"]:
        exception = None if exception.start("name") else exception
    if exception is None or WARNING_BEFORE.search(text, 0, exception.start()):
        return None
    return exception
