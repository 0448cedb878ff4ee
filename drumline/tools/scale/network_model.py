"""How long an all-reduce takes: by its bytes, the ranks within a node and between nodes, the links
and the backend.

gloo's is one ring over all ranks. NCCL chooses the fastest of a ring and a tree, each with two
protocols: its own cost model is used here. No torch.

A link has a bandwidth and a latency. With gloo, 25 MiB over 4 nodes with `10gbit,50us` are six hops
of a quarter of the bytes each; a hop takes 5.6 ms to send them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from drumline.base.errors import UsageError, did_you_mean
from drumline.base.text import bit_rate, latency
from drumline.base.untrusted import parse_json, read_regular

SEGMENTS = 2
"""gloo keeps two segments of a ring's chunk in flight (gloo/allreduce.cc)."""
DOCTORS = ("world_size", "all_reduce_bytes", "all_reduce_gb_per_s", "all_reduce_latency_us")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects ranks: within a node, or a node with the others."""

    name: str
    bytes_per_s: float
    """What an all-reduce moves over it in each direction (the bus bandwidth of nccl-tests)."""
    latency_s: float = 0.0
    """Of one hop; with NCCL, in addition to NCCL's own."""
    kind: str = "network"
    """`network`, `pcie` or `nvlink`."""
    source: str = "measured"
    rates: tuple[tuple[float, float], ...] = ()
    """The bytes that an all-reduce sends over the link, and the bandwidth with them, where it was
    measured by size. Not the bytes of a hop: what limits a link's bandwidth (bursts that it lets
    pass, TCP's windows and queues) depends on how much follows each other."""

    def rate(self, sent_bytes: float) -> float:
        """The bandwidth for so many bytes: between two measured sizes, by their ratio."""
        if not self.rates:
            return self.bytes_per_s

        place = bisect_left(self.rates, (sent_bytes, 0.0))
        if place == 0:
            return self.rates[0][1]
        if place == len(self.rates):
            return self.rates[-1][1]

        low, slow = self.rates[place - 1]
        high, fast = self.rates[place]
        return slow + (fast - slow) * math.log(sent_bytes / low) / math.log(high / low)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The links of a job, and the backend that uses them."""

    backend: str
    between: Link
    inside: Link

    @property
    def lanes(self) -> int:
        """Collectives of a process group that run at a time: ProcessGroupGloo has two threads, NCCL
        one stream."""
        return 2 if self.backend == "gloo" else 1

    def used(self, nodes: int, per_node: int) -> list[Link]:
        """The links that an all-reduce over these ranks goes through."""
        return [self.between] * (nodes > 1) + [self.inside] * (per_node > 1)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One all-reduce."""

    alone_s: float
    """How long it takes when no other runs."""
    busy_s: float
    """How much of the slowest link's time it needs: less than `alone_s` where it waits for hops."""

    @property
    def rate_alone(self) -> float:
        """The part of the link's bandwidth that it uses when no other runs."""
        return self.busy_s / self.alone_s


# Links by name: a nominal rate, and the part of it that an all-reduce reaches

# Payload of an Ethernet frame at an MTU of 1500, with all headers and the gap between frames.
_TCP = 1448 / 1538
_RDMA = 12.0 / 12.5  # NCCL counts 12 GB/s for 100 Gbit/s: NET_BW in src/graph/topo.h
# assumed; docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html has the nominal rates
_EFA = 0.8
RDMA_GBIT = 100
# Digits are limited, so that every rate is a finite number.
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)([kmg])bit(?:,(\d{1,6}(?:\.\d{1,6})?)(us|ms|s))?")
_GBIT = {"k": 1e-6, "m": 1e-3, "g": 1.0}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def _nominal(name: str, gbit: float, part: float, how: str, latency_s: float = 0.0) -> Link:
    """A link of this rate, of which an all-reduce reaches a part. `how`: as in `with TCP`."""
    bytes_per_s = gbit / 8 * 1e9
    source = f"nominal {bit_rate(bytes_per_s)} a node, {part:.0%} of it {how}"
    return Link(name=name, bytes_per_s=bytes_per_s * part, latency_s=latency_s, source=source)


def _of_rate(name: str, gbit: float, latency_s: float = 0.0) -> Link:
    """TCP below 100 Gbit/s, RDMA from there, as is usual. `latency_s`: of the network, beside what
    the software takes."""
    added = f" beside {latency(latency_s)} of the network" if latency_s else ""
    if gbit < RDMA_GBIT:
        how = f"with TCP; 25 us a hop assumed{added}"
        return _nominal(name, gbit, _TCP, how, 25e-6 + latency_s)

    how = f"with RDMA, as NCCL counts it{added}"
    return _nominal(name, gbit, _RDMA, how, latency_s)


