"""A process of a job and its communicators, as lines of NCCL show them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_COMMUNICATORS = 100  # of a process
INIT = re.compile(
    r"comm (?P<pointer>\S{1,20}) rank (?P<rank>\d{1,7}) nranks (?P<size>\d{1,7}) "
    r".{0,300}Init (?P<state>START|COMPLETE)"
)


@dataclass(kw_only=True)
class LoggedCommunicator:
    """One communicator, as one of its processes logs it."""

    rank: int
    size: int
    is_complete: bool = False


@dataclass(kw_only=True)
class LoggedProcess:
    """One process, as its lines show it. Ranks are those of its largest communicator."""

    host: str
    pid: int
    is_named: bool = True  # False: the lines of a file that name no process
    rank: int | None = None
    world_size: int = 0
    network: str = ""
    interface: str = ""  # the value of NCCL_SOCKET_IFNAME
    bootstrap: tuple[str, str] = ("", "")  # interface and address by which ranks meet
    missing_plugin: str = ""
    devices: dict[str, str] = field(default_factory=dict)  # by `Socket/0`: `eth0 10.0.0.1`
    communicators: dict[str, LoggedCommunicator] = field(default_factory=dict)  # by pointer
    is_connected: bool = False  # at least one communicator

    @property
    def is_complete(self) -> bool:
        return self.is_connected or all(
            communicator.is_complete for communicator in self.communicators.values()
        )

    @property
    def name(self) -> str:
        if self.rank is None:
            return f"{self.host} (process {self.pid})" if self.is_named else self.host
        return f"rank {self.rank} on {self.host}"

    def read_init(self, match: re.Match[str]) -> None:
        """`match`: of INIT."""
        rank = int(match["rank"])
        size = int(match["size"])
        if size >= self.world_size:
            self.rank = rank
            self.world_size = size
        pointer = match["pointer"]
        communicator = self.communicators.get(pointer)
        if match["state"] == "START" or communicator is None:
            self.communicators.pop(pointer, None)
            communicator = LoggedCommunicator(rank=rank, size=size)
            if len(self.communicators) < MAX_COMMUNICATORS:
                self.communicators[pointer] = communicator
        communicator.is_complete = match["state"] == "COMPLETE"

    def possible_communicators(self, rank: int, largest_rank: int) -> list[LoggedCommunicator]:
        """Those that a channel of this rank of the process may belong to."""
        candidates = [
            communicator
            for communicator in self.communicators.values()
            if communicator.rank == rank and largest_rank < communicator.size
        ]
        # Up to NCCL 2.21 it connects while it initializes, later at the first collective.
        initializing = [communicator for communicator in candidates if not communicator.is_complete]
        return initializing or candidates
