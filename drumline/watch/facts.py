"""What sidecars see of ranks and nodes, and tell each other: plain values that go through JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from drumline.watch.beats.phase import Phase


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as a rank's flight recorder has it."""

    group: str
    """Of ranks, as torch calls it: `default_pg`."""
    number: int
    """Among those of its group on this rank: the same collective has the same number on every rank."""
    op: str
    """`all_reduce`, `broadcast`, ..."""
    sizes: tuple[tuple[int, ...], ...]
    is_done: bool


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """A process that loads data for a rank."""

    number: int
    pid: int
    state: str
    """As in /proc: R S D T t Z; X when it is gone."""
    cpu: float = 0.0
    """Cores that it used since the last look."""
    in_fork_s: float = 0.0
    """For how long it sleeps without having left `fork`; 0: it has left."""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank. The first part is in every pulse; the second only in what is gathered when something is wrong."""

    rank: int
    host: str
    pid: int
    step: int = 0
    phase: Phase = Phase.START
    micro: int = 0
    beats: int = 0
    collective: int = 0
    moves: int = 0
    """How often a thread of its own saw that it moves where it marks nothing: see rank/collective_count.py."""
    age_s: float = 0.0
    """How long it has been in this phase."""
    moved_s: float | None = None
    """How long ago the last of its moves was seen; None: there was none."""
    state: str = "S"
    """As in /proc: R S D T t Z; X when it is gone."""
    state_s: float = 0.0
    """For how long it was seen in that state, without another one in between."""
    cpu: float = 0.0
    """Cores that it and all it started used since the last look."""
    has_io: bool = False
    """Whether it read or wrote files since the last look."""
    exit: int | None = None
    """Its exit code, or minus the signal that ended it; None: it has not ended, or nobody knows how."""
    failure: str = ""
    """What it said itself before it ended."""
    spent_s: tuple[float, ...] = ()
    """By phase: see Beat.spent_ns."""

    memory: str = ""
    """Evidence that the kernel ended it for want of memory: `the limit of 512 MiB of its control group`."""
    tracer: str = ""
    """Who debugs it."""
    workers: tuple[WorkerFacts, ...] = ()
    stack: tuple[str, ...] = ()
    """Of its main thread, the innermost call first: `file.py:12 in name`."""
    answers: bool | None = None
    """Whether Python runs in it: a thread of its own answered. None: nobody asked."""
    collectives: tuple[Collective, ...] = ()
    """The latest ones, the newest last."""

    @property
    def still_s(self) -> float:
        """For how long nothing has moved in it, as far as can be seen."""
        return self.age_s if self.moved_s is None else min(self.age_s, self.moved_s)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """What one sidecar sees."""

    node: int
    host: str
    ranks: tuple[RankFacts, ...] = ()
    heard_s: Mapping[int, float] = field(default_factory=dict)
    """By node: how long ago it heard the sidecar there. Of a way that is closed in one direction each end says
    something else."""
    link: str = ""
    """What is wrong with its own network interface: `eth0 is down`."""
    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log that may matter."""
    activity: tuple[RankFacts, ...] = ()
    """Of ranks that run a script: where their time goes, and how often they have called backward, in place of steps."""


class Answer(StrEnum):
    """Of a node to a new connection."""

    NONE = "none"
    REFUSED = "refused"
    """The host is up; its sidecar, and the rank that keeps the port, are not."""
    TAKEN = "taken"
    """The first rank still has the port: only its sidecar is dead or has no CPU."""


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A node that is not heard any more."""

    node: int
    host: str
    ranks: tuple[int, ...]
    silent_s: float
    how: str = ""
    """What a new connection to it gives, in words: `no answer`, `connection refused`; empty: none was tried."""
    answer: Answer = Answer.NONE
    """The same, for decisions."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """All that is known of the run at a moment, by one sidecar: who it is, what each node says, and who is silent."""

    me: int
    nodes: tuple[NodeFacts, ...]
    silent: tuple[Silent, ...] = ()
    unheard: tuple[Silent, ...] = ()
    """Nodes that were never heard, in the first while: nothing is known of their ranks. `silent_s`: since this sidecar
    listens."""

    @property
    def ranks(self) -> list[RankFacts]:
        """Of all nodes that are heard, in order."""
        return sorted((rank for node in self.nodes for rank in node.ranks), key=lambda rank: rank.rank)


def to_json(node: NodeFacts) -> dict[str, Any]:
    return asdict(node)


def node_from_json(record: Mapping[str, Any]) -> NodeFacts:
    """Raises TypeError, KeyError, ValueError or AttributeError for what is no such record."""
    return NodeFacts(
        **{
            **record,
            "ranks": tuple(_rank(rank) for rank in record["ranks"]),
            "heard_s": {int(node): float(age) for node, age in record["heard_s"].items()},
            "kernel": tuple(map(str, record["kernel"])),
            "activity": tuple(_rank(rank) for rank in record["activity"]),
        }
    )


def _rank(record: Mapping[str, Any]) -> RankFacts:
    return RankFacts(
        **{
            **record,
            "phase": Phase(record["phase"]),
            "spent_s": tuple(record["spent_s"]),
            "workers": tuple(
                WorkerFacts(**{**worker, "stack": tuple(worker["stack"])}) for worker in record["workers"]
            ),
            "stack": tuple(record["stack"]),
            "collectives": tuple(
                Collective(**{**one, "sizes": tuple(map(tuple, one["sizes"]))})
                for one in record["collectives"]
            ),
        }
    )
