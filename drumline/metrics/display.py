"""The display of rank 0: events as text, and plain lines for log files and pipes. `live` draws on a
terminal.

Errors are not shown here.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TextIO

from drumline.base.errors import as_lines
from drumline.base.json_output import LEVELS, object_line
from drumline.base.text import clock, duration, file_size, plural, show, show_lines
from drumline.runs.events import RESERVED, Event, as_json

_LABEL_WIDTH = 12
_SECONDS_BETWEEN_STEPS = 5.0

# The fields of a train or evaluation event that are not metrics of the task.
_BOOKKEEPING = RESERVED | {"grad_norm"}
_MIN_SHARE = 0.05

# What happened to the rank, or to its host, by the cause of the diagnosis.
_FAULTS = {
    "exception": "crashed",
    "killed": "was killed",
    "ended": "was killed by drumline",
    "out_of_memory": "ran out of memory",
    "stopped": "was stopped",
    "debugged": "was held by a debugger",
    "dataset": "was blocked in its dataset",
    "user_code": "was blocked in its code",
    "gil": "was blocked with the GIL held",
    "not_entered": "did not enter a collective",
    "mismatch": "was in a different collective",
    "left_early": "left the loop early",
    "teardown": "did not exit",
    "unreachable": "was unreachable",
    "storage": "was blocked in storage",
    "compiling": "was compiling",
    "slow": "was too slow",
    "unknown": "was blocked",
}


class Display:
    """Shows nothing; the base class of the displays."""

    def __init__(self) -> None:
        self.epochs: int | None = None
        """Of the whole run; None: it is not counted in epochs."""

        self.total_steps = 0
        """Of the whole run."""

        self._logged_at: dict[str, float] = {}
        """By name: when a logged value was last shown."""

    def __call__(self, event: Event) -> None:
        """Show one event: with the method named after its kind if there is one, otherwise as a
        line."""
        if event["kind"] == "start":
            self.epochs = event["epochs"]
            self.total_steps = event["total_steps"]

        show = getattr(self, f"show_{event['kind']}", None)
        if show is not None:
            show(event)
            return

        line = event_line(event)
        if line is not None:
            self.show_line(event, line)

    def show_start(self, event: Event) -> None:
        """What the run is."""
        self.show_page(event, opening_page(event))

    def show_end(self, event: Event) -> None:
        """What it came to."""
        self.show_page(event, closing_page(event))

    def show_logged(self, event: Event) -> None:
        """A name at most every few seconds."""
        last_time = self._logged_at.get(event["name"], float("-inf"))
        if event["time"] - last_time >= _SECONDS_BETWEEN_STEPS:
            self._logged_at[event["name"]] = event["time"]
            self.show_line(event, logged_line(event))

    def show_line(self, event: Event, line: str) -> None:
        """Of an event between start and end."""

    def show_page(self, event: Event, page: Page) -> None:
        """Of the start, or the end."""

    def close(self) -> None:
        """Restore the terminal's state; what is on the screen stays."""


