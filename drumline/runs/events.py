"""Events: what happened in a run, as flat records that the log files, the display and the trackers
all read.

The engine reports to one `Reporter` per rank, which adds the common fields and passes the event to
its sinks. Every event has `time` (Unix seconds), `number` (from 0 in each process: a gap is a lost
event), `kind`, `rank`, `host` and `step` (the optimizer steps done so far); the other fields depend
on the kind:

| kind         | fields                                                                                        |
| ------------ | --------------------------------------------------------------------------------------------- |
| `start`      | task, world_size, device, backend, model_parameters, train_samples, eval_samples, batch_size, |
|              | batch_size_per_rank, accumulate, shards if elastic, precision, lr: the peak, lr_rates: how    |
|              | many peaks parameter groups have, epochs, total_steps: as many as were asked for, run         |
| `resume`     | epoch, path: the checkpoint that the run resumes from                                         |
| `recovered`  | cause, about_rank, about_host: the fault before the restart; seconds from it to the first     |
|              | step, seconds_to_diagnosis, lost_steps: steps that were repeated (null: unknown)              |
| `regrouped`  | nodes: those that train from this step on (`dist.on_lost_node`), lost, joined: since the step |
|              | before, seconds from the end of the last group to the first step of this one, message         |
| `first_step` | seconds from the command (since: `command`), or from the start of this rank if that is not    |
|              | known or the run was restarted (since: `rank`); parts: the seconds of each part of the start  |
| `train`      | epoch, loss, lr, samples_per_s, tokens_per_s, tflop_per_s, mfu, data_share,                   |
|              | communication_share, seconds_left, grad_norm if clipped, and the task's metrics               |
| `phases`     | phases_s: the seconds of this rank by heartbeat phase since its last `phases` event; in event |
|              | files only                                                                                    |
| `evaluation` | epoch, samples, seconds, and the metrics, `loss` among them                                   |
| `logged`     | name, type: `scalar`, `image` or `text`; value, or the path of an image in the run folder     |
| `checkpoint` | path, bytes, seconds until it was complete, copy (`device`, `pinned`, `host`, `none`: where   |
|              | the state was copied to), blocked_s: how long the loop was paused for it                      |
| `mirrored`   | newest: the step of the newest checkpoint in the mirror, -1: none; in event files only        |
| `note`       | message                                                                                       |
| `warning`    | message                                                                                       |
| `error`      | message                                                                                       |
| `straggler`  | message, about_rank (null: the whole host), about_host: the rank or host that is slow         |
| `stall`      | message, about_rank, about_host: the rank that blocks the run, which may still recover        |
| `preempted`  | signal, about_rank, about_host: the rank that was signalled; the run has saved this step      |
| `end`        | epoch, num_steps of this start, seconds;                                                      |
|              | start_s: of these, those to the end of the first step (null: no step);                        |
|              | samples_per_s, tokens_per_s, tflop_per_s, mfu, data_share, communication_share: of the steps  |
|              | after it, without log intervals in which something was compiled, if there are such steps;     |
|              | checkpoint_pause_s: the sum of blocked_s, run, resume_command, two_node_command, best_step,   |
|              | metrics, stragglers: a message for each, stopped: why a hook ended the run before its last    |
|              | step (null: none did)                                                                         |

`signal` is a signal's name, or the text of a spot notice. `lr` is that of the parameter group with
the highest peak, in `start` and in `train`. The numbers of samples and epochs are null for a
stream, whose length is unknown. The two commands are null on several nodes, where a rank does not
know its launcher's arguments. Samples, tokens and TFLOP a second are those of all ranks.
`tokens_per_s` is null if the data is not tokens, `tflop_per_s` if the model's FLOPs are unknown,
`mfu`, their fraction of the devices' peak, also if that is: on a CPU. `data_share` is the fraction
of the time, from 0 to 1, in which the loop waited for batches, `communication_share` that of
exposed communication in the rest of the time (null: one rank, or not measured: elastic and captured
steps). Both are the mean of all ranks, and together they are at most 1. `epoch` counts from 1: in
`train` it is the current epoch, in `evaluation` the one that has just finished, or the current one
with `train.eval_every_steps`. With several evaluation sets metrics are called `NAME/METRIC`.
Metrics that are more than one number are nested lists.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self

from drumline.base.untrusted import open_append, open_regular, parse_json

Kind = Literal[
    "start", "resume", "recovered", "regrouped", "first_step", "train", "phases", "evaluation", "logged", "checkpoint",
    "mirrored", "note", "warning", "error", "straggler", "stall", "preempted", "end"
]  # fmt: skip
Event = Mapping[str, Any]
Sink = Callable[[Event], None]

STAMP = frozenset({"time", "number", "kind", "rank", "host", "step"})
"""The fields of every event."""
RESERVED = STAMP | {
    "epoch", "lr", "samples_per_s", "tokens_per_s", "tflop_per_s", "mfu", "data_share", "communication_share",
    "seconds_left", "samples", "seconds",
}  # fmt: skip
"""The engine's own fields of a `train` or `evaluation` event: reserved names for metrics."""
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
MAX_LINE_BYTES = 16 << 20
"""A longer line is reported as unreadable, and never held in memory."""