def rated_link(text: str) -> Link | None:
    """The network of a rate and a latency, as in `60mbit,0.2ms` or `60mbit`; None: it is no
    rate."""
    match = _RATE.fullmatch(text)
    if match is None:
        return None

    number, unit, delay, delay_unit = match.groups()
    gbit = float(number) * _GBIT[unit]
    if not gbit:
        return None

    latency_s = float(delay) * _SECONDS[delay_unit] if delay else 0.0
    return _of_rate(text, gbit, latency_s)


def is_nominal(network: str) -> bool:
    """Whether it is a name or a rate, which is not measured."""
    return network in NETWORKS or rated_link(network) is not None


def _counted(name: str, kind: str, gb_per_s: float) -> Link:
    """A link inside a node, with the bandwidth that NCCL counts for a GPU."""
    source = f"{gb_per_s:g} GB/s a GPU, as NCCL counts it"
    return Link(name=name, bytes_per_s=gb_per_s * 1e9, kind=kind, source=source)


def _by_name(*links: Link) -> Mapping[str, Link]:
    """A table of links, as flags name them."""
    return {link.name: link for link in links}


NETWORKS = _by_name(
    *(_of_rate(f"{gbit}gbit", gbit) for gbit in (1, 10, 25, 100, 200, 400, 3200)),
    # NCCL's own 14 us a hop fit nccl-tests with EFA: 319 us on 4 nodes, 631 on 8 (p3dn,
    # gist.github.com/jacobkahn).
    *(_nominal(name, gbit, _EFA, "assumed") for name, gbit in (("efa-p4d", 400), ("efa-p5", 3200))),
)
# Links of a GPU times SM80_, SM90_ and SM100_NVLINK_BW, and PCI_BW (of PCIe 3), in NCCL's
# src/graph/topo.h.
INSIDE = _by_name(
    _counted("nvlink3", "nvlink", 12 * 20.0),
    _counted("nvlink4", "nvlink", 18 * 20.6),
    _counted("nvlink5", "nvlink", 18 * 40.1),
    _counted("pcie3", "pcie", 12.0),
    _counted("pcie4", "pcie", 24.0),
    Link(
        name="loopback",
        bytes_per_s=2e9,
        latency_s=50e-6,
        source="2 GB/s and 50 us a hop assumed",
    ),
)
_BY_DEVICE = {"B200": "nvlink5", "H200": "nvlink4", "H100": "nvlink4", "A100": "nvlink3"}


def usual_inside(device: str) -> Link:
    """What connects GPUs of this kind within a node, or processes on a CPU."""
    if device == "cpu":
        return INSIDE["loopback"]

    for chip, name in _BY_DEVICE.items():
        if chip in device:
            return INSIDE[name]

    return INSIDE["pcie4"]


def link_from_points(
    name: str,
    points: Sequence[tuple[float, float]],
    *,
    world_size: int,
    backend: str,
) -> Link:
    """A link from the (bytes, seconds) of all-reduces over `world_size` ranks: the smallest gives
    the latency of a hop, the larger ones the bandwidth by size."""
    num_hops = 2 * (world_size - 1)
    hops = [(num_bytes / world_size, seconds / num_hops) for num_bytes, seconds in sorted(points)]
    small, small_s = hops[0]
    large, large_s = hops[-1]

    latency_s = 0.0
    if large > small:
        segment_s = small / SEGMENTS * large_s / large
        latency_s = max(0.0, small_s - segment_s)

    # A hop that is not much longer than the latency says little about the bandwidth.
    rates = tuple(
        (num_hops * size, size / seconds) for size, seconds in hops if seconds >= 4 * latency_s
    )
    if backend == "nccl":
        rates = ()
        latency_s = max(0.0, latency_s - NCCL[0]["network"][RING] * 1e-6)

    source = f"measured with {backend} on {world_size} ranks"
    return Link(
        name=name,
        bytes_per_s=large / large_s,
        latency_s=latency_s,
        source=source,
        rates=rates,
    )


def read_doctor(flag: str, path: Path) -> list[dict[str, float]]:
    """What `drumline doctor --json` measured: on this machine, or on each rank of several hosts
    that has a result. A UsageError names the flag."""
    try:
        return _doctor_numbers(path)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise UsageError(
            f"{flag}: {path} has no measured all_reduce of several ranks: {type(error).__name__}: {error}",
            next_step=f"make it: drumline doctor --collectives --json > {path}, or with --hosts a,b",
        ) from None


def _doctor_numbers(path: Path) -> list[dict[str, float]]:
    """The numbers of each rank in such a file; many errors where it is none."""
    collectives = parse_json(read_regular(path, follow_links=True))["collectives"]
    measured = [collectives]
    if isinstance(collectives, list):
        results = [rank.get("result") for rank in collectives]
        measured = [result["numbers"] for result in results if result and result["numbers"]]

    ranks = [{name: float(numbers[name]) for name in DOCTORS} for numbers in measured]
    if not ranks:
        raise ValueError("it measured no rank")

    for numbers in ranks:
        if numbers["world_size"] < 2 or not numbers["all_reduce_gb_per_s"] > 0:
            raise ValueError("it measured no all_reduce between ranks")

    return ranks


