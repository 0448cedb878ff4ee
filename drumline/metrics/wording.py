"""How events read on a screen: numbers, units, and the lines that the live and the plain display share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from drumline.metrics.events import RESERVED, Event
from drumline.text import duration, file_size, plural

# Everything in a train or evaluation event that is not a metric of the task.
_BOOKKEEPING = RESERVED | {"grad_norm"}
_MIN_DATA_SHARE = 0.05
# By the cause that a diagnosis names: what happened to the rank, or to its host.
_FAULTS = {
    "killed": "was killed",
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
    "slow": "was too slow",
    "unknown": "was blocked",
}


class Page(NamedTuple):
    """What is shown for a `start` or `end` event."""

    heading: str
    rows: list[tuple[str, str]]
    commands: list[tuple[str, str]]


def opening(event: Event) -> Page:
    ranks = plural(event["world_size"], "rank")
    low, high = math.floor(event["batch_size_per_rank"]), math.ceil(event["batch_size_per_rank"])
    per_rank = f"{low:,}" if low == high else f"{low:,} or {high:,}"
    batch = f"{event['batch_size']:,} a step: {ranks} x {per_rank}"
    if event["accumulate"] > 1:
        batch += f", in {event['accumulate']} micro-batches"
    if event.get("shards"):
        batch += f"; {event['shards']} shards, the same bits on any number of ranks"
    steps = plural(event["total_steps"], "step")
    rows = [
        ("model", f"{event['model_parameters']:,} parameters, {event['precision']}"),
        ("data", _data(event["train_samples"], event["eval_samples"])),
        ("batch", batch),
        ("rate", f"{learning_rate(event['lr'])} at its peak"),
        ("length", f"{plural(event['epochs'], 'epoch')}, {steps}" if event["epochs"] else steps),
        ("run folder", str(event["run"])),
    ]
    place = ", ".join(name for name in (event["device"], event["backend"]) if name)
    return Page(f"{event['task']} on {ranks} ({place})", rows, [])


def closing(event: Event) -> Page:
    rows = [(name, metric(name, value)) for name, value in metrics_of(event["metrics"]).items()]
    if event["samples_per_s"] > 0:  # a finished run that was started again took no step
        rows.append(("speed", speed(event["samples_per_s"])))
    if event.get("data_share", 0.0) >= _MIN_DATA_SHARE:
        rows.append(("waiting", f"for data {event['data_share']:.0%} of the time"))
    if event.get("best_step") is not None:
        rows.append(("best", f"the checkpoint of step {event['best_step']}"))
    rows += [("straggler", words) for words in event.get("stragglers", [])]
    rows.append(("run folder", str(event["run"])))
    commands = [
        (label, event[name])
        for label, name in (("to resume", "resume_command"), ("on two nodes", "two_node_command"))
        if event.get(name)
    ]
    return Page(f"done: {plural(event['step'], 'step')} in {duration(event['seconds'])}", rows, commands)


def line(event: Event) -> str | None:
    """An event as a line; None: its kind is shown in another way, or not at all."""
    match event["kind"]:
        case "resume":
            return f"resumed at step {event['step']} from {event['path']}"
        case "recovered":
            return recovered_line(event)
        case "first_step":
            return first_step_line(event)
        case "checkpoint":
            return checkpoint_line(event)
        case "note" | "straggler" | "stall":
            return str(event["message"])
        case "warning":
            return f"warning: {event['message']}"
        case "preempted":
            return preempted_line(event)
    return None


def evaluation_line(event: Event, epochs: int | None) -> str:
    parts = [f"{name} {metric(name, value)}" for name, value in metrics_of(event).items()]
    return "   ".join([epoch_of(event, epochs), *parts, f"in {duration(event['seconds'])}"])


def checkpoint_line(event: Event) -> str:
    written = f"saved step {event['step']} ({file_size(event['bytes'])} in {duration(event['seconds'])}"
    # Without a copy, training was paused until all was written.
    if event.get("copy", "none") != "none":
        written += f", training paused {duration(event['blocked_s'])}"
    return f"{written})"


def preempted_line(event: Event) -> str:
    by, rank = event["signal"], f"rank {event['told_rank']} on {event['told_host']}"
    cause = f"{by} to {rank}" if by.startswith("SIG") else f"{by} (seen by {rank})"
    return f"preempted by {cause}: saved step {event['step']}; rerun the same command to resume"


def recovered_line(event: Event) -> str:
    rank = "" if event["told_rank"] is None else f"rank {event['told_rank']} on "
    fault = f"{rank}{event['told_host']} {_FAULTS.get(event['cause'], 'failed')}"
    line, lost = f"resumed {duration(event['seconds'])} after {fault}", event["lost_steps"]
    if lost is None:
        return line
    return f"{line} at step {event['step'] - 1 + lost}; {plural(lost, 'step') if lost else 'no step'} lost"


def first_step_line(event: Event) -> str:
    """Parts of less than a hundredth are left out."""
    since = "the command" if event["since"] == "command" else "this rank began"
    seconds = event["seconds"]
    parts = [f"{name} {duration(part)}" for name, part in event["parts"].items() if part >= seconds / 100]
    return f"first step {duration(seconds)} after {since}: {', '.join(parts)}"


def step_of(event: Event, total_steps: int) -> str:
    """`step  70/460`, as wide for the first step as for the last."""
    return f"step {event['step']:>{len(str(total_steps))}}/{total_steps}"


def epoch_of(event: Event, epochs: int | None) -> str:
    """`epoch  7/20`, as wide for the first epoch as for the last."""
    return f"epoch {event['epoch']:>{len(str(epochs))}}/{epochs}" if epochs else f"epoch {event['epoch']}"


def metrics_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The task's own numbers in an event, the loss first."""
    found = {
        name: value for name, value in values.items() if name not in _BOOKKEEPING and isinstance(value, int | float)
    }
    return {name: found[name] for name in sorted(found, key=lambda name: name != "loss")}


