"""The sample ledger, replayed: every sample exactly once an epoch, over all restarts and world sizes."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path

from drumline.audit.checkpoint_check import SavedPosition
from drumline.audit.epoch_coverage import (
    EpochPiece,
    check_epoch,
    describe_samples,
    empty_steps,
    pieces_of,
    with_counts_settled,
)
from drumline.audit.ledger_history import FILE, History, read_history
from drumline.audit.section import Section
from drumline.text import join_names, plural, span


def check_samples(path: Path, part: Section, checkpoints: list[SavedPosition]) -> History | None:
    """Replay a ledger and compare it with what the checkpoints say; None when there is none to read."""
    try:
        history = read_history(path, part)
    except FileNotFoundError:
        part.summary = "not recorded"
        return None
    except OSError as error:
        part.problem(FILE, f"cannot be read: {error.strerror}")
        part.summary = "cannot be read"
        return None
    for line, step in empty_steps(history.stretches):
        part.problem(f"{FILE}, line {line}", f"step {step:,} had no samples")
    epochs: dict[int, list[EpochPiece]] = defaultdict(list)
    pieces = with_counts_settled(list(pieces_of(history.stretches)), part)
    for piece in pieces:
        epochs[piece.epoch].append(piece)
    for epoch in sorted(epochs):
        # An older version may have left no record of the first part.
        begin = history.starts[0].position if epoch == history.starts[0].epoch else 0
        check_epoch(epoch, epochs[epoch], part, begin=begin, is_last=epoch == max(epochs))
    for left, right in pairwise([history.starts[0].epoch - 1, *sorted(epochs)] if epochs else []):
        if right > left + 1:
            part.problem(FILE, f"{span(left + 2, right, 'epoch')} never came")
    _check_positions(pieces, history, part, checkpoints)
    _summarise_samples(pieces, history, part)
    return history


def _check_positions(
    pieces: list[EpochPiece], history: History, part: Section, checkpoints: list[SavedPosition]
) -> None:
    _check_goes_as_far(history, part, [saved.step for saved in checkpoints])
    for saved in checkpoints:
        covering = [piece for piece in pieces if piece.first <= saved.step <= piece.last]
        if not covering:
            continue
        ends = {
            (piece.epoch, piece.low + (saved.step - piece.first + 1) * piece.stride) for piece in covering
        }
        epoch, end = max(ends)
        samples = covering[-1].start.samples
        allowed = [(epoch, end)] if samples is None or end < samples else []
        if samples is None or end >= samples:
            allowed.append((epoch + 1, 0))
        if (saved.epoch, saved.position) not in allowed:
            (epoch, end), *_ = allowed
            stands = f"stands at position {saved.position:,} of epoch {saved.epoch + 1}"
            part.problem(
                FILE,
                f"the checkpoint of step {saved.step:,} {stands}, but the ledger at {end:,} of {epoch + 1}",
            )


def _check_goes_as_far(history: History, part: Section, saved: list[int]) -> None:
    beyond = [step for step in saved if step > history.last_step]
    if not beyond:
        return
    ends = f"ends at step {history.last_step:,}" if history.starts else "has no start of a job"
    which = span(beyond[0], beyond[-1], "step")
    have = f"is a checkpoint of {which}" if len(beyond) == 1 else f"are {len(beyond)} checkpoints of {which}"
    part.problem(FILE, f"{ends}, but there {have}")


def _summarise_samples(pieces: list[EpochPiece], history: History, part: Section) -> None:
    for before, now in pairwise(history.starts):
        if before.samples != now.samples:
            sizes = f"{describe_samples(before)} before step {now.step + 1:,}, {describe_samples(now)} after"
            part.note(f"{FILE}, line {now.line}", f"the dataset changed: {sizes}")
    worlds = list(dict.fromkeys(start.world_size for start in history.starts))
    part.counts = {
        "steps": history.last_step,
        "positions": sum(piece.high - piece.low for piece in pieces),
        "starts": len(history.starts),
    }
    if not pieces:
        part.summary = "no step is recorded yet"
        return
    last = max(pieces, key=lambda piece: (piece.epoch, piece.high))
    is_ended = last.high == last.start.samples
    finished = last.epoch + is_ended - history.starts[0].epoch
    so_far = "" if is_ended else f", {last.high:,} of epoch {last.epoch + 1} so far"
    length = (
        "a stream whose length is not known" if last.start.samples is None else describe_samples(last.start)
    )
    once = "" if part.problems else ", each exactly once"
    part.summary = (
        f"{plural(finished, 'epoch')} of {length}{so_far}{once}; {plural(history.last_step, 'step')} in "
        f"{plural(len(history.starts), 'start')} on {join_names(worlds)} rank{'' if worlds == [1] else 's'}"
    )
