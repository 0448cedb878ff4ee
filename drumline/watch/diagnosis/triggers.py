"""Signs in a plain pulse that something is wrong for certain: they are looked into at once, whatever the run's pace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drumline.watch.cluster_state import Answer, ClusterState, LostNode, RankState
from drumline.watch.diagnosis.evidence import has_ended, is_done
from drumline.watch.diagnosis.stopped import CERTAINLY_STOPPED_S
from drumline.watch.diagnosis.unreachable import is_unreachable, one_way
from drumline.watch.heartbeat import Phase

STANDS_S = 1.5
"""As long as a run moves, all of its ranks do: no host is gone, and none has left that is needed."""
_LEFT_S = 1.5


def ended(ranks: Iterable[RankState]) -> frozenset[str]:
    """Ranks that are gone or have failed; not those that were done."""
    return frozenset(f"ended {rank.rank}" for rank in ranks if _has_failed(rank))


def stopped(ranks: Iterable[RankState]) -> frozenset[str]:
    """Ranks that a signal has stopped, and that were not continued since."""
    return frozenset(
        f"stopped {rank.rank}" for rank in ranks if rank.state == "T" and rank.state_s >= CERTAINLY_STOPPED_S
    )


def urgent_symptoms(ranks: Iterable[RankState]) -> frozenset[str]:
    """Certain from a pulse alone."""
    ranks = list(ranks)
    return ended(ranks) | stopped(ranks)


def others(
    picture: ClusterState, seen: Mapping[int, RankState], *, still_s: float, limit_s: float, hears: bool
) -> frozenset[str]:
    """`seen`: what every rank showed last, those of silent nodes too. `hears`: whether this sidecar was awake lately;
    else it is no wonder that it heard nobody."""
    signs = set(stopped(seen.values()))
    if still_s < STANDS_S:
        return frozenset(signs)
    signs.update(_left(list(seen.values())))
    if hears:
        signs.update(f"silent {one.node}" for one in picture.lost if _is_amiss(one, seen, still_s >= limit_s))
        if (deaf := one_way(picture)) is not None:
            signs.add(f"deaf {deaf[1].node} to {deaf[0].node}")
    return frozenset(signs)


def _is_amiss(one: LostNode, seen: Mapping[int, RankState], stands_long: bool) -> bool:
    if one.ranks and all(rank in seen and is_done(seen[rank]) for rank in one.ranks):
        return False
    # Where something answers, the sidecar alone may have died, and the run goes on.
    is_dead = bool(one.how) and one.answer is not Answer.REFUSED
    return is_unreachable(one) and (is_dead or stands_long)


def _has_failed(rank: RankState) -> bool:
    return not is_done(rank) and (has_ended(rank) or bool(rank.failure) or rank.phase is Phase.FAILED)


def _left(ranks: list[RankState]) -> list[str]:
    done = [rank for rank in ranks if is_done(rank)]
    long_ago = [rank for rank in done if max(rank.age_s, rank.state_s if has_ended(rank) else 0.0) >= _LEFT_S]
    return [f"left {rank.rank}" for rank in long_ago] if len(done) < len(ranks) else []
