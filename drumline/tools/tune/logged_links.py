"""How ranks are connected with each other, as NCCL's lines about channels show it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from drumline.tools.tune.logged_process import LoggedProcess

MAX_CONNECTIONS = 50_000
CHANNEL = re.compile(
    r"Channel (\d{1,4})(?:/(\d{1,4}))? : (\d{1,7})\[\w{1,16}\] -> (\d{1,7})\[\w{1,16}\](?: \[(?P<way>send|receive)\])? "
    r"via (?P<kind>NET|P2P|SHM|COLLNET)(?:/(?P<name>[^/]{1,40}))?(?:/(?P<device>\d{1,4})(?!\[))?(?P<options>.{0,60})"
)


@dataclass(frozen=True, order=True)
class LoggedLink:
    """How one rank sends to another."""

    transport: str  # `P2P/CUMEM`, `SHM/direct`, `NET/Socket`, `NET/IB/GDRDMA`
    device: str  # `eth0 10.0.0.1`, `mlx5_0 1/RoCE`; empty: none, or not logged
    source: int
    target: int
    num_channels: int
    is_global: bool  # whether these are ranks of the largest communicator; else of an unknown one


@dataclass(frozen=True, slots=True)
class ChannelGroup:
    """The channels by which one rank sends to another."""

    transport: str
    device: str
    source: int
    target: int
    communicators: frozenset[tuple[str, int]]
    """Name and size of those that the ranks may belong to."""


class LoggedLinks:
    def __init__(self) -> None:
        self.is_partial = False  # whether some connections were not kept
        self._channels: dict[ChannelGroup, set[tuple[str, str]]] = {}
        self._rdma_hosts: dict[str, bool] = {}  # whether one of its channels has GPUDirect

    def read_channel(self, process: LoggedProcess, match: re.Match[str]) -> None:
        """`match`: of CHANNEL."""
        channel, number, source, target = match.groups()[:4]
        name = match["name"] or ""
        transport = f"{match['kind']}/{name.split()[0]}" if name else match["kind"]
        if "GDRDMA" in match["options"]:
            transport += "/GDRDMA"
        if match["kind"] == "NET" and name != "Socket":
            has_gpu_direct = self._rdma_hosts.get(process.host, False)
            self._rdma_hosts[process.host] = has_gpu_direct or transport.endswith("/GDRDMA")
        this_rank = target if match["way"] == "receive" else source
        candidates = process.possible_communicators(int(this_rank), max(int(source), int(target)))
        group = ChannelGroup(
            transport,
            process.devices.get(f"{name}/{match['device'] or ''}", ""),
            int(source),
            int(target),
            frozenset((communicator.name, communicator.size) for communicator in candidates),
        )
        if group in self._channels or len(self._channels) < MAX_CONNECTIONS:
            self._channels.setdefault(group, set()).add((channel, number or ""))
        else:
            self.is_partial = True

    def hosts_without_gpu_direct(self) -> list[str]:
        """Those that use RDMA without it beside hosts that use it."""
        if not any(self._rdma_hosts.values()):
            return []
        return sorted(host for host, has_it in self._rdma_hosts.items() if not has_it)

    def links(self, ranks: Mapping[int, LoggedProcess], world_size: int) -> list[LoggedLink]:
        """One for each pair; where both ends were logged, the end that has a device. `ranks`: the
        processes of the largest communicator."""
        members = _members(ranks)
        links: dict[tuple[bool, str, int, int], LoggedLink] = {}
        for group, channels in self._channels.items():
            pair = _global_pair(group, members, world_size)
            source, target = pair or (group.source, group.target)
            link = LoggedLink(
                group.transport, group.device, source, target, len(channels), pair is not None
            )
            key = (link.is_global, link.transport, source, target)
            before = links.get(key, link)
            links[key] = replace(
                link,
                device=before.device or link.device,
                num_channels=max(before.num_channels, link.num_channels),
            )
        return sorted(links.values())


def _members(ranks: Mapping[int, LoggedProcess]) -> dict[str, dict[int, int]]:
    """By name of a communicator and rank in it: the rank in the largest one."""
    members: dict[str, dict[int, int]] = {}
    for rank, process in ranks.items():
        for communicator in process.communicators.values():
            if communicator.name:
                members.setdefault(communicator.name, {})[communicator.rank] = rank
    return members


def _global_pair(
    group: ChannelGroup, members: Mapping[str, Mapping[int, int]], world_size: int
) -> tuple[int, int] | None:
    """The two ranks in the largest communicator; None: the logs do not show them."""
    pairs: set[tuple[int, int] | None] = set()
    for name, size in group.communicators:
        ranks = members.get(name, {})
        if size == world_size:
            pairs.add((group.source, group.target))
        elif group.source in ranks and group.target in ranks:
            pairs.add((ranks[group.source], ranks[group.target]))
        else:
            pairs.add(None)
    return pairs.pop() if len(pairs) == 1 else None
