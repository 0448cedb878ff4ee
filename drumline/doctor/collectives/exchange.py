"""Real collectives with values that are known beforehand, in the sizes and types that training uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from drumline.text import memory_size

SMALL, MEDIUM, LARGE = 1, 1000, 1 << 20
TYPES = (torch.float32, torch.int64)
# Weights of ranks stay small, so that sums over thousands of ranks are still exact in float32.
WEIGHTS = 16
# torch 2.13 gave it a new name, and warns about the old one, which is all that earlier versions know.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Exchange:
    """The collectives themselves, on one device; a test of the tests puts a faulty one in its place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        dist.all_reduce(tensor, op)
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        dist.broadcast(tensor, source)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor)
        return torch.cat(parts)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = torch.empty_like(tensor[: tensor.numel() // dist.get_world_size()])
        _reduce_scatter(part, tensor)
        return part

    def wait(self) -> None:
        """NCCL only puts work in line: this is where it is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Trial:
    """One collective: what it is called, how it is done, and what must come out."""

    name: str
    run: Callable[[], Tensor]
    right: Tensor
    is_needed: bool = True

    def fault(self, exchange: Exchange) -> str | None:
        """Run it; the first value that is wrong, in words."""
        on_device = self.run()
        exchange.wait()
        found = on_device.cpu()
        wrong = (found != self.right).nonzero()
        if not len(wrong):
            return None
        place = int(wrong[0])
        return (
            f"{self.name} gave {len(wrong)} wrong values of {found.numel()}: element {place} is "
            f"{found[place].item():g} where {self.right[place].item():g} is right"
        )


def trials(exchange: Exchange, *, rank: int, world_size: int) -> Iterator[Trial]:
    """All that training uses: sums of all sizes first, as they are what gradients need."""
    for dtype in TYPES:
        for size in (SMALL, MEDIUM, LARGE):
            yield _reduced(exchange, rank, world_size, size, dtype)
        yield _reduced(exchange, rank, world_size, MEDIUM, dtype, largest=True)
    for source in sorted({0, world_size - 1}):
        yield _sent(exchange, rank, source)
    yield _gathered(exchange, rank, world_size)
    yield _scattered(exchange, rank, world_size)


def pattern(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Neighbours differ, so that what arrives in a wrong place is seen."""
    return (torch.arange(size) % 7 + 1).to(dtype)


def weight(rank: int) -> int:
    return rank % WEIGHTS + 1


def _reduced(
    exchange: Exchange, rank: int, world_size: int, size: int, dtype: torch.dtype, *, largest: bool = False
) -> Trial:
    weights = [weight(other) for other in range(world_size)]
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    return Trial(
        f"all_reduce ({'max' if largest else 'sum'}) of {_amount(size, dtype)}",
        lambda: exchange.all_reduce((pattern(size, dtype) * weight(rank)).to(exchange.device), op),
        pattern(size, dtype) * (max(weights) if largest else sum(weights)),
    )


def _sent(exchange: Exchange, rank: int, source: int) -> Trial:
    right = pattern(MEDIUM) + source
    return Trial(
        f"broadcast from rank {source} of {_amount(MEDIUM, torch.float32)}",
        lambda: exchange.broadcast(
            (right if rank == source else torch.zeros(MEDIUM)).to(exchange.device), source
        ),
        right,
    )


def _gathered(exchange: Exchange, rank: int, world_size: int) -> Trial:
    return Trial(
        f"all_gather of {_amount(MEDIUM, torch.float32)}",
        lambda: exchange.all_gather((pattern(MEDIUM) + rank).to(exchange.device)),
        torch.cat([pattern(MEDIUM) + other for other in range(world_size)]),
    )


def _scattered(exchange: Exchange, rank: int, world_size: int) -> Trial:
    everything = torch.cat([pattern(MEDIUM) + other for other in range(world_size)])
    total = sum(weight(other) for other in range(world_size))
    return Trial(
        f"reduce_scatter of {_amount(MEDIUM * world_size, torch.float32)}",
        lambda: exchange.reduce_scatter((everything * weight(rank)).to(exchange.device)),
        (pattern(MEDIUM) + rank) * total,
        is_needed=False,
    )


def _amount(size: int, dtype: torch.dtype) -> str:
    return f"{memory_size(size * dtype.itemsize)} as {str(dtype).removeprefix('torch.')}"
