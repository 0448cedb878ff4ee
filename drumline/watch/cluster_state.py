"""What sidecars observe and ranks report, as plain values that sidecars send each other as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from drumline.base.rank_environment import LauncherLink
from drumline.net.dial import Reason
from drumline.watch.heartbeat import RankProgress


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as a rank's flight recorder has it."""

    group: str
    """Torch's name for the process group: `default_pg`."""

    number: int
    """Counted in its group on this rank: the same collective has the same number on every rank."""

    op: str
    """`all_reduce`, `broadcast`, ..."""

    sizes: tuple[tuple[int, ...], ...]
    is_done: bool


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """A process that loads data for a rank."""

    number: int
    pid: int
    state: str
    """As in /proc: R S D T t Z; X: exited."""

    cpu: float = 0.0
    """Cores that it used since the last observation."""

    is_starved: bool = False
    """Whether it computes, and mostly waits for a CPU."""

    in_fork_s: float = 0.0
    """How long it has been asleep in `fork`; 0: it has left."""

    stack: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RankState(RankProgress):
    """One rank. The first part is in every heartbeat of its node; the second is gathered when
    something is wrong."""

    host: str
    age_s: float = 0.0
    """How long it has been in this phase."""

    moved_s: float | None = None
    """How long ago the last progress without a mark was seen; None: never."""

    state: str = "S"
    """As in /proc: R S D T t Z; X: exited."""

    state_s: float = 0.0
    """For how long it has been seen in that state."""

    cpu: float = 0.0
    """Cores that it and its descendants used since the last observation."""

    is_starved: bool = False
    """Whether one of its threads computes, and mostly waits for a CPU."""

    has_io: bool = False
    """Whether it read or wrote files since the last observation."""

    exit: int | None = None
    """Its exit code, or minus the signal that killed it; None: it runs, or it is unknown."""

    killed_after_s: float | None = None
    """After which grace period drumline killed it; None: it did not."""

    asked_to_exit: bool = False
    """Whether it exited after drumline had asked it to."""

    killed_by: str = ""
    """Which part of drumline did: `launcher` or `watchdog`."""

    killed_because: str = ""
    """Why, if that is not only that the job is ended."""

    memory: str = ""
    """Evidence that the kernel killed it out of memory: `the limit of 512 MiB of its control
    group`."""

    workers: tuple[WorkerState, ...] = ()

    stack: tuple[str, ...] = ()
    """The main thread's calls, the innermost first: `file.py:12 in name`."""

    answers: bool | None = None
    """Whether its answering thread, and so Python, runs. None: it was not asked."""

    collectives: tuple[Collective, ...] = ()
    """The latest ones, the newest last."""

    @property
    def still_s(self) -> float:
        """How long it has shown no progress."""
        return self.age_s if self.moved_s is None else min(self.age_s, self.moved_s)


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What one sidecar observes."""

    node: int
    host: str
    ranks: tuple[RankState, ...] = ()
    heartbeat_age_s: Mapping[int, float] = field(default_factory=dict)
    """By node: the age of the last heartbeat from its sidecar. If one direction is dropped, the two
    ends differ."""

    link: str = ""
    """What is wrong with its own network interface: `eth0 is down`."""

    kernel: tuple[str, ...] = ()
    """Lines of the kernel's log that may matter."""

    slowdown: float = 1.0
    """How many times longer than its CPU time the sidecar took to start there: what starts on a
    crowded host, or from slow storage, takes as much longer."""

    activity: tuple[RankState, ...] = ()
    """Where the time of ranks that run a script goes, with the number of backward passes in place
    of steps."""


class Answer(StrEnum):
    """How a node reacts to a new connection."""

    NONE = "none"
    REFUSED = (
        "refused"  # the host is up, but its sidecar, and the rank that keeps the port, have exited
    )

    # the first rank still has the port: only its sidecar has exited or gets no CPU time
    TAKEN = "taken"


ANSWER_OF: Mapping[str, Answer] = {
    Reason.REFUSED: Answer.REFUSED,
    Reason.CLOSED: Answer.TAKEN,
    Reason.NO_REPLY: Answer.TAKEN,
}
"""The results of a connection attempt that show that the host is up."""


@dataclass(frozen=True, kw_only=True)
class LostNode:
    """A node whose sidecar sends no heartbeats."""

    node: int
    host: str
    ranks: tuple[int, ...]
    no_heartbeat_s: float
    how: str = ""
    """The result of a new connection to it, in words: `no answer`, `connection refused`; empty:
    none was tried."""

    answer: Answer = Answer.NONE
    """The same, for decisions."""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """Everything that one sidecar knows about the run at one moment."""

    me: int
    """The node of this sidecar."""

    nodes: tuple[NodeState, ...]
    """The last report of each node, including lost ones."""

    lost: tuple[LostNode, ...] = ()
    never_seen: tuple[LostNode, ...] = ()
    """Nodes that have never connected to this sidecar: nothing is known about their ranks."""

    launcher: LauncherLink | None = None
    """What the launcher knows of the hosts, if it is one over ssh."""

    @property
    def this_node(self) -> NodeState:
        """The last report of the node of this sidecar."""
        return next(node for node in self.nodes if node.node == self.me)

    @property
    def ranks(self) -> list[RankState]:
        """The last states of all, in order."""
        return sorted(
            (rank for node in self.nodes for rank in node.ranks), key=lambda rank: rank.rank
        )


# What a rank reports about its script, for the leader to compare


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """A DataLoader, when it was first iterated over."""

    batches: int | None = None
    """Its length; None if it has none, or if it may differ: no gradients, or uneven inputs
    (Join)."""

    samples: int | None = None
    """The length of the dataset, if every rank has all of it and its sampler selects a part."""


@dataclass(frozen=True, kw_only=True)
class ModuleHashes:
    """The parameters of a DDP module at a step."""

    tensors: Mapping[str, tuple[str, int]]
    """By name: type and shape, and the hash."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Its optimizer's numbers: `SGD's lr`."""


@dataclass(frozen=True, kw_only=True)
class ModuleReport:
    """A DDP module. Its group and its number among the modules of that group identify it on all
    ranks."""

    name: str
    ranks: tuple[int, ...]
    hashes: Mapping[int, ModuleHashes] = field(default_factory=dict)
    """By step, the latest ones; 0: at its construction."""


@dataclass(frozen=True, kw_only=True)
class ScriptReport:
    """The report of one rank."""

    host: str
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By group: `arguments`, `variables`, `packages` and `script`; empty until the process group
    exists."""

    loaders: Mapping[str, LoaderReport] = field(default_factory=dict)
    """By the place where they are iterated over: `train.py:42`."""

    modules: Mapping[str, ModuleReport] = field(default_factory=dict)
