"""How long an all-reduce takes: by its bytes, the ranks within a node and between nodes, the links and the backend.

gloo's is one ring over all ranks. NCCL chooses the fastest of a ring and a tree, each with two protocols: its own cost
model is used here. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from drumline.errors import UsageError, did_you_mean

SEGMENTS = 2
"""gloo keeps two segments of a ring's chunk in flight (gloo/allreduce.cc)."""
LANES: Mapping[str, int] = MappingProxyType({"gloo": 2, "nccl": 1})
"""How many collectives of a process group run at a time: ProcessGroupGloo has two threads, NCCL one stream."""
SMALL_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects ranks: within a node, or a node with the others."""

    name: str
    bytes_per_s: float
    """What an all-reduce moves over it in each direction (the bus bandwidth of nccl-tests)."""
    latency_s: float
    """Of one hop of a ring; with NCCL, in addition to NCCL's own."""
    kind: str = "network"
    """`network`, `pcie` or `nvlink`."""
    source: str = "measured"
    rates: tuple[tuple[float, float], ...] = ()
    """The bytes of a hop, and the bandwidth with them, where it was measured by size."""

    def rate(self, hop_bytes: float) -> float:
        """The bandwidth for hops of this size: between two measured sizes, by their ratio."""
        place = bisect_left(self.rates, (hop_bytes, 0.0))
        if place in (0, len(self.rates)):
            return self.rates[place and -1][1] if self.rates else self.bytes_per_s
        (low, slow), (high, fast) = self.rates[place - 1 : place + 1]
        return slow + (fast - slow) * math.log(hop_bytes / low) / math.log(high / low)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a job, and the backend that uses them."""

    backend: str
    between: Link
    inside: Link

    @property
    def lanes(self) -> int:
        return LANES.get(self.backend, 1)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One all-reduce."""

    alone_s: float
    """How long it takes when no other runs."""
    busy_s: float
    """How much of the slowest link's time it needs: less than `alone_s` where it waits for hops."""


# Links by name. A rate is nominal; the share of it that an all-reduce reaches is in the constants, with their source.

_TCP = 1448 / 1538  # payload of a full Ethernet frame with an MTU of 1500, with all headers and the gap between frames
_RDMA = 12.0 / 12.5  # NCCL counts 12 GB/s for 100 Gbit/s: NET_BW in src/graph/topo.h
_EFA = 0.8  # assumed; AWS states the nominal rate only


def _ethernet(gbit: int) -> Link:
    # The latency of a TCP hop is assumed; `doctor` measures it.
    source = f"nominal {gbit} Gbit/s, {_TCP:.0%} payload with TCP; 25 us a hop assumed"
    return Link(name=f"{gbit}gbit", bytes_per_s=gbit / 8 * 1e9 * _TCP, latency_s=25e-6, source=source)


def _rdma(gbit: int) -> Link:
    source = f"nominal {gbit} Gbit/s a node, {_RDMA:.0%} as NCCL counts it (NET_BW); RoCE or InfiniBand"
    return Link(name=f"{gbit}gbit", bytes_per_s=gbit / 8 * 1e9 * _RDMA, latency_s=0.0, source=source)


def _efa(name: str, gbit: int) -> Link:
    # Rates: docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html. NCCL's own 14 us a hop fit published
    # nccl-tests with EFA: 319 us on 4 nodes and 631 us on 8 (p3dn, gist.github.com/jacobkahn).
    source = f"nominal {gbit} Gbit/s a node (AWS), {_EFA:.0%} of it assumed"
    return Link(name=name, bytes_per_s=gbit / 8 * 1e9 * _EFA, latency_s=0.0, source=source)


def _nvlink(name: str, links: int, gb_per_s: float) -> Link:
    # SM80_, SM90_ and SM100_NVLINK_BW of NCCL's src/graph/topo.h, for each link of a GPU.
    source = f"{links} links of {gb_per_s:g} GB/s, as NCCL counts them"
    return Link(name=name, bytes_per_s=links * gb_per_s * 1e9, latency_s=0.0, kind="nvlink", source=source)


NETWORKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            _ethernet(1),
            _ethernet(10),
            _ethernet(25),
            _rdma(100),
            _rdma(200),
            _rdma(400),
            _rdma(3200),
            _efa("efa-p4d", 400),
            _efa("efa-p5", 3200),
        )
    }
)
INSIDE: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            _nvlink("nvlink3", 12, 20.0),  # A100
            _nvlink("nvlink4", 18, 20.6),  # H100, H200
            _nvlink("nvlink5", 18, 40.1),  # B200
            # PCI_BW of the same file: a third generation's 16 lanes.
            Link(name="pcie3", bytes_per_s=12e9, latency_s=0.0, kind="pcie", source="12 GB/s, as NCCL counts it"),
            Link(name="pcie4", bytes_per_s=24e9, latency_s=0.0, kind="pcie", source="twice NCCL's 12 GB/s of PCIe 3"),
            # Between processes of one host over loopback; assumed.
            Link(name="shared-memory", bytes_per_s=2e9, latency_s=50e-6, source="2 GB/s and 50 us assumed"),
        )
    }
)
_BY_DEVICE = {"B200": "nvlink5", "H200": "nvlink4", "H100": "nvlink4", "A100": "nvlink3"}


def named_link(flag: str, name: str, links: Mapping[str, Link]) -> Link:
    """A link by its name; a UsageError lists the names."""
    if name not in links:
        raise UsageError(
            f"{flag}: there is no network {name!r}; {did_you_mean(name, links)}",
            next_step="give one of these, or a file that `drumline doctor --json` wrote",
        )
    return links[name]


def usual_inside(device: str) -> Link:
    """What connects GPUs of this kind within a node, or processes on a CPU."""
    if device == "cpu":
        return INSIDE["shared-memory"]
    return INSIDE[next((link for chip, link in _BY_DEVICE.items() if chip in device), "pcie4")]


# Measured links


def link_from_points(name: str, points: Sequence[tuple[float, float]], *, world_size: int, backend: str) -> Link:
    """A link from the (bytes, seconds) of all-reduces over `world_size` ranks: the smallest gives the latency of a hop,
    the larger ones the bandwidth by size, the largest that of everything larger."""
    hops = [(num_bytes / world_size, seconds / (2 * (world_size - 1))) for num_bytes, seconds in sorted(points)]
    (small, small_s), (large, large_s) = hops[0], hops[-1]
    latency_s = max(0.0, small_s - small * large_s / large) if large > small else 0.0
    # A hop that is not much longer than the latency says little about the bandwidth.
    rates = tuple((size, size / seconds) for size, seconds in hops if seconds >= 4 * latency_s)
    if backend == "nccl":
        rates, latency_s = (), max(0.0, latency_s - NCCL[0].hop("network"))
    source = f"measured with {backend} on {world_size} ranks"
    return Link(name=name, bytes_per_s=large / large_s, latency_s=latency_s, source=source, rates=rates)


def link_from_doctor(name: str, document: Any, backend: str) -> Link:
    """A link from what `drumline doctor --json` printed; raises the errors of a damaged document."""
    found = document["collectives"]
    world_size = len(found) if isinstance(found, list) else int(found["world_size"])
    numbers = next(one["result"]["numbers"] for one in found) if isinstance(found, list) else found
    num_bytes, rate = float(numbers["all_reduce_bytes"]), float(numbers["all_reduce_gb_per_s"]) * 1e9
    if world_size < 2 or not rate > 0:
        raise ValueError("it measured no all_reduce between ranks")
    large_s = num_bytes * 2 * (world_size - 1) / world_size / rate
    points = [(4.0, float(numbers["all_reduce_latency_us"]) / 1e6), (num_bytes, large_s)]
    return link_from_points(name, points, world_size=world_size, backend=backend)


# All-reduce


@dataclass(frozen=True)
class NcclProtocol:
    """Constants of NCCL's cost model (src/graph/tuning.cc, 2.30), in seconds: tree, ring."""

    base: tuple[float, float]
    nvlink: tuple[float, float]
    pcie: tuple[float, float]
    network: tuple[float, float]
    bandwidth: tuple[float, float]
    """Share of the bus bandwidth."""

    def hop(self, kind: str, algorithm: int = 1) -> float:
        latencies: tuple[float, float] = getattr(self, kind)
        return latencies[algorithm]


