"""How a diagnosis reads: who, where, since when, and who waits for it."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Sequence

from drumline.text import number_ranges
from drumline.watch.cluster_state import Collective, RankState
from drumline.watch.diagnosis.evidence import Evidence
from drumline.watch.heartbeat import Phase

DOING = {
    Phase.START: "its start",
    Phase.DATA: "DataLoader",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "the optimizer's step",
    Phase.BETWEEN: "its work between steps",
    Phase.EVALUATION: "evaluation",
    Phase.SAVE: "a save",
    Phase.USER: "user code",
    Phase.LEFT: "what follows the loop",
    Phase.LEAVING: "teardown",
    Phase.FAILED: "its failure",
}
_MOST_HOSTS = 4


def name(rank: RankState) -> str:
    return f"rank {rank.rank} on {rank.host}"


def names(ranks: Sequence[RankState]) -> str:
    """`rank 3 on node-b`, `ranks 0-2 on node-a, 5 on node-b`; of many hosts their number."""
    if len(ranks) == 1:
        return name(ranks[0])
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        hosts[rank.host].append(rank.rank)
    if len(hosts) > _MOST_HOSTS:
        return f"{len(ranks)} ranks on {len(hosts)} hosts ({name(ranks[0])}, ...)"
    return "ranks " + ", ".join(f"{number_ranges(numbers)} on {host}" for host, numbers in hosts.items())


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def seconds(value: float) -> str:
    """`0.4 s`, `12 s`, `3 min`."""
    if value < 9.95:
        return f"{value:.1f} s".replace(".0 s", " s")
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"


def since(evidence: Evidence, rank: RankState) -> str:
    """`since step 812`; where nobody counts steps, `for 12 s`."""
    return f"since step {rank.step}" if evidence.has_steps else f"for {seconds(rank.still_s)}"


def at(evidence: Evidence, rank: RankState) -> str:
    """` at step 812, in forward`, as far as that is known."""
    parts = [f"at step {rank.step}"] if evidence.has_steps else []
    if rank.phase not in (Phase.FAILED, Phase.LEFT, Phase.LEAVING, Phase.START):
        parts.append(f"in {DOING[rank.phase]}")
    return f" {', '.join(parts)}" if parts else ""


def collective(one: Collective, *, with_sizes: bool = False) -> str:
    """`all_reduce #4410`, and ` of [77290]`."""
    text = f"{one.op} #{one.number}"
    sizes = " and ".join(str(list(size)) for size in one.sizes[:3]) + (" and more" if one.sizes[3:] else "")
    return f"{text} of {sizes}" if with_sizes and one.sizes else text


def who_waits(evidence: Evidence, culprits: Sequence[RankState]) -> str:
    """`; 7 ranks wait in all_reduce #4410`, or nothing."""
    named = {rank.rank for rank in culprits}
    waits = Counter(
        collective(one) if one else "" for rank, one in evidence.waiting.items() if rank not in named
    )
    if not waits:
        return ""
    total = sum(waits.values())
    places = [place for place, _ in waits.most_common() if place]
    more = " and others" if places[2:] else ""
    where = f" in {' and '.join(places[:2])}{more}" if places else " for it"
    return f"; {count(total, 'rank')} wait{'s' if total == 1 else ''}{where}"


def signal_name(number: int) -> str:
    """`SIGKILL`; one without a name by its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
