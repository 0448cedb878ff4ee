"""The faults of the matrix, the correct diagnoses of each, and where it happens, drawn from a
seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

HOSTS = ("a", "b")
RANKS_PER_HOST = 2
WORLD_SIZE = len(HOSTS) * RANKS_PER_HOST
EVERY = 10
"""Steps between saves."""
FIRST_STEP = 12
LAST_STEP = 39
STEPS = 50
LONG = 240
"""Steps of a run in which nothing breaks off: the slow rank must have time to be noticed."""


@dataclass(frozen=True)
class Fault:
    """`causes`: what is right to say. Most faults have one; more where nobody could tell them
    apart."""

    title: str
    causes: tuple[str, ...]
    names: str = "rank"
    """Who must be named: the `rank`, the `host`, or of a link `either` of the two hosts: seen from
    its two ends, a link that is cut is the other one's."""
    ranks: tuple[int, ...] = tuple(range(WORLD_SIZE))
    workers: int = 0
    steps: int = STEPS
    says: str = ""
    """A word that must be in the sentence besides."""
    is_script: bool = False
    """Strikes in a loop of the user's own (level 1)."""
    is_outside: bool = False
    """Made on a host or its link, not inside a rank; repaired when it was reported."""
    restarts: bool = True
    ends_the_run: bool = False
    """No restart would help: a person starts it again, here as soon as it has ended."""


FAULTS = {
    "killed": Fault("SIGKILL", ("killed",)),
    "stopped": Fault("SIGSTOP", ("stopped",)),
    "gil": Fault("GIL held by a C call", ("gil",)),
    "dataset": Fault("stuck dataset", ("dataset",)),
    "worker_stuck": Fault("stuck DataLoader worker", ("dataset",), workers=2, says="worker"),
    "worker_stopped": Fault(
        "stopped DataLoader worker",
        ("dataset", "stopped"),
        workers=2,
        says="is stopped by a signal",
    ),
    "user_code": Fault("stuck in loss()", ("user_code",)),
    "left": Fault("left the loop, ended", ("left_early",), is_script=True),
    # In a loop of the user's own a break may end an epoch or the run; that the next collective is
    # another one is sure.
    "left_waiting": Fault(
        "left the loop, in a barrier", ("left_early", "mismatch"), is_script=True
    ),
    "extra": Fault("extra collective", ("mismatch",)),
    "shape": Fault("shape mismatch", ("mismatch",)),
    "exception": Fault("exception", ("exception",)),
    "memory": Fault("out of memory", ("out_of_memory",)),
    # TCP survives what is repaired within 20 s: the run continues.
    "cut": Fault("link cut", ("unreachable",), names="either", is_outside=True, restarts=False),
    "one_way": Fault(
        "one-way drop", ("unreachable",), names="either", is_outside=True, restarts=False
    ),
    "host_gone": Fault("host powered off", ("unreachable",), names="host", is_outside=True),
    # The rank that saves says it itself.
    "full_disk": Fault(
        "full disk in a save", ("exception", "storage"), ranks=(0,), ends_the_run=True
    ),
    "slow": Fault("slow rank (5x)", ("straggler",), steps=LONG, restarts=False),
}


@dataclass(frozen=True)
class Case:
    """One fault at one place."""

    name: str
    seed: int
    rank: int
    step: int

    @property
    def fault(self) -> Fault:
        return FAULTS[self.name]

    @property
    def host(self) -> str:
        return HOSTS[self.rank // RANKS_PER_HOST]

    def __str__(self) -> str:
        return f"{self.name}-{self.seed}"


def make_case(name: str, seed: int) -> Case:
    """Where the fault of that seed strikes."""
    chance = random.Random(f"{name} {seed}")
    rank = chance.choice(FAULTS[name].ranks)
    step = chance.randint(FIRST_STEP, LAST_STEP)
    if name == "full_disk":
        step = max(EVERY, step // EVERY * EVERY)  # this one is saved
    return Case(name, seed, rank, step)


def make_cases(count: int, seed: int, only: Sequence[str] = ()) -> list[Case]:
    """Of each fault in turn, until there are so many."""
    names = list(only or FAULTS)
    return [
        make_case(names[number % len(names)], seed + number // len(names))
        for number in range(count)
    ]


def make_chain(names: Sequence[str], seed: int) -> list[Case]:
    """Up to four faults of one run, each after at least one save of its own."""
    cases = (make_case(name, seed) for name in names)
    chance = random.Random(f"chain {seed}")
    return [replace(case, step=chance.randint(EVERY + 1, 2 * EVERY - 1)) for case in cases]