def link_from_doctor(name: str, numbers: Mapping[str, float], backend: str) -> Link:
    """A link from what `drumline doctor` measured on one rank: the time of a large all-reduce, by
    its bus bandwidth, and that of the smallest."""
    world_size = int(numbers["world_size"])
    num_bytes = numbers["all_reduce_bytes"]
    bytes_per_s = numbers["all_reduce_gb_per_s"] * 1e9
    large_s = num_bytes * 2 * (world_size - 1) / world_size / bytes_per_s
    points = [(4.0, numbers["all_reduce_latency_us"] / 1e6), (num_bytes, large_s)]

    return link_from_points(name, points, world_size=world_size, backend=backend)


def chosen_link(flag: str, name: str, links: Mapping[str, Link], backend: str) -> Link:
    """A link by its name, or from a file that `drumline doctor --json` wrote; a UsageError lists
    the names."""
    if name in links:
        return links[name]

    path = Path(name)
    if path.exists():
        return link_from_doctor(path.name, read_doctor(flag, path)[0], backend)

    raise UsageError(
        f"{flag}: there is no network {name!r}; {did_you_mean(name, links)}",
        next_step="give one of these, a file that `drumline doctor --json` wrote, or for --network "
        "a rate and a latency as in 60mbit,0.2ms",
    )


# All-reduce

TREE = 0
RING = 1
# Constants of NCCL's cost model (src/graph/tuning.cc, 2.30) for tree and ring: latencies in us, and
# the part of the bus bandwidth; for the protocols LL and Simple.
NCCL: tuple[Mapping[str, tuple[float, float]], ...] = (
    {
        "base": (6.8, 6.6),
        "nvlink": (0.6, 0.6),
        "pcie": (1.0, 1.0),
        "network": (5.0, 2.7),
        "bandwidth": (1 / 3.8, 0.5),
    },
    {
        "base": (8.4, 8.4),
        "nvlink": (4.0, 3.4),
        "pcie": (4.0, 5.7),
        "network": (14.0, 14.0),
        "bandwidth": (0.92, 1.0),
    },
)


@lru_cache(maxsize=65536)
def all_reduce(network: Network, num_bytes: int, nodes: int, per_node: int) -> Transfer:
    """An all-reduce of `num_bytes` over `nodes` times `per_node` ranks, as the backend does it."""
    if nodes * per_node == 1:
        return Transfer(alone_s=0.0, busy_s=0.0)
    if network.backend == "gloo":
        return gloo_ring(network, num_bytes, nodes, per_node)

    transfers = (
        nccl_transfer(network, protocol, way, num_bytes, nodes, per_node)
        for protocol in NCCL
        for way in (TREE, RING)
    )
    return min(transfers, key=lambda transfer: transfer.alone_s)


def gloo_ring(network: Network, num_bytes: int, nodes: int, per_node: int) -> Transfer:
    """2(n-1) hops, each of a chunk of 1/n of the bytes. The second segment of a chunk is sent while
    the first is being reduced at its receiver, so that a hop takes the time to send its chunk, or
    one segment and the latency."""
    ranks = nodes * per_node
    used = network.used(nodes, per_node)
    chunk = num_bytes / ranks
    hops = 2 * (ranks - 1)
    slowest = min(link.rate(hops * chunk) for link in used)
    latency_s = max(link.latency_s for link in used)
    segment_s = chunk / SEGMENTS / slowest
    hop_s = max(SEGMENTS * segment_s, segment_s + latency_s)

    return Transfer(alone_s=hops * hop_s, busy_s=hops * SEGMENTS * segment_s)


def nccl_transfer(
    network: Network,
    protocol: Mapping[str, tuple[float, float]],
    way: int,
    num_bytes: int,
    nodes: int,
    per_node: int,
) -> Transfer:
    """An all-reduce of NCCL with one of its protocols, as a ring or as a tree (`way`).

    A ring goes through all GPUs of a node, then to the next node; a tree is a chain within a
    node and a binary tree between nodes, up and down."""
    ranks = nodes * per_node
    if way == RING:
        between = 2 * (nodes - 1)
        inside = 2 * (ranks - nodes)
        moved = 2 * (ranks - 1) / ranks
    else:
        between = 2 * int(math.log2(nodes))
        inside = 2 * (per_node - 1)
        moved = 2.0

    latency_s = 0.0
    for num_hops, link in ((inside, network.inside), (between, network.between)):
        latency_s += num_hops * (protocol[link.kind][way] * 1e-6 + link.latency_s)

    slowest = min(link.bytes_per_s for link in network.used(nodes, per_node))
    busy_s = moved * num_bytes / (slowest * protocol["bandwidth"][way])
    base_s = protocol["base"][way] * 1e-6

    return Transfer(alone_s=base_s + latency_s + busy_s, busy_s=busy_s)
