"""Ranks in different collectives: the same number, but another operation or another shape.

An extra collective on one rank shows the same way: from there on its numbers are ahead by one, so at the same number it
has another operation. The minority is named. Of two ranks, the one that breaks the order that earlier steps had.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drumline.watch.cluster_state import Collective, RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis
from drumline.watch.diagnosis.evidence import Evidence, has_ended
from drumline.watch.diagnosis.phrases import at, collective, names
from drumline.watch.diagnosis.stack_frames import users_frame

# Of these every rank must give the same sizes; to scatter or gather, some give nothing.
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather", "reduce_scatter")
_BETWEEN_TWO = ("send", "recv")

Signature = tuple[str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class CollectiveMismatch:
    """At one number: who is in what, the most ranks first."""

    group: str
    number: int
    sides: tuple[tuple[Collective, tuple[RankState, ...]], ...]

    @property
    def has_majority(self) -> bool:
        return len(self.sides[0][1]) > len(self.sides[1][1])


def judge_mismatch(evidence: Evidence) -> Diagnosis | None:
    split = find_split(evidence.picture.ranks)
    if split is None:
        return None
    odd = 1 if split.has_majority else _breaks_the_order(split, evidence.picture.ranks)
    culprits = split.sides[0 if odd is None else odd][1]
    parts = [(culprits, split.sides[odd or 0][0]), *_rest(split, odd or 0)]
    shown = "; ".join(
        f"{names(ranks) if not position or len(parts) > 2 or odd is None else _others(ranks)}: "
        f"{collective(one, with_sizes=True)}"
        for position, (ranks, one) in enumerate(parts)
    )
    frame = users_frame(culprits[0].stack)
    place = f" ({frame})" if frame and odd is not None else ""
    # A break in a loop of the user's own shows in no beat: it may end an epoch.
    is_out = odd is not None and split.sides[odd][0].op.endswith("barrier")
    may_be_out = "see whether it left the loop before the others; if not, " if is_out else ""
    unsure = "; which of them is wrong cannot be told" if odd is None else ""
    return Diagnosis(
        cause=Cause.MISMATCH,
        host=culprits[0].host
        if odd is not None
        else ", ".join(dict.fromkeys(r.host for _, s in split.sides for r in s)),
        rank=culprits[0].rank if odd is not None else None,
        step=culprits[0].step if evidence.has_steps else None,
        what=f"ranks are in different collectives{at(evidence, culprits[0])}{place}: {shown}{unsure}",
        next_step=f"{may_be_out}make every rank call the same collectives in the same order with the same shapes "
        "(look for one behind `if rank == ...`, and for batches of different length)",
        is_certain=True,
        since_s=min(rank.age_s for rank in culprits),
    )


def find_split(ranks: Sequence[RankState]) -> CollectiveMismatch | None:
    """The first number at which ranks differ, and which did not come to its end on all of them."""
    is_broken = any(has_ended(rank) or rank.failure for rank in ranks)
    entries: dict[tuple[str, int], list[tuple[RankState, Collective]]] = defaultdict(list)
    for rank in ranks:
        for one in rank.collectives:
            if not one.op.startswith(_BETWEEN_TWO):
                entries[one.group, one.number].append((rank, one))
    for (group, number), met in sorted(entries.items(), key=lambda item: (item[0][1], item[0][0])):
        sides: dict[Signature, list[tuple[RankState, Collective]]] = defaultdict(list)
        for rank, one in met:
            sides[signature(one)].append((rank, one))
        if len(sides) > 1 and (is_broken or not all(one.is_done for _, one in met)):
            ordered = sorted(sides.values(), key=lambda side: (-len(side), side[0][0].rank))
            return CollectiveMismatch(
                group, number, tuple((side[0][1], tuple(rank for rank, _ in side)) for side in ordered)
            )
    return None


def signature(one: Collective) -> Signature:
    """What must be the same on every rank."""
    return one.op, one.sizes if one.op.removeprefix("_").startswith(_SAME_SIZES) else ()


def _breaks_the_order(split: CollectiveMismatch, ranks: Sequence[RankState]) -> int | None:
    """Of two sides of equal size: the one that is not what came here before, after the same two collectives; else the
    one that never came before at all. None: both may be right."""
    history = _before(split, ranks)
    sides = [signature(one) for one, _ in split.sides]
    expected = _what_followed(history)
    for known in ({expected} if expected else set(), set(history)):
        strange = [position for position, side in enumerate(sides) if side not in known]
        if len(strange) == 1:
            return strange[0]
    return None


def _before(split: CollectiveMismatch, ranks: Sequence[RankState]) -> list[Signature]:
    """The order up to there, on which all agreed; by the rank that has most of it."""
    histories = [
        [signature(one) for one in rank.collectives if one.group == split.group and one.number < split.number]
        for rank in ranks
    ]
    return max(histories, key=len, default=[])


def _what_followed(history: Sequence[Signature]) -> Signature | None:
    """What came after the last two the time before."""
    last = list(history[-2:])
    for end in range(len(history) - 1, 1, -1):
        if list(history[end - 2 : end]) == last:
            return history[end]
    return None


def _rest(split: CollectiveMismatch, odd: int) -> Iterator[tuple[tuple[RankState, ...], Collective]]:
    for position, (one, ranks) in enumerate(split.sides):
        if position != odd:
            yield ranks, one


def _others(ranks: Sequence[RankState]) -> str:
    return "the others" if len(ranks) > 1 else names(ranks)