_US = 1e-6
NCCL = (
    NcclProtocol(  # LL
        base=(6.8 * _US, 6.6 * _US),
        nvlink=(0.6 * _US, 0.6 * _US),
        pcie=(1.0 * _US, 1.0 * _US),
        network=(5.0 * _US, 2.7 * _US),
        bandwidth=(1 / 3.8, 0.5),
    ),
    NcclProtocol(  # Simple
        base=(8.4 * _US, 8.4 * _US),
        nvlink=(4.0 * _US, 3.4 * _US),
        pcie=(4.0 * _US, 5.7 * _US),
        network=(14.0 * _US, 14.0 * _US),
        bandwidth=(0.92, 1.0),
    ),
)
TREE, RING = 0, 1


@lru_cache(maxsize=65536)
def all_reduce(network: Network, num_bytes: int, nodes: int, per_node: int) -> Transfer:
    """An all-reduce of `num_bytes` over `nodes` times `per_node` ranks."""
    if nodes * per_node == 1:
        return Transfer(alone_s=0.0, busy_s=0.0)
    return (gloo_ring if network.backend == "gloo" else nccl_fastest)(network, num_bytes, nodes, per_node)


def gloo_ring(network: Network, num_bytes: int, nodes: int, per_node: int) -> Transfer:
    """2(n-1) hops, each of a chunk of 1/n of the bytes. The second segment of a chunk is sent while the first is being
    reduced at its receiver, so that a hop takes the time to send its chunk, or one segment and the latency."""
    ranks, used = nodes * per_node, _links(network, nodes, per_node)
    chunk = num_bytes / ranks
    segment_s = chunk / SEGMENTS / min(link.rate(chunk) for link in used)
    hop_s = max(SEGMENTS * segment_s, segment_s + max(link.latency_s for link in used))
    hops = 2 * (ranks - 1)
    return Transfer(alone_s=hops * hop_s, busy_s=hops * SEGMENTS * segment_s)


def nccl_fastest(network: Network, num_bytes: int, nodes: int, per_node: int) -> Transfer:
    """NCCL takes the algorithm and the protocol that its model finds the fastest."""
    ways: tuple[Callable[..., Transfer], ...] = (nccl_ring, nccl_tree)
    found = (way(network, protocol, num_bytes, nodes, per_node) for way in ways for protocol in NCCL)
    return min(found, key=lambda transfer: transfer.alone_s)


def nccl_ring(network: Network, protocol: NcclProtocol, num_bytes: int, nodes: int, per_node: int) -> Transfer:
    """Through all GPUs of a node, then to the next node: each link carries 2(n-1)/n of the bytes."""
    ranks = nodes * per_node
    between = 2 * (nodes - 1)
    latency_s = (2 * (ranks - 1) - between) * _hop(network.inside, protocol, RING)
    latency_s += between * _hop(network.between, protocol, RING)
    rate = _slowest(network, nodes, per_node) * protocol.bandwidth[RING]
    busy_s = 2 * (ranks - 1) / ranks * num_bytes / rate
    return Transfer(alone_s=protocol.base[RING] + latency_s + busy_s, busy_s=busy_s)


def nccl_tree(network: Network, protocol: NcclProtocol, num_bytes: int, nodes: int, per_node: int) -> Transfer:
    """Up and down: a chain within a node, a binary tree between nodes. Each link carries twice the bytes."""
    latency_s = 2 * (per_node - 1) * _hop(network.inside, protocol, TREE)
    latency_s += 2 * int(math.log2(nodes)) * _hop(network.between, protocol, TREE)
    busy_s = 2 * num_bytes / (_slowest(network, nodes, per_node) * protocol.bandwidth[TREE])
    return Transfer(alone_s=protocol.base[TREE] + latency_s + busy_s, busy_s=busy_s)


def _links(network: Network, nodes: int, per_node: int) -> list[Link]:
    return [network.between] * (nodes > 1) + [network.inside] * (per_node > 1)


def _slowest(network: Network, nodes: int, per_node: int) -> float:
    return min(link.bytes_per_s for link in _links(network, nodes, per_node))


def _hop(link: Link, protocol: NcclProtocol, algorithm: int) -> float:
    return protocol.hop(link.kind, algorithm) + link.latency_s
