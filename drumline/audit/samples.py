"""Replays the sample ledger: every sample exactly once an epoch, over all restarts and world sizes."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from drumline.audit.checkpoint_check import SavedPosition
from drumline.audit.epoch_coverage import EpochPiece, check_epoch, describe_samples, empty_steps, pieces_of
from drumline.audit.ledger_history import FILE, History, read_history
from drumline.audit.section import Section
from drumline.text import join_names, plural, span


def check_samples(path: Path, section: Section, checkpoints: list[SavedPosition]) -> History | None:
    """Replay a ledger and compare it with the checkpoints; None: there is no ledger that can be read."""
    try:
        history = read_history(path, section)
    except FileNotFoundError:
        section.summary = "not recorded"
        return None
    except OSError as error:
        section.problem(FILE, f"cannot be read: {error.strerror}")
        section.summary = "cannot be read"
        return None
    for line, step in empty_steps(history.ranges):
        section.problem(f"{FILE}, line {line}", f"step {step:,} had no samples")
    epochs: dict[int, list[EpochPiece]] = defaultdict(list)
    pieces = list(pieces_of(history.ranges))
    for piece in pieces:
        epochs[piece.epoch].append(piece)
    for epoch in sorted(epochs):
        # An older version may not have recorded the beginning.
        begin = history.starts[0].position if epoch == history.starts[0].epoch else 0
        check_epoch(epoch, epochs[epoch], section, begin=begin, is_last=epoch == max(epochs))
    for left, right in pairwise([history.starts[0].epoch - 1, *sorted(epochs)] if epochs else []):
        if right > left + 1:
            section.problem(FILE, f"{span(left + 2, right, 'epoch')} missing")
    _check_positions(pieces, history, section, checkpoints)
    _summarise_samples(pieces, history, section)
    return history


def _check_positions(
    pieces: list[EpochPiece], history: History, section: Section, checkpoints: list[SavedPosition]
) -> None:
    if beyond := [saved.step for saved in checkpoints if saved.step > history.last_step]:
        ends = f"ends at step {history.last_step:,}" if history.starts else "has no start of a job"
        steps = span(beyond[0], beyond[-1], "step")
        have = "is a checkpoint" if len(beyond) == 1 else f"are {len(beyond)} checkpoints"
        section.problem(FILE, f"{ends}, but there {have} of {steps}")
    for saved in checkpoints:
        covering = [piece for piece in pieces if piece.first <= saved.step <= piece.last]
        if not covering:
            continue
        epoch, end = max((piece.epoch, piece.low + (saved.step - piece.first + 1) * piece.stride) for piece in covering)
        samples = covering[-1].start.samples
        allowed = [(epoch, end)] if samples is None or end < samples else []
        if samples is None or end >= samples:
            allowed.append((epoch + 1, 0))
        if (saved.epoch, saved.position) not in allowed:
            (epoch, end), *_ = allowed
            found = f"is at position {saved.position:,} of epoch {saved.epoch + 1}"
            what = f"the checkpoint of step {saved.step:,} {found}, but the ledger at {end:,} of {epoch + 1}"
            section.problem(FILE, what)


def _summarise_samples(pieces: list[EpochPiece], history: History, section: Section) -> None:
    for before, now in pairwise(history.starts):
        if before.samples != now.samples:
            sizes = f"{describe_samples(before)} before step {now.step + 1:,}, {describe_samples(now)} after"
            section.note(f"{FILE}, line {now.line}", f"the dataset changed: {sizes}")
    worlds = list(dict.fromkeys(start.world_size for start in history.starts))
    section.counts = {
        "steps": history.last_step,
        "positions": sum(piece.high - piece.low for piece in pieces),
        "starts": len(history.starts),
    }
    if not pieces:
        section.summary = "no step is recorded yet"
        return
    last = max(pieces, key=lambda piece: (piece.epoch, piece.high))
    is_ended = last.high == last.start.samples
    finished = last.epoch + is_ended - history.starts[0].epoch
    so_far = "" if is_ended else f", {last.high:,} of epoch {last.epoch + 1} so far"
    length = "a stream of unknown length" if last.start.samples is None else describe_samples(last.start)
    once = "" if section.problems else ", each exactly once"
    section.summary = (
        f"{plural(finished, 'epoch')} of {length}{so_far}{once}; {plural(history.last_step, 'step')} in "
        f"{plural(len(history.starts), 'start')} on {join_names(worlds)} rank{'' if worlds == [1] else 's'}"
    )
