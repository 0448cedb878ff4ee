"""Errors with their exit codes, and warnings.

A message answers three questions: what happened (with values), where (host, rank, step) and what to
do next. The code that raises an error knows what and what next; the code that reports it adds where
with `located`.
"""

from __future__ import annotations

import difflib
import logging
import re
import shlex
import threading
import traceback
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, replace
from enum import IntEnum
from importlib.metadata import requires
from typing import Any, Self

from drumline.base.text import one_line, print_message

# The beginning of a list item; any other newline in a message came with a value.
_ITEM = re.compile(r"\n  (?=[-|] )")


class ExitCode(IntEnum):
    """The exit codes of `drumline`. Scripts may rely on these numbers."""

    SUCCESS = 0
    TRAINING_FAILED = 1
    SOMETHING_WRONG = 1
    """The same number, for a verb that searches for problems."""
    USAGE = 2
    PREFLIGHT_FAILED = 3
    HANG = 70
    PREEMPTED = 75
    INTERRUPTED = 130


@dataclass(frozen=True)
class Place:
    """Where something happened; what is not known is left out of the message."""

    host: str | None = None
    rank: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        step = None if self.step is None else f"step {self.step}"
        process = " on ".join(filter(None, [rank, self.host]))
        return ", ".join(filter(None, [process, step]))

    def clause(self, verb: str) -> str:
        """`rank 3 on gpu-02 crashed at step 1841`, with the verb `crashed`."""
        at_step = "" if self.step is None else f" at step {self.step}"
        return f"{replace(self, step=None)} {verb}{at_step}"


class DrumlineError(Exception):
    """The base class: one sentence about what happened, and one about what to do next."""

    exit_code = ExitCode.TRAINING_FAILED
    lost_first_node = False
    """Whether a node failed only because the first node is lost: it may join a new rendezvous there."""

    def __init__(
        self, what: str, *, next_step: str | None = None, place: Place | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.next_step = next_step
        self.place = place or Place()

    def located(self, place: Place) -> Self:
        """Add where it happened; what the error already knows about its place is kept."""
        parts = {name: value for name, value in vars(self.place).items() if value is not None}
        self.place = replace(place, **parts)
        return self

    def lines(self) -> list[str]:
        """What and where, the items of a list, and what next. Newlines in values are escaped."""
        place = str(self.place)
        sentence = f"{self.what} [{place}]" if place else self.what
        lines = as_lines(sentence)
        if self.next_step:
            lines.append(one_line(f"try: {self.next_step}"))
        return lines

    def __str__(self) -> str:
        return "\n  ".join(self.lines())


class UsageError(DrumlineError):
    """The command or its configuration cannot be run as given."""

    exit_code = ExitCode.USAGE


class ConfigError(UsageError):
    """One or more settings are wrong; all of them are listed."""

    def __init__(self, problems: Iterable[str], *, next_step: str | None = None) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        heading = f"{count} problem{'s' if count != 1 else ''} in the configuration:"
        super().__init__(as_list(heading, self.problems), next_step=next_step)


class PreflightError(DrumlineError):
    """The run was stopped before its first step because the ranks differ or cannot reach each
    other."""

    exit_code = ExitCode.PREFLIGHT_FAILED


class DataError(PreflightError):
    """A dataset is missing or is not what it should be."""


class MissingExtraError(UsageError):
    """A feature needs a package that is not part of the core install."""

    def __init__(self, feature: str, *, extra: str) -> None:
        # Not 'drumline[extra]': no package index has drumline, and whoever took the name there
        # could run code here.
        packages = [
            requirement.partition(";")[0].strip()
            for requirement in requires("drumline") or ()
            if f'extra == "{extra}"' in requirement
        ]
        command = shlex.join(["pip", "install", *packages])
        super().__init__(f"{feature} needs a package that is not installed", next_step=command)


class CheckpointError(DrumlineError):
    """A checkpoint could not be written or read."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint does not fit the model or optimizer that it is loaded into: a restart would not
    help."""

    exit_code = ExitCode.USAGE


class OptimizerMismatchError(CheckpointMismatchError):
    """The model fits, the optimizer does not."""


class TrainingError(DrumlineError):
    """The run failed during training."""


class NonFiniteError(TrainingError):
    """A loss or a weight is NaN or infinite: after a restart the same steps would lead to it."""


class UnusedParametersError(TrainingError):
    """A step leaves out parameters that other ranks may wait for: after a restart the same batch
    would lead to it."""


class TrialError(TrainingError):
    """A kind of step ran out of memory while `--train.step auto` tried it: a restart does not try
    it again."""


class HangError(DrumlineError):
    """The run was stopped because it hangs, or fails repeatedly at the same step: a restart would
    not help."""

    exit_code = ExitCode.HANG


def as_list(heading: str, items: Iterable[str]) -> str:
    """The text of an error that consists of a heading and several items."""
    return "\n".join([heading, *(f"  - {one_line(item)}" for item in items)])


def as_lines(text: str) -> list[str]:
    """The heading and the items of such a message, or its one line."""
    return [one_line(line) for line in _ITEM.split(text)]


def did_you_mean(word: str, choices: Iterable[str], *, known_as: str = "known") -> str:
    """The end of a message about an unknown name: the nearest known one, otherwise all of them."""
    names = sorted(choices)
    nearest = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean {nearest[0]!r}?" if nearest else f"{known_as}: {', '.join(names)}"


class _HarmlessLog(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        if isinstance(msg, DrumlineError):
            msg = f"{msg.what}. Try: {msg.next_step}" if msg.next_step else msg.what
        lines = as_lines(str(msg))
        if kwargs.pop("exc_info", None):
            lines += map(one_line, traceback.format_exc().splitlines())
        return "\n  ".join(lines), kwargs


log = _HarmlessLog(logging.getLogger("drumline"), {})
"""For warnings: `log.warning(...)` goes to the logger `drumline`, with control characters escaped.
In a user's own loop logging may not be configured; Python then prints the lines as they are."""


class _AsMessage(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print_message(*self.format(record).splitlines())


def report_uncaught_errors() -> None:
    """For a command: report exceptions of threads and asyncio tasks, which Python would print
    without escaping."""

    def report(failed: threading.ExceptHookArgs) -> None:
        lines = traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
        print_message(f"error: a thread failed: {failed.exc_value!r}", *"".join(lines).splitlines())

    threading.excepthook = report
    asyncio_log = logging.getLogger("asyncio")
    if not asyncio_log.handlers:
        asyncio_log.addHandler(_AsMessage())
        asyncio_log.propagate = False


def summary(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called before the end of the run"
    sentence = type(error).__name__
    if lines := str(error).strip().splitlines():
        sentence = f"{sentence}: {lines[0]}"
    # the first says which code it came from, if any does
    notes = getattr(error, "__notes__", [])
    if notes:
        first_line = notes[0].partition("\n")[0]
        sentence = f"{sentence} ({first_line})"
    return sentence
