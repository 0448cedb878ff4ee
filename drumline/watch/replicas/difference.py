"""When replicas differ: in what, which ranks are alone with their copy, and whom to believe. Pure reasoning.

What every rank holds is known here as hashes; see `sentinel.py` for how they come together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.errors import Place

MAX_NAMED = 8


@dataclass(frozen=True)
class Difference:
    """Replicas that are not the same."""

    tensors: list[str]
    """The names of all that differ, in the order of the model."""
    groups: list[list[int]]
    """Ranks that hold the same as each other, the largest group first; of equals, the one with the lowest rank."""
    hosts: Mapping[int, str]
    """Of every rank."""
    same_kinds: bool
    """Whether at least names, types and shapes are the same everywhere."""

    @property
    def has_majority(self) -> bool:
        return len(self.groups[0]) > len(self.groups[1])

    @property
    def source(self) -> int:
        """The rank to believe: the lowest of the majority, and in a tie simply the lowest of all that tie."""
        return self.groups[0][0]

    @property
    def suspects(self) -> list[int]:
        """The minority; without a majority, everyone."""
        groups = self.groups[1:] if self.has_majority else self.groups
        return sorted(rank for group in groups for rank in group)

    def sentence(self, step: int, last_agreed: int | None) -> str:
        """Who differs from whom, in what, and since when, in one sentence."""
        more = len(self.tensors) - 1
        what = self.tensors[0] + (f" and {more} more tensor{'s' if more > 1 else ''}" if more else "")
        since = (
            "this was the first comparison" if last_agreed is None else f"all agreed at step {last_agreed}"
        )
        if self.has_majority:
            others, count = len(self.groups[0]), len(self.suspects)
            who = f"{self._named(self.suspects)} differ{'s' if count == 1 else ''} from the other {others} ranks"
            return f"the replicas differ at step {step}: {who} in {what}; {since}"
        who = " and ".join(self._named(group) for group in self.groups)
        return (
            f"the replicas differ at step {step}: {who} differ in {what}, and no majority tells which is right; "
            f"{since}"
        )

    def place(self, step: int) -> Place:
        """Where it went wrong, as far as that is known; not where it was noticed, which is everywhere."""
        if not self.has_majority:
            return Place(step=step)
        return Place(host=self.hosts[self.suspects[0]], rank=self.suspects[0], step=step)

    def suspect_hosts(self) -> str:
        return _listed(sorted({self.hosts[rank] for rank in self.suspects}))

    def _named(self, ranks: Sequence[int]) -> str:
        hosts = sorted({self.hosts[rank] for rank in ranks})
        return f"rank {_listed([str(rank) for rank in ranks])} ({_listed(hosts)})"


def find_difference(holdings: Sequence[dict[str, Any]], ranks: Sequence[int] | None = None) -> Difference:
    """What differs between ranks that each hold `{"host": HOST, "tensors": {NAME: [KIND, HASH]}}`. `ranks`: who they
    are; all, in order."""
    ranks = range(len(holdings)) if ranks is None else ranks
    tensors = [one["tensors"] for one in holdings]
    names = list(dict.fromkeys(name for one in tensors for name in one))
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, one in zip(ranks, tensors, strict=True):
        groups[repr([one.get(name) for name in names])].append(rank)
    kinds = [{name: kind for name, (kind, _) in one.items()} for one in tensors]
    return Difference(
        tensors=[name for name in names if any(one.get(name) != tensors[0].get(name) for one in tensors)],
        groups=sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks)),
        hosts={rank: one["host"] for rank, one in zip(ranks, holdings, strict=True)},
        same_kinds=all(one == kinds[0] for one in kinds),
    )


def _listed(words: Sequence[str]) -> str:
    if len(words) <= MAX_NAMED:
        return ", ".join(words)
    return f"{', '.join(words[:MAX_NAMED])}, ... {len(words)} in all"
