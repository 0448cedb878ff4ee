"""Jobs and links at random from a seed, for `benchmarks.scale_grid --seed`: cells that nobody has
looked at while the model was made. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Work = Literal["wait", "compute", "host"]
Tensors = Literal["even", "huge", "small"]
WORKS: tuple[Work, ...] = ("wait", "compute", "host")
TENSORS: tuple[Tensors, ...] = ("even", "huge", "small")
CAPS_MB = (1.0, 4.0, 25.0)
MBITS = (20.0, 1000.0)
MODELS_MB = (1.0, 32.0)
COMPUTE_S = (0.1, 0.6)
HOSTS = (2, 8)
LAYERS = 24
NUM_SMALL = 600
HUGE_PART = 0.8
"""Of the bytes of a model with one huge tensor."""
MOST_MBIT = 2000
"""Of all hosts together: that much keeps two cores busy for 65 to 80% of the time, so more would
wait for the CPU."""
COMPUTE_BYTES_PER_S = 8e6
"""Bytes of gradients for a second of real compute. Where no core is spare, each byte takes some 6 ns
of CPU time from what is computed beside it, which is not in the model: so much is 5%."""
SMALL_CPU_S = 0.05
"""The CPU time of a step with 600 tensors."""
MOST_BUSY = 0.5
"""Of the cores, by these."""
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DrawnCell:
    """A job on some hosts."""

    work: Work
    """`wait`: layers wait in Python; `compute`: they multiply matrices; `host`: most of a step is
    Python before its forward pass."""
    tensors: Tensors
    model_bytes: int
    compute_s: float
    mbit: float
    hosts: int
    cap_mb: float

    @property
    def tensor_bytes(self) -> list[int]:
        """In the order of registration."""
        if self.tensors == "small":
            return [_whole(self.model_bytes / NUM_SMALL)] * NUM_SMALL
        if self.tensors == "huge":  # as an embedding: DDP reduces it last
            rest = _whole(self.model_bytes * (1 - HUGE_PART) / (LAYERS - 1))
            return [_whole(self.model_bytes * HUGE_PART), *[rest] * (LAYERS - 1)]
        return layer_bytes(self.model_bytes)

    @property
    def bytes_s(self) -> float:
        """How long the link takes for the bytes of an all-reduce of all gradients."""
        moved = 2 * (self.hosts - 1) / self.hosts * self.model_bytes
        return moved * 8 / (self.mbit * 1e6)


def _whole(num_bytes: float) -> int:
    """Bytes of whole floats."""
    return max(1, round(num_bytes / 4)) * 4


def layer_bytes(model_bytes: int) -> list[int]:
    """The layers of a replayed model, each with one tensor."""
    total = model_bytes // 4
    return [4 * (total * (1 + number % 3) // (2 * LAYERS)) for number in range(LAYERS)]


def drawn_cells(seed: int, *, cores: int, most_s: float) -> Iterator[DrawnCell]:
    """Without an end; the same seed gives the same cells. Cells that this machine cannot give their
    cores are left out, and those whose steps would be longer than `most_s`, were nothing hidden."""
    draw = random.Random(seed)
    while True:
        work = draw.choice(WORKS)
        most_hosts = min(HOSTS[1], computing_hosts(cores)) if work == "compute" else HOSTS[1]
        most_mb = MODELS_MB[1]
        compute_s = round(_by_ratio(draw, COMPUTE_S), 3)
        if work == "compute":
            most_mb = COMPUTE_BYTES_PER_S * compute_s / MIB
        cell = DrawnCell(
            work=work,
            tensors=draw.choice(TENSORS),
            model_bytes=round(_by_ratio(draw, (MODELS_MB[0], max(MODELS_MB[0], most_mb))) * MIB),
            compute_s=compute_s,
            mbit=round(_by_ratio(draw, MBITS)),
            hosts=draw.randint(HOSTS[0], max(HOSTS[0], most_hosts)),
            cap_mb=draw.choice(CAPS_MB),
        )
        if has_cores(cell, cores) and cell.compute_s + cell.bytes_s <= most_s:
            yield cell


def computing_hosts(cores: int) -> int:
    """As many as have a core for their compute and one for what gloo's threads do beside it."""
    return max(HOSTS[0], cores // 2)


def has_cores(cell: DrawnCell, cores: int) -> bool:
    """Whether the hosts of a cell, which share `cores`, hardly wait for one."""
    if cell.mbit * cell.hosts > MOST_MBIT:
        return False
    if cell.work == "compute":
        return cell.hosts <= computing_hosts(cores)
    if cell.tensors == "small":
        busy_s = cell.hosts * SMALL_CPU_S
        return busy_s <= MOST_BUSY * cores * (cell.compute_s + SMALL_CPU_S)
    return True


def _by_ratio(draw: random.Random, bounds: tuple[float, float]) -> float:
    """As likely to be halved as doubled."""
    low, high = bounds
    return low * (high / low) ** draw.random()