def metric(name: str, value: float) -> str:
    """A metric as people write it: an accuracy in percent."""
    return f"{value:.2%}" if name.endswith("accuracy") else number(value)


def number(value: float) -> str:
    """Four decimals, or three digits of a small one: `2.3026`, `0.0400`, `1.20e-05`, `12,346`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{value:#.3g}"


def learning_rate(value: float) -> str:
    """Three digits: `0.1`, `0.0983`, `1.5e-05`."""
    return f"{value:.3g}"


def _data(train_samples: int | None, eval_samples: int | None) -> str:
    """`1,437 samples for training, 360 for evaluation`; None: a stream of unknown length."""
    training = "a stream" if train_samples is None else f"{train_samples:,} samples"
    if eval_samples == 0:
        return f"{training} for training"
    return f"{training} for training, {'a stream' if eval_samples is None else f'{eval_samples:,}'} for evaluation"


def speed(samples_per_s: float) -> str:
    """`8,123 samples/s`."""
    return f"{samples_per_s:{',.0f' if samples_per_s >= 100 else '.3g'}} samples/s"


def rates(event: Event) -> list[str]:
    """Of a `train` event: `lr 0.0983`, `8,123 samples/s` and, where it matters, `waits for data 12%`."""
    parts = [f"lr {learning_rate(event['lr'])}", speed(event["samples_per_s"])]
    share = event.get("data_share", 0.0)
    return [*parts, f"waits for data {share:.0%}"] if share >= _MIN_DATA_SHARE else parts


def wrap_command(command: str, *, width: int, indent: str) -> list[str]:
    """Lines of a shell command that fit the width and can be pasted as they are; no word is ever cut."""
    lines: list[str] = []
    for one in command.splitlines():
        # A word may have quoted pieces with blanks; each option stays with its value.
        words = re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", one)
        line = indent
        for option in re.split(r"\0(?=-)", "\0".join(words)):
            if line.strip() and len(line) + len(option) + 2 > width:
                lines.append(line + "\\")
                line = indent + "  "
            line += option.replace("\0", " ") + " "
        lines.append(line.rstrip())
    return lines
