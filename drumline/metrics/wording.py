"""How events read on a screen: numbers, units, and the lines that the live and the plain display share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from drumline.metrics.events import STAMP, Event
from drumline.text import duration, file_size, plural

# Everything in a train or evaluation event that is not a metric of the task.
_BOOKKEEPING = STAMP | {
    "epoch", "lr", "samples_per_s", "data_share", "seconds_left", "grad_norm", "samples", "seconds"
}  # fmt: skip
_SHARE_WORTH_SAYING = 0.05
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
    """What is shown when a run starts or ends."""

    heading: str
    rows: list[tuple[str, str]]
    commands: list[tuple[str, str]]


def opening(event: Event) -> Page:
    """A `start` event as a page."""
    ranks = plural(event["world_size"], "rank")
    batch = f"{count(event['batch_size'])} a step: {ranks} x {_share(event['batch_size_per_rank'])}"
    if event["accumulate"] > 1:
        batch += f", in {event['accumulate']} micro-batches"
    if event.get("shards"):
        batch += f"; {event['shards']} shards, the same bits on any number of ranks"
    steps = plural(event["total_steps"], "step")
    rows = [
        ("model", f"{count(event['model_parameters'])} parameters, {event['precision']}"),
        ("data", _data(event["train_samples"], event["eval_samples"])),
        ("batch", batch),
        ("rate", f"{learning_rate(event['lr'])} at its peak"),
        ("length", f"{plural(event['epochs'], 'epoch')}, {steps}" if event["epochs"] else steps),
        ("run folder", str(event["run"])),
    ]
    place = ", ".join(name for name in (event["device"], event["backend"]) if name)
    return Page(f"{event['task']} on {ranks} ({place})", rows, [])


def closing(event: Event) -> Page:
    """An `end` event as a page."""
    rows = [(name, metric(name, value)) for name, value in metrics_of(event["metrics"]).items()]
    if event["samples_per_s"] > 0:  # a finished run that was started again took no step
        rows.append(("speed", speed(event["samples_per_s"])))
    rows += [("waiting", f"for data {share} of the time") for share in _share_of_waiting(event)]
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


def evaluation_line(event: Event, epochs: int | None) -> str:
    """An `evaluation` event as the words after its time."""
    parts = [f"{name} {metric(name, value)}" for name, value in metrics_of(event).items()]
    return "   ".join([epoch_of(event, epochs), *parts, f"in {duration(event['seconds'])}"])


def checkpoint_line(event: Event) -> str:
    """A `checkpoint` event as a sentence."""
    written = f"saved step {event['step']} ({file_size(event['bytes'])} in {duration(event['seconds'])}"
    # Without a copy, training was paused until all was written.
    if event.get("copy", "none") != "none":
        written += f", training paused {duration(event['blocked_s'])}"
    return f"{written})"


def preempted_line(event: Event) -> str:
    """A `preempted` event as a sentence."""
    by, rank = event["signal"], f"rank {event['told_rank']} on {event['told_host']}"
    told = f"{by} to {rank}" if by.startswith("SIG") else f"{by} (seen by {rank})"
    return f"preempted by {told}: saved step {event['step']}; rerun the same command to resume"


def recovered_line(event: Event) -> str:
    """A `recovered` event as a sentence."""
    rank = "" if event["told_rank"] is None else f"rank {event['told_rank']} on "
    fault = f"{rank}{event['told_host']} {_FAULTS.get(event['cause'], 'failed')}"
    line, lost = f"resumed {duration(event['seconds'])} after {fault}", event["lost_steps"]
    if lost is None:
        return line
    return f"{line} at step {event['step'] - 1 + lost}; {plural(lost, 'step') if lost else 'no step'} lost"


def first_step_line(event: Event) -> str:
    """A `first_step` event as a sentence; parts of less than a hundredth are left out."""
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
        name: value
        for name, value in values.items()
        if name not in _BOOKKEEPING and isinstance(value, int | float)
    }
    return {name: found[name] for name in sorted(found, key=lambda name: name != "loss")}


def metric(name: str, value: float) -> str:
    """A metric as people write it: an accuracy in percent."""
    return f"{value:.2%}" if name.endswith("accuracy") else number(value)


def number(value: float) -> str:
    """Four decimals where they say something: `2.3026`, `0.0400`, `1.20e-05`, `12,346`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.1 else f"{value:#.3g}"


def learning_rate(value: float) -> str:
    """Three digits: `0.1`, `0.0983`, `1.5e-05`."""
    return f"{value:.3g}"


def _data(train_samples: int | None, eval_samples: int | None) -> str:
    """`1,437 samples for training, 360 for evaluation`; of a stream nobody knows how many they are."""
    training = "a stream" if train_samples is None else f"{count(train_samples)} samples"
    if eval_samples == 0:
        return f"{training} for training"
    return f"{training} for training, {'a stream' if eval_samples is None else count(eval_samples)} for evaluation"


def _share(samples: float) -> str:
    """A rank's part of a batch, which may not come out even: `32`, `21 or 22`."""
    low, high = math.floor(samples), math.ceil(samples)
    return count(low) if low == high else f"{count(low)} or {count(high)}"


def count(value: float) -> str:
    """`1,437`."""
    return f"{value:,.0f}"


def speed(samples_per_s: float) -> str:
    """`8,123 samples/s`."""
    return f"{count(samples_per_s) if samples_per_s >= 100 else f'{samples_per_s:.3g}'} samples/s"


def waiting(event: Event) -> list[str]:
    """`waits for data 12%`, where that is worth a word."""
    return [f"waits for data {share}" for share in _share_of_waiting(event)]


def _share_of_waiting(event: Event) -> list[str]:
    share = event.get("data_share", 0.0)
    return [f"{share:.0%}"] if share >= _SHARE_WORTH_SAYING else []


def wrap_command(command: str, *, width: int, indent: str) -> list[str]:
    """Lines of a shell command that fit the width and can be pasted as they are; no word is ever cut."""
    lines: list[str] = []
    for whole_line in command.splitlines():
        line = indent
        for words in _options(whole_line):
            if line.strip() and len(line) + len(words) + 2 > width:
                lines.append(line + "\\")
                line = indent + "  "
            line += words + " "
        lines.append(line.rstrip())
    return lines


def _options(command: str) -> list[str]:
    """A command cut before each of its options, so that an option stays with its value."""
    # A quoted piece belongs to its word, blanks and all.
    words = re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", command)
    parts: list[str] = []
    for word in words:
        if parts and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts
