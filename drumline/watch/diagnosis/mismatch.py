"""Ranks in different collectives: the same number, but another operation or another shape.

An extra collective on one rank shows the same way: from there on its numbers are ahead by one, so at the same number it
has another operation. The minority is named; of two ranks, the one that deviates from the order of earlier steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from drumline.watch.cluster_state import Collective, RankState
from drumline.watch.diagnosis.diagnosis import Cause, Diagnosis, collective_name, names
from drumline.watch.diagnosis.evidence import Evidence, has_exited
from drumline.watch.diagnosis.stack_frames import users_frame

# Of these every rank must give the same sizes; to scatter or gather, some give nothing.
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "allgather", "reduce_scatter")
_BETWEEN_TWO = ("send", "recv")

Signature = tuple[str, tuple[tuple[int, ...], ...]]
Entry = tuple[RankState, Collective]


def find_mismatch(evidence: Evidence) -> Diagnosis | None:
    ranks = evidence.cluster.ranks
    sides = _first_mismatch(ranks)
    if not sides:
        return None
    odd = 1 if len(sides[0]) > len(sides[1]) else _deviating_side(sides, ranks)
    is_known = odd is not None
    culprits, op = [rank for rank, _ in sides[odd or 0]], sides[odd or 0][0][1]
    others = [side for position, side in enumerate(sides) if position != (odd or 0)]
    shown = [f"{names(culprits)}: {collective_name(op, with_sizes=True)}"]
    for side in others:
        are_others = is_known and len(others) == 1 and len(side) > 1
        who = "the others" if are_others else names([rank for rank, _ in side])
        shown.append(f"{who}: {collective_name(side[0][1], with_sizes=True)}")
    frame = users_frame(culprits[0].stack)
    place = f" ({frame})" if frame and is_known else ""
    # A break in a loop of the user's own shows in no heartbeat: it may end an epoch.
    may_have_left = is_known and op.op.endswith("barrier")
    what = f"ranks are in different collectives{evidence.at(culprits[0])}{place}: {'; '.join(shown)}"
    next_step = (
        f"{'check whether it left the loop before the others; if not, ' if may_have_left else ''}make every rank call "
        "the same collectives in the same order with the same shapes (look for one behind `if rank == ...`, and for "
        "batches of different length)"
    )
    since_s = min(rank.age_s for rank in culprits)
    found = evidence.diagnosis(culprits[0], Cause.MISMATCH, what, next_step, is_certain=True, since_s=since_s)
    if is_known:
        return found
    hosts = dict.fromkeys(rank.host for side in sides for rank, _ in side)
    return replace(found, rank=None, host=", ".join(hosts), what=f"{what}; it is unknown which one is wrong")


def _first_mismatch(ranks: Sequence[RankState]) -> list[list[Entry]]:
    """The first number at which ranks differ and which is not done on all of them: who entered which collective, the
    most ranks first. Empty: none."""
    is_broken = any(has_exited(rank) or rank.failure for rank in ranks)
    entries: dict[tuple[int, str], list[Entry]] = defaultdict(list)
    for rank in ranks:
        for one in rank.collectives:
            if not one.op.startswith(_BETWEEN_TWO):
                entries[one.number, one.group].append((rank, one))
    for _, entered in sorted(entries.items(), key=lambda item: item[0]):
        sides: dict[Signature, list[Entry]] = defaultdict(list)
        for rank, one in entered:
            sides[signature(one)].append((rank, one))
        if len(sides) > 1 and (is_broken or not all(one.is_done for _, one in entered)):
            return sorted(sides.values(), key=lambda side: (-len(side), side[0][0].rank))
    return []


def signature(one: Collective) -> Signature:
    """What must be the same on every rank."""
    return one.op, one.sizes if one.op.removeprefix("_").startswith(_SAME_SIZES) else ()


def _deviating_side(sides: list[list[Entry]], ranks: Sequence[RankState]) -> int | None:
    """Of sides of equal size: the one that is not what followed the same two collectives before; else the one that
    never occurred before. None: each may be right."""
    here = sides[0][0][1]
    histories = [
        [signature(one) for one in rank.collectives if one.group == here.group and one.number < here.number]
        for rank in ranks
    ]
    history = max(histories, key=len, default=[])  # on which all agree
    ends = range(len(history) - 1, 1, -1)
    followers = [history[end] for end in ends if history[end - 2 : end] == history[-2:]]
    for known in (set(followers[:1]), set(history)):
        strange = [position for position, side in enumerate(sides) if signature(side[0][1]) not in known]
        if len(strange) == 1:
            return strange[0]
    return None
