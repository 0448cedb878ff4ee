"""Reads a run folder: what was reported, when its first new step was done, what was lost, and its
final bits."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from drumline.runs.events import read_events
from tests.schedules import digest

SENTENCE = re.compile(r"\b(hang|stall|failure): .*")
WORDS = ("hang", "stall", "failure")


@dataclass(frozen=True)
class Said:
    """A sentence, with what the event says besides."""

    time: float
    word: str
    cause: str
    host: str
    rank: int | None
    message: str


@dataclass(frozen=True)
class Done:
    """A step that was done."""

    time: float
    step: int
    start: int
    """Of how many starts of the job it is part."""


def event_files(folder: Path, name: str) -> list[Path]:
    """Below a folder in which a job still removes its old checkpoints: rglob would fail on one that
    is just gone."""
    return [
        Path(top, name)
        for top, _, names in os.walk(folder, followlinks=True)
        if Path(top).name == "events" and name in names
    ]


def said_in(folder: Path) -> list[Said]:
    """Of all events below a folder, in the order of their times. What a sidecar leaves for rank 0
    to report, at its next log line, counts from the moment at which that does."""
    sentences = [
        Said(
            time=float(event["time"]),
            word=event["kind"],
            cause=str(event.get("cause", "")),
            host=str(event["host"]),
            rank=event["rank"],
            message=str(event.get("message", "")),
        )
        for path in event_files(folder, "watch.jsonl")
        for event in read_events(path)
        if event["kind"] in WORDS
    ]
    for path in event_files(folder, "rank-00000.jsonl"):
        for event in read_events(path):
            if event["kind"] == "straggler":
                host = str(event["about_host"])
                rank = event["about_rank"]
                sentences.append(
                    Said(
                        float(event["time"]), "straggler", "straggler", host, rank, event["message"]
                    )
                )
    return sorted(sentences, key=lambda one: one.time)


def is_of_a_slow_start(said: Said) -> bool:
    """On a busy machine the job that starts again may take longer than `hang_s` to: that is true,
    and no diagnosis."""
    return said.word == "stall" and "is slow but alive: at startup" in said.message


def is_recovery(said: Said) -> bool:
    """That the run goes on by itself is no diagnosis."""
    return said.word == "stall" and said.message.startswith("the run continues after ")


def sentences_on(screens: Iterable[str]) -> list[str]:
    return [match[0] for text in screens for match in SENTENCE.finditer(text)]


def steps_of(folder: Path, run: Path) -> list[Done]:
    """Of a script's own notes, or of the events of a task."""
    notes = folder / "steps"
    if notes.exists():
        pids: list[str] = []
        done = []
        for time, step, pid in (line.split() for line in notes.read_text().splitlines()):
            if pid not in pids:
                pids.append(pid)
            done.append(Done(float(time), int(step), len(pids)))
        return done
    done = []
    start = 0
    path = run / "events" / "rank-00000.jsonl"
    for event in read_events(path) if path.exists() else ():
        start += event["kind"] == "start"
        if event["kind"] == "train":
            done.append(Done(float(event["time"]), int(event["step"]), start))
    return done


@dataclass(frozen=True)
class Again:
    """How it went on."""

    first_new_step: float | None
    """When: the first step that a restarted job did."""
    steps_lost: int | None


def again(steps: list[Done], fired: float) -> Again:
    struck = max((step.start for step in steps if step.time <= fired), default=0)
    new = next((step for step in steps if step.start > struck and step.time > fired), None)
    if new is None:
        return Again(None, None)
    # Ranks that the fault did not hit may have done another step since.
    last = max((step.step for step in steps if step.start == struck), default=0)
    return Again(new.time, last - (new.step - 1))


def bits_of(folder: Path, run: Path) -> str:
    """A hash of the weights at the end; of a task also of all else that it saved, and its samples
    are verified."""
    final = folder / "final.pt"
    if not final.exists():
        return digest(run, with_rng=True)
    whole = hashlib.sha256()
    for name, tensor in sorted(torch.load(final)["model"].items()):
        whole.update(name.encode() + tensor.numpy().tobytes())
    return whole.hexdigest()


def recovered_in(run: Path) -> list[dict[str, object]]:
    path = run / "events" / "rank-00000.jsonl"
    return (
        [event for event in read_events(path) if event["kind"] == "recovered"]
        if path.exists()
        else []
    )


def to_text(said: Iterable[Said]) -> str:
    return "\n".join(json.dumps(vars(sentence)) for sentence in said)