class PlainDisplay(Display):
    """Lines for log files and pipes; steps are shown at most every few seconds."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._last_train_time = float("-inf")
        """When a step was last shown."""

    def show_train(self, event: Event) -> None:
        """`step  70/460   loss 0.5000   lr 0.0983   8,123 samples/s   0:12 left`."""
        if event["time"] - self._last_train_time < _SECONDS_BETWEEN_STEPS:
            return

        self._last_train_time = event["time"]
        parts = [
            step_of(event, self.total_steps),
            f"loss {number_text(event['loss'])}",
            *rates(event),
            f"{clock(event['seconds_left'])} left",
        ]
        self.show_line(event, "   ".join(parts))

    def show_evaluation(self, event: Event) -> None:
        self.show_line(event, evaluation_line(event, self.epochs))

    def show_line(self, event: Event, line: str) -> None:
        """With the time of day; further lines of it are indented."""
        now = time.strftime("%H:%M:%S", time.localtime(event["time"]))
        first, *items = as_lines(line)
        show_lines([f"{now} {first}", *(f"  {item}" for item in items)], stream=self._stream)

    def show_page(self, event: Event, page: Page) -> None:
        """The heading, the rows, then each command below what it is for."""
        lines = [page.heading]
        lines += [f"  {label:<{_LABEL_WIDTH}} {value}" for label, value in page.rows]
        for label, command in page.commands.items():
            lines += [f"  {label}", f"    {command}"]

        show_lines(lines, stream=self._stream)


class JsonDisplay(PlainDisplay):
    """The same lines as JSON objects, with the fields of the events."""

    def show_page(self, event: Event, page: Page) -> None:
        """The heading says it; the rows are fields of the event."""
        self.show_line(event, page.heading)

    def show_line(self, event: Event, line: str) -> None:
        kind = event["kind"]
        fields = {name: event[name] for name in event if name not in ("time", "kind", "message")}
        fields = as_json({"event": kind, **fields})
        text = object_line(event["time"], LEVELS.get(kind, "info"), line, fields)
        show(text, stream=self._stream, is_data=True)


class Page(NamedTuple):
    """What is shown for a `start` or `end` event."""

    heading: str
    """A line."""

    rows: list[tuple[str, str]]
    """Labels and values."""

    commands: dict[str, str]
    """By what they are for."""


def opening_page(event: Event) -> Page:
    """Of a `start` event: the model, the data, how long it will train."""
    length = plural(event["total_steps"], "step")
    if event["epochs"]:
        length = f"{plural(event['epochs'], 'epoch')}, {length}"

    rows = [
        ("model", f"{event['model_parameters']:,} parameters, {event['precision']}"),
        ("data", _samples(event)),
        ("batch", _batch(event)),
        ("rate", _peak_rate(event)),
        ("length", length),
        ("run folder", str(event["run"])),
    ]

    ranks = plural(event["world_size"], "rank")
    device = ", ".join(filter(None, [event["device"], event["backend"]]))
    return Page(f"{event['task']} on {ranks} ({device})", rows, {})


def _samples(event: Event) -> str:
    """A stream has no number of samples."""
    training = event["train_samples"]
    data = "a stream" if training is None else f"{training:,} samples"
    data += " for training"

    evaluation = event["eval_samples"]
    if evaluation is None:
        data += ", a stream for evaluation"
    elif evaluation > 0:
        data += f", {evaluation:,} for evaluation"
    return data


def _batch(event: Event) -> str:
    """`64 a step: 2 ranks x 32, in 4 micro-batches`."""
    low = math.floor(event["batch_size_per_rank"])
    high = math.ceil(event["batch_size_per_rank"])
    per_rank = f"{low:,}" if low == high else f"{low:,} or {high:,}"

    batch = f"{event['batch_size']:,} a step: {plural(event['world_size'], 'rank')} x {per_rank}"
    if event["accumulate"] > 1:
        batch += f", in {event['accumulate']} micro-batches"
    if event.get("shards"):
        batch += f"; {event['shards']} shards, the same bits on any number of ranks"
    return batch


def _peak_rate(event: Event) -> str:
    """`0.1 at its peak`."""
    rate = f"{event['lr']:.3g} at its peak"
    num_rates = event.get("lr_rates", 1)
    if num_rates == 1:
        return rate
    return f"{rate}, the highest of the {num_rates} rates of parameter groups"


def closing_page(event: Event) -> Page:
    """Of an `end` event: the last metrics, how fast it was, and what to do next."""
    metrics = metrics_of(event["metrics"])
    rows = [(name, metric_text(name, value)) for name, value in metrics.items()]
    rows += _time_rows(event)

    if event.get("best_step") is not None:
        rows.append(("best", f"the checkpoint of step {event['best_step']}"))
    if event.get("stopped"):
        rows.append(("stopped", str(event["stopped"])))

    rows += [("straggler", message) for message in event.get("stragglers", [])]
    rows.append(("run folder", str(event["run"])))

    commands = {}
    if event.get("resume_command"):
        commands["to resume"] = event["resume_command"]
    if event.get("two_node_command"):
        commands["on two nodes"] = event["two_node_command"]
    return Page(_closing_heading(event), rows, commands)


def _time_rows(event: Event) -> Iterator[tuple[str, str]]:
    """How fast it was, and where time was lost."""
    if event["samples_per_s"] > 0:  # a finished run that was started again took no step
        yield "speed", ", ".join(speeds(event))

    if event.get("start_s") is not None:
        start = duration(event["start_s"])
        yield "first step", f"{start} with warm-up, not part of the speed"

    data_share = event.get("data_share", 0.0)
    if data_share >= _MIN_SHARE:
        yield "waiting", f"for data {data_share:.0%} of the time"

    communication_share = event.get("communication_share") or 0.0
    if communication_share >= _MIN_SHARE:
        yield "exposed", f"communication {communication_share:.0%} of the time"

    if pause_s := event.get("checkpoint_pause_s"):
        yield "saves", f"paused training {duration(pause_s)} in all"


def _closing_heading(event: Event) -> str:
    """All steps of the run, and the time of this start."""
    steps = plural(event["step"], "step")
    num_steps = event.get("num_steps", event["step"])
    if num_steps == 0:
        return f"done: {steps}, all before this start"

    seconds = duration(event["seconds"])
    if num_steps < event["step"]:
        steps += f", the last {num_steps:,}"
    return f"done: {steps} in {seconds}"


def event_line(event: Event) -> str | None:
    """An event as a line; None: its kind is shown in another way, or not at all."""
    match event["kind"]:
        case "resume":
            return f"resumed at step {event['step']} from {event['path']}"
        case "recovered":
            return _recovered_line(event)
        case "first_step":
            return _first_step_line(event)
        case "checkpoint":
            return _checkpoint_line(event)
        case "preempted":
            return _preempted_line(event)
        case "note" | "straggler" | "stall" | "regrouped":
            return str(event["message"])
        case "warning":
            return f"warning: {event['message']}"

    return None


def _first_step_line(event: Event) -> str:
    """`first step 6.1 s after the command: loading torch 2.1 s, ...`, without what took no time."""
    since = "the command" if event["since"] == "command" else "this rank began"
    total = event["seconds"]
    parts = [
        f"{name} {duration(seconds)}"
        for name, seconds in event["parts"].items()
        if seconds >= total / 100
    ]
    return f"first step {duration(total)} after {since}: {', '.join(parts)}"


def _checkpoint_line(event: Event) -> str:
    """`saved step 23 (660 kB in 33 ms, training paused 6 ms)`."""
    details = f"{file_size(event['bytes'])} in {duration(event['seconds'])}"

    # Without a copy, training was paused until the save was complete.
    if event.get("copy", "none") != "none":
        details += f", training paused {duration(event['blocked_s'])}"
    return f"saved step {event['step']} ({details})"


def _preempted_line(event: Event) -> str:
    """`preempted by SIGTERM to rank 0 on gpu-01: saved step 23; ...`."""
    notice = event["signal"]  # or the text of a spot notice
    rank = f"rank {event['about_rank']} on {event['about_host']}"
    cause = f"{notice} to {rank}" if notice.startswith("SIG") else f"{notice} (seen by {rank})"
    return f"preempted by {cause}: saved step {event['step']}; rerun the same command to resume"


def _recovered_line(event: Event) -> str:
    """`resumed 12.3 s after rank 1 on gpu-01 was killed at step 23; 3 steps lost`."""
    who = event["about_host"]
    if event["about_rank"] is not None:
        who = f"rank {event['about_rank']} on {who}"
    fault = _FAULTS.get(event["cause"], "failed")
    line = f"resumed {duration(event['seconds'])} after {who} {fault}"

    num_lost = event["lost_steps"]
    if num_lost is None:
        return line

    lost_steps = plural(num_lost, "step") if num_lost else "no step"
    return f"{line} at step {event['step'] - 1 + num_lost}; {lost_steps} lost"


def logged_line(event: Event) -> str:
    """`step 40: distance 0.1234`, of text the beginning, of an image its file."""
    value = event.get("value", event.get("path"))
    text = number_text(value) if isinstance(value, float) else str(value)
    short_text = textwrap.shorten(text, 100, placeholder="...")
    return f"step {event['step']}: {event['name']} {short_text}"


def evaluation_line(event: Event, epochs: int | None) -> str:
    """`epoch 1/3   loss 0.5000   accuracy 90.00%   in 1.2 s`."""
    seconds = f"in {duration(event['seconds'])}"
    return "   ".join([epoch_of(event, epochs), *metric_parts(event), seconds])


def metric_parts(event: Event) -> list[str]:
    """`loss 0.5000`, `accuracy 90.00%`."""
    return [f"{name} {metric_text(name, value)}" for name, value in metrics_of(event).items()]


def step_of(event: Event, total_steps: int) -> str:
    """`step  70/460`, as wide for the first step as for the last."""
    return f"step {event['step']:>{len(str(total_steps))}}/{total_steps}"


def epoch_of(event: Event, epochs: int | None) -> str:
    """`epoch  7/20`, as wide for the first epoch as for the last."""
    if not epochs:
        return f"epoch {event['epoch']}"
    return f"epoch {event['epoch']:>{len(str(epochs))}}/{epochs}"


def rates(event: Event) -> list[str]:
    """`lr 0.0983`, the speeds and, where it matters, `waits for data 12%`, from a `train` event."""
    shares = {
        "waits for data": event.get("data_share") or 0.0,
        "exposed communication": event.get("communication_share") or 0.0,
    }
    waits = [f"{label} {share:.0%}" for label, share in shares.items() if share >= _MIN_SHARE]
    return [f"lr {event['lr']:.3g}", *speeds(event), *waits]


def speeds(event: Event) -> list[str]:
    """`8,123 samples/s`, `1,039,744 tokens/s`, `412 TFLOP/s`, `MFU 41.7%`, as far as they are
    known."""
    parts = [speed(event["samples_per_s"])]
    tokens = event.get("tokens_per_s")
    if tokens is not None:
        parts.append(speed(tokens, "tokens/s"))

    tflops = event.get("tflop_per_s")
    if tflops is not None and tflops >= 1:
        parts.append(f"{tflops:.3g} TFLOP/s")
    elif tflops is not None:
        parts.append(f"{1000 * tflops:.3g} GFLOP/s")

    mfu = event.get("mfu")
    if mfu is not None:
        parts.append(f"MFU {mfu:.1%}")

    return parts


def speed(number: float, unit: str = "samples/s") -> str:
    """`8,123 samples/s`."""
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The task's own numbers in an event, the loss first."""
    metrics = {
        name: value
        for name, value in values.items()
        if name not in _BOOKKEEPING and isinstance(value, int | float)
    }
    return {name: metrics[name] for name in sorted(metrics, key=lambda name: name != "loss")}


def metric_text(name: str, value: float) -> str:
    """A metric as text: an accuracy in percent."""
    return f"{value:.2%}" if name.endswith("accuracy") else number_text(value)


def number_text(value: float) -> str:
    """Four decimals, or three digits of a small one: `2.3026`, `0.0400`, `1.20e-05`, `12,346`."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if size >= 0.1 else f"{value:#.3g}"