class Reporter:
    """Adds the common fields to events and passes them to every sink, from any thread.

    A sink that fails with an OSError does not end the run, and does not hide the error that ends
    the run (a full disk affects the checkpoint and the log): the other sinks get a warning, once
    until it works again.
    """

    def __init__(self, sinks: Iterable[Sink], *, rank: int, host: str) -> None:
        self._sinks = list(sinks)
        self._failing: set[int] = set()
        self._rank = rank
        self._host = host
        self._step = 0
        self._number = 0
        self._lock = threading.RLock()

    def report(self, kind: Kind, **fields: Any) -> None:
        """Pass an event to all sinks; `step` defaults to the latest step that was reported."""
        with self._lock:
            step = fields.pop("step", self._step)
            # A checkpoint is reported when it is complete, some steps later.
            self._step = max(step, self._step)
            stamp = {"time": time.time(), "number": self._number, "kind": kind, "rank": self._rank}
            self._number += 1
            event = {**stamp, "host": self._host, "step": step, **fields}
            for index, sink in enumerate(self._sinks):
                try:
                    sink(event)
                except OSError as error:
                    if index not in self._failing:
                        self._failing.add(index)
                        self.report("warning", message=f"events are being lost: {error}")
                else:
                    self._failing.discard(index)

    def add(self, sink: Sink) -> None:
        """Hand it the events from now on."""
        self._sinks.append(sink)

    def close(self) -> None:
        for sink in self._sinks:
            close = getattr(sink, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines:
    """A file of JSON lines that stays readable after kills and full disks: the events, and the
    sample ledger.

    A process that is killed while it writes leaves an incomplete line. The next process starts a
    new line, and a reader gets the incomplete one as a line without a record.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = open_append(path)
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            self._is_line_complete = file.read() in (b"", b"\n")

    def append(self, text: str) -> None:
        """Add one line. It survives if the process is killed after this call."""
        line = text.encode() + b"\n"
        unwritten = line if self._is_line_complete else b"\n" + line
        # A write that fails half-way leaves an incomplete line; the next one then starts a new
        # line.
        self._is_line_complete = False
        with self._naming_the_file():
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        self._is_line_complete = True

    def flush(self) -> None:
        """Wait until all lines are on disk, so that they survive a power loss."""
        with self._naming_the_file():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """The system names none in the error of a file that is open."""
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            raise


class EventLog(JsonLines):
    """A sink that appends each event to a file as one line of JSON, without buffering.

    There is no fsync: the lines of a killed process survive anyway, and a step never waits for the
    disk.
    """

    def __call__(self, event: Event) -> None:
        self.append(json.dumps(as_json(event)))


class Line(NamedTuple):
    number: int
    """Counted from 1, as editors do."""
    record: dict[str, Any] | None
    """None: it is incomplete, or not a JSON object."""
    raw: bytes

    @property
    def is_ended(self) -> bool:
        """Whether it ends with a line break; only the last line of a file may not."""
        return self.raw.endswith(b"\n")


def read_json_lines(path: Path) -> Iterator[Line]:
    """Every line of a file in order, readable or not, except empty ones."""
    with open_regular(path) as file:
        for number, raw in enumerate(iter(lambda: _next_line(file), b""), start=1):
            if raw.strip():
                yield Line(number, parse_line(raw), raw)


def _next_line(file: BinaryIO) -> bytes:
    """The next line; if it is too long, only its beginning, and its line break if it has one."""
    raw = piece = file.readline(MAX_LINE_BYTES)
    while len(piece) == MAX_LINE_BYTES and not piece.endswith(b"\n"):
        piece = file.readline(MAX_LINE_BYTES)
        raw = raw[:80] + piece[-1:]
    return raw


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The record of a line; None: it is incomplete, or not a JSON object."""
    try:
        record = parse_json(raw)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Tail:
    """Reads the records of a file that grows, each once, when its line is complete."""

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        """`last_bytes`: of what is there when it is read first, read at most so many."""
        self._path = path
        self._read = 0
        self._last_bytes = last_bytes

    def new(self) -> list[dict[str, Any]]:
        try:
            size = self._path.stat().st_size
            if self._read == 0 and self._last_bytes is not None:
                self._read = max(0, size - self._last_bytes)
            if size <= self._read:
                return []
            with self._path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
        except OSError:
            return []
        complete = added[: added.rfind(b"\n") + 1]
        self._read += len(complete)
        records = map(parse_line, complete.splitlines())
        return [record for record in records if record is not None]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a log in order, without lines that a kill has cut off."""
    for line in read_json_lines(path):
        if line.record is not None:
            yield {name: _from_json(value) for name, value in line.record.items()}


def as_json(value: Any) -> Any:
    """The value in JSON's types, a dataclass as its fields; JSON has no NaN and no infinity, so these
    become strings."""
    if isinstance(value, Mapping):
        return {str(name): as_json(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    return value if value is None or isinstance(value, str | int) else str(value)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _from_json(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
