"""How ranks are connected with each other, as NCCL's lines about channels show it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

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
    is_named: bool = True
    """False: the lines of a file that name no process."""
    rank: int | None = None
    world_size: int = 0
    network: str = ""
    interface: str = ""
    """The value of NCCL_SOCKET_IFNAME."""
    bootstrap: tuple[str, str] = ("", "")
    """Interface and address by which ranks meet."""
    missing_plugin: str = ""
    devices: dict[str, str] = field(default_factory=dict)
    """By `Socket/0`: `eth0 10.0.0.1`."""
    communicators: dict[str, LoggedCommunicator] = field(default_factory=dict)
    """By pointer."""
    is_connected: bool = False
    """At least one communicator."""
    settings: dict[str, str] = field(default_factory=dict)
    """NCCL's variables, and the driver."""

    @property
    def is_complete(self) -> bool:
        """Whether its communicators were initialized, as far as the log shows."""
        return self.is_connected or all(
            communicator.is_complete for communicator in self.communicators.values()
        )

    @property
    def origin(self) -> str:
        """A key of the process, which its faults have."""
        return f"{self.host}:{self.pid}"

    @property
    def name(self) -> str:
        """How messages name the process."""
        if self.rank is None:
            return f"{self.host} (process {self.pid})" if self.is_named else self.host
        return f"rank {self.rank} on {self.host}"

    def read_init(self, match: re.Match[str]) -> None:
        """A communicator begins, or is complete. `match`: of INIT, as in

        comm 0x55d0 rank 3 nranks 8 cudaDev 3 nvmlDev 3 ... - Init COMPLETE
        """
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
            self.communicators[pointer] = communicator

        communicator.is_complete = match["state"] == "COMPLETE"

    def possible_sizes(self, rank: int, largest_rank: int) -> frozenset[int]:
        """Of the communicators that a channel of this rank of the process may belong to."""
        return frozenset(
            communicator.size
            for communicator in self.communicators.values()
            if communicator.rank == rank and largest_rank < communicator.size
        )


MAX_CONNECTIONS = 50_000
CHANNEL = re.compile(
    r"Channel (\d{1,4})(?:/(\d{1,4}))? : (\d{1,7})\[\w{1,16}\] -> (\d{1,7})\[\w{1,16}\](?: \[(?P<way>send|receive)\])? "
    r"via (?P<kind>NET|P2P|SHM|COLLNET)(?:/(?P<name>[^/]{1,40}))?(?:/(?P<device>\d{1,4})(?!\[))?(?P<options>.{0,60})"
)


@dataclass(frozen=True, order=True)
class LoggedLink:
    """How one rank sends to another."""

    transport: str
    """`P2P/CUMEM`, `SHM/direct`, `NET/Socket`, `NET/IB/GDRDMA`."""
    device: str
    """`eth0 10.0.0.1`, `mlx5_0 1/RoCE`; empty: none, or not logged."""
    source: int
    target: int
    num_channels: int
    is_global: bool
    """Whether these are ranks of the largest communicator; else of an unknown one."""


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """The channels by which one rank sends to another."""

    transport: str
    device: str
    source: int
    target: int
    sizes: frozenset[int]
    """Of the communicators that the ranks may belong to."""


class LoggedLinks:
    """The channels of all processes, and the links that they make."""

    def __init__(self) -> None:
        self.is_partial = False
        """Whether some connections were not kept."""
        self._channels: dict[ChannelGroup, set[tuple[str, str]]] = {}
        self._rdma_hosts: dict[str, bool] = {}
        """Whether one of its channels has GPUDirect."""

    def read_channel(self, process: LoggedProcess, match: re.Match[str]) -> None:
        """`match`: of CHANNEL, as in

        Channel 02/0 : 1[1] -> 2[2] [send] via NET/IB/0/GDRDMA
        """
        channel, number, source, target = match.groups()[:4]
        name = match["name"] or ""
        transport = f"{match['kind']}/{name.split()[0]}" if name else match["kind"]
        uses_gpu_direct = "GDRDMA" in match["options"]

        if uses_gpu_direct:
            transport += "/GDRDMA"

        if match["kind"] == "NET" and name != "Socket":
            used_it_before = self._rdma_hosts.get(process.host, False)
            self._rdma_hosts[process.host] = used_it_before or uses_gpu_direct

        this_rank = target if match["way"] == "receive" else source
        group = ChannelGroup(
            transport,
            process.devices.get(f"{name}/{match['device'] or ''}", ""),
            int(source),
            int(target),
            process.possible_sizes(int(this_rank), max(int(source), int(target))),
        )

        if group in self._channels or len(self._channels) < MAX_CONNECTIONS:
            self._channels.setdefault(group, set()).add((channel, number or ""))
        else:
            self.is_partial = True

    def hosts_without_gpu_direct(self) -> list[str]:
        """Those that use RDMA, but no channel of theirs GPUDirect."""
        return sorted(host for host, has_it in self._rdma_hosts.items() if not has_it)

    def links(self, world_size: int) -> list[LoggedLink]:
        """One for each pair; where both ends were logged, the end that has a device."""
        links: dict[tuple[bool, str, int, int], LoggedLink] = {}
        for group, channels in self._channels.items():
            link = LoggedLink(
                group.transport,
                group.device,
                group.source,
                group.target,
                num_channels=len(channels),
                is_global=group.sizes == {world_size},
            )
            key = (link.is_global, link.transport, link.source, link.target)
            before = links.get(key, link)
            links[key] = replace(
                link,
                device=before.device or link.device,
                num_channels=max(before.num_channels, link.num_channels),
            )

        return sorted(links.values())
