"""A model's buffers (BatchNorm's statistics, say), which rank 0 decides for all."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn


class LiveBuffers:
    """The buffers as they are at each moment: a forward pass may put a new tensor in the place of an old one."""

    def __init__(self, model: nn.Module) -> None:
        # Modules are gone through once, not in every step.
        self._places = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def now(self) -> list[Tensor]:
        return [buffer for places, name in self._places if (buffer := places[name]) is not None]

    def __bool__(self) -> bool:
        return bool(self._places)

    def keep(self, memory: list[Tensor] | None = None) -> list[Tensor]:
        """A copy of all of them, in the memory of an earlier one if it fits."""
        now = self.now()
        if memory is None or [one.shape for one in memory] != [one.shape for one in now]:
            memory = [torch.empty_like(buffer) for buffer in now]
        _copy_all(memory, now)
        return memory

    def put_back(self, kept: list[Tensor]) -> None:
        """The values that were kept; a buffer that has got another shape since is a cache, and stays."""
        pairs = [(to, value) for to, value in zip(self.now(), kept, strict=True) if to.shape == value.shape]
        _copy_all([to for to, _ in pairs], [value for _, value in pairs])

    def broadcast(self) -> None:
        """Collective: rank 0's, on every rank; one message for each type of them."""
        if not self._places or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for buffer in self.now():
            by_type[buffer.dtype].append(buffer)
        for buffers in by_type.values():
            message = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
            dist.broadcast(message.view(torch.uint8), 0)  # as bytes: not every backend knows every type
            if dist.get_rank() != 0:
                pieces = torch.split(message, [buffer.numel() for buffer in buffers])
                _copy_all(buffers, [piece.view_as(to) for piece, to in zip(pieces, buffers, strict=True)])


@torch.no_grad()
def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
