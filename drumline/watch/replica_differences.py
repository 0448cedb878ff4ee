"""Which tensors differ across replicas, on which ranks, and which rank has the majority's value.
Without torch: the sidecar uses it to compare the hashes of a script's ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.base.errors import Place
from drumline.base.text import join_names, named_ranks, plural


@dataclass(frozen=True)
class ReplicaDifference:
    """Replicas that are not the same."""

    tensors: list[str]
    """The names of all that differ, in the order of the model."""

    groups: list[list[int]]
    """Groups of ranks with the same values, the largest first; groups of the same size by their
    lowest rank."""

    hosts: Mapping[int, str]
    """By rank."""

    same_kinds: bool
    """Whether at least names, types and shapes are the same on all ranks."""

    @property
    def has_majority(self) -> bool:
        """Whether one group is larger than each of the others."""
        return len(self.groups[0]) > len(self.groups[1])

    @property
    def source(self) -> int:
        """The rank to copy from: the lowest of the majority, or of the first group in a tie."""
        return self.groups[0][0]

    @property
    def suspects(self) -> list[int]:
        """The minority; without a majority, all ranks."""
        groups = self.groups[1:] if self.has_majority else self.groups
        return sorted(rank for group in groups for rank in group)

    def sentence(self, step: int, last_agreed: int | None) -> str:
        """Which ranks differ from which, in what, and since when."""
        what, *further = self.tensors
        if further:
            what += f" and {plural(len(further), 'more tensor')}"

        if self.has_majority:
            verb = "differs" if len(self.suspects) == 1 else "differ"
            who = f"{self._named(self.suspects)} {verb} from the other {len(self.groups[0])} ranks in {what}"
        else:
            groups = " and ".join(self._named(group) for group in self.groups)
            who = f"{groups} differ in {what}, and no majority shows which is right"

        agreed = f"all agreed at step {last_agreed}"
        if last_agreed is None:
            agreed = "this was the first comparison"

        return f"the replicas differ at step {step}: {who}; {agreed}"

    def place(self, step: int) -> Place:
        """Where the wrong values are, as far as known; the error is raised on all ranks."""
        if not self.has_majority:
            return Place(step=step)

        rank = self.suspects[0]
        return Place(host=self.hosts[rank], rank=rank, step=step)

    def suspect_hosts(self) -> str:
        """Where the suspects are, as a list in words."""
        return self._hosts_of(self.suspects)

    def _hosts_of(self, ranks: Sequence[int]) -> str:
        return join_names(sorted({self.hosts[rank] for rank in ranks}))

    def _named(self, ranks: Sequence[int]) -> str:
        """The ranks, and their hosts."""
        return f"{named_ranks(ranks)} ({self._hosts_of(ranks)})"


def find_difference(
    replicas: Sequence[dict[str, Any]], ranks: Sequence[int] | None = None
) -> ReplicaDifference:
    """Compare replicas, each `{"host": HOST, "tensors": {NAME: [KIND, HASH]}}`. `ranks`: whose they
    are; default 0, 1, 2, ..."""
    ranks = range(len(replicas)) if ranks is None else ranks
    tensors = [replica["tensors"] for replica in replicas]
    names = list(dict.fromkeys(name for hashes in tensors for name in hashes))
    differing = [name for name in names if not _agree([hashes.get(name) for hashes in tensors])]

    groups: dict[str, list[int]] = defaultdict(list)
    for rank, hashes in zip(ranks, tensors, strict=True):
        content = repr([hashes.get(name) for name in names])
        groups[content].append(rank)

    kinds = [{name: kind for name, (kind, _) in hashes.items()} for hashes in tensors]
    return ReplicaDifference(
        tensors=differing,
        groups=sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks)),
        hosts={rank: replica["host"] for rank, replica in zip(ranks, replicas, strict=True)},
        same_kinds=_agree(kinds),
    )


def _agree(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)
