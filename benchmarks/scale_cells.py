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
    """Without an end; the same seed gives the same cells. Hosts share this machine: those that
    compute are at most as many as its `cores`, and all together send at most MOST_MBIT. Cells whose
    steps would be longer than `most_s`, were nothing hidden, are left out."""
    draw = random.Random(seed)
    while True:
        work = draw.choice(WORKS)
        most_hosts = min(HOSTS[1], cores) if work == "compute" else HOSTS[1]
        cell = DrawnCell(
            work=work,
            tensors=draw.choice(TENSORS),
            model_bytes=round(_by_ratio(draw, MODELS_MB) * MIB),
            compute_s=round(_by_ratio(draw, COMPUTE_S), 3),
            mbit=round(_by_ratio(draw, MBITS)),
            hosts=draw.randint(HOSTS[0], max(HOSTS[0], most_hosts)),
            cap_mb=draw.choice(CAPS_MB),
        )
        if cell.mbit * cell.hosts <= MOST_MBIT and cell.compute_s + cell.bytes_s <= most_s:
            yield cell


def _by_ratio(draw: random.Random, bounds: tuple[float, float]) -> float:
    """As likely to be halved as doubled."""
    low, high = bounds
    return low * (high / low) ** draw.random()
