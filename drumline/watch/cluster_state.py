"""What sidecars observe and ranks report, and sidecars send each other: plain values that go through JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drumline.net.dial import Reason
from drumline.watch.failure_kind import FailureKind
from drumline.watch.heartbeat import Phase


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as a rank's flight recorder has it."""

    group: str  # the process group, as torch calls it: `default_pg`
    number: int  # among those of its group on this rank: the same collective has the same number on every rank
    op: str  # `all_reduce`, `broadcast`, ...
    sizes: tuple[tuple[int, ...], ...]
    is_done: bool


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """A process that loads data for a rank."""

    number: int
    pid: int
    state: str  # as in /proc: R S D T t Z; X: exited
    cpu: float = 0.0  # cores that it used since the last observation
    in_fork_s: float = 0.0  # for how long it sleeps without having left `fork`; 0: it has left
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank. The first part is in every heartbeat of its node; the second is gathered when something is wrong."""

    rank: int
    host: str
    pid: int
    step: int = 0
    phase: Phase = Phase.START
    micro: int = 0
    num_marks: int = 0
    collective: int = 0  # how many its process group has begun
    num_moves: int = 0  # how often its monitor thread saw progress without a mark: rank/progress_monitor.py
    age_s: float = 0.0  # how long it has been in this phase
    moved_s: float | None = None  # how long ago the last of its moves was seen; None: there was none
    state: str = "S"  # as in /proc: R S D T t Z; X: exited
    state_s: float = 0.0  # for how long it was seen in that state, without another one in between
    cpu: float = 0.0  # cores that it and all it started used since the last observation
    has_io: bool = False  # whether it read or wrote files since the last observation
    exit: int | None = None  # its exit code, or minus the signal that killed it; None: it runs, or nobody knows
    failure: str = ""  # its own last error
    failure_kind: FailureKind = FailureKind.OTHER
    spent_s: tuple[float, ...] = ()  # by phase: see Heartbeat.spent_ns

    memory: str = ""  # evidence that the kernel killed it out of memory: `the limit of 512 MiB of its control group`
    tracer: str = ""  # the process that debugs it
    workers: tuple[WorkerState, ...] = ()
    stack: tuple[str, ...] = ()  # the main thread's calls, the innermost first: `file.py:12 in name`
    answers: bool | None = None  # whether Python runs in it: a thread of its own answered. None: it was not asked.
    collectives: tuple[Collective, ...] = ()  # the latest ones, the newest last

    @property
    def still_s(self) -> float:
        """For how long it has shown no progress."""
        return self.age_s if self.moved_s is None else min(self.age_s, self.moved_s)


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What one sidecar observes."""

    node: int
    host: str
    ranks: tuple[RankState, ...] = ()
    heartbeat_age_s: Mapping[int, float] = field(default_factory=dict)
    """By node: how long ago it heard from the sidecar there. Where one direction is dropped, the two ends differ."""
    link: str = ""  # what is wrong with its own network interface: `eth0 is down`
    kernel: tuple[str, ...] = ()  # lines of the kernel's log that may matter
    activity: tuple[RankState, ...] = ()
    """Where the time of ranks that run a script goes, with the number of backward passes in place of steps."""


class Answer(StrEnum):
    """How a node reacts to a new connection."""

    NONE = "none"
    REFUSED = "refused"  # the host is up; its sidecar, and the rank that keeps the port, are not
    TAKEN = "taken"  # the first rank still has the port: only its sidecar is dead or has no CPU


ANSWER_OF: Mapping[str, Answer] = {
    Reason.REFUSED: Answer.REFUSED,
    Reason.CLOSED: Answer.TAKEN,
    Reason.NO_REPLY: Answer.TAKEN,
}
"""How a connection attempt ended, where that shows that the host is up."""


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A node whose sidecar sends no heartbeats."""

    node: int
    host: str
    ranks: tuple[int, ...]
    no_heartbeat_s: float
    how: str = ""
    """What a new connection to it gives, in words: `no answer`, `connection refused`; empty: none was tried."""
    answer: Answer = Answer.NONE  # the same, for decisions


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """All that one sidecar knows of the run at a moment."""

    me: int  # the node of this sidecar
    nodes: tuple[NodeState, ...]  # what each node said last, lost ones included
    lost: tuple[LostNode, ...] = ()
    never_seen: tuple[LostNode, ...] = ()
    """Nodes that have not connected yet since this sidecar listens: nothing is known of their ranks."""

    @property
    def ranks(self) -> list[RankState]:
        return sorted((rank for node in self.nodes for rank in node.ranks), key=lambda rank: rank.rank)


# What a rank reports of the script that it runs, for the leader to compare


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """A DataLoader, when it was first iterated over."""

    batches: int | None = None
    """Its length; None where it has none, or where it may differ: no gradients, or uneven inputs (Join)."""
    samples: int | None = None
    """The length of the dataset, where every rank has all of it and its sampler takes a part."""


@dataclass(frozen=True, kw_only=True)
class ModuleHashes:
    """The parameters of a DDP module at a step."""

    tensors: Mapping[str, tuple[str, int]]  # by name: type and shape, and the hash
    settings: Mapping[str, Any] = field(default_factory=dict)  # its optimizer's numbers: `SGD's lr`


@dataclass(frozen=True, kw_only=True)
class ModuleReport:
    """A DDP module. Its group and its number among the modules of that group identify it on all ranks."""

    name: str
    ranks: tuple[int, ...]
    hashes: Mapping[int, ModuleHashes] = field(default_factory=dict)
    """By step, the latest ones; 0: at its construction."""


@dataclass(frozen=True, kw_only=True)
class ScriptReport:
    """One rank's."""

    owner: Mapping[str, Any]  # its `host`, `rank`, `local_rank` and `node_rank`
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By group: `arguments`, `variables`, `packages` and `script`; empty until the process group is there."""
    loaders: Mapping[str, LoaderReport] = field(default_factory=dict)
    """By the place where they are iterated over: `train.py:42`."""
    modules: Mapping[str, ModuleReport] = field(default_factory=dict)
