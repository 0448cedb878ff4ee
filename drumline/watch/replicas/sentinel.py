"""The replica sentinel: every so many steps, and before each save, are all ranks' copies still the same bits?

DDP gives every rank the same gradient and trusts that the copies then stay the same. A flipped bit, a faulty core or
code that does something else on one rank breaks that without a word. While all agree, a comparison costs one pass over
the tensors on their device and one all-reduce of two numbers.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.distributed.collectives import gather_json
from drumline.distributed.tensor_hash import combine, hash_tensors
from drumline.errors import TrainingError
from drumline.log import log
from drumline.watch.replicas.difference import Difference, find_difference
from drumline.watch.replicas.replica import replica_tensors


class Sentinel:
    """Compares this rank's parameters, buffers and optimizer state with those of all others."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        host: str,
        device: torch.device,
        on_difference: Literal["stop", "broadcast"] = "stop",
        include_buffers: bool = True,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._host = host
        self._device = device
        self._on_difference = on_difference
        self._include_buffers = include_buffers
        self.last_agreed: int | None = None
        """The latest step after which all ranks were found the same."""

    def check(self, step: int) -> None:
        """Collective: compare. On a difference raise on every rank, or give all of them the majority's tensors."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        tensors = replica_tensors(self._model, self._optimizer, include_buffers=self._include_buffers)
        hashes = hash_tensors(list(tensors.values()), self._device)
        if not self._all_agree(tensors, hashes):
            self._act(self._find(tensors, hashes), tensors, step)
        self.last_agreed = step

    def _all_agree(self, tensors: dict[str, Tensor], hashes: Tensor) -> bool:
        """Collective. Of one size whatever a rank holds, so that ranks with other tensors are found, not waited for."""
        mine = combine(hashes, list(tensors))
        both = torch.stack([mine, ~mine])  # the largest ~h belongs to the smallest h
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        largest, not_smallest = both.tolist()
        return bool(largest == ~not_smallest)

    def _find(self, tensors: dict[str, Tensor], hashes: Tensor) -> Difference:
        """Collective: gather every rank's hashes and see."""
        held = {
            name: [f"{tensor.dtype} {list(tensor.shape)}", value]
            for (name, tensor), value in zip(tensors.items(), hashes.tolist(), strict=True)
        }
        return find_difference(gather_json({"host": self._host, "tensors": held}, device=self._device))

    def _act(self, difference: Difference, tensors: dict[str, Tensor], step: int) -> None:
        """Collective."""
        sentence, place = difference.sentence(step, self.last_agreed), difference.place(step)
        if not difference.same_kinds:
            raise TrainingError(
                f"{sentence}; what differs has another type or shape, or is missing on some ranks",
                next_step="look for code that does something else on some ranks: the model, or what is frozen in it",
                place=place,
            )
        if self._on_difference == "stop":
            raise TrainingError(
                sentence,
                next_step="run the same command again: it goes on from the newest checkpoint, which was compared "
                f"before it was saved; test the memory of {difference.suspect_hosts()}; if it comes again at the same "
                "place, look for code that does something else on some ranks",
                place=place,
            )
        for name in difference.tensors:
            _send(tensors[name], difference.source, self._device)
        if dist.get_rank() == 0:
            log.warning(
                f"{sentence}; all ranks go on with the tensors of rank {difference.source}. "
                f"Test the memory of {difference.suspect_hosts()}"
            )


@torch.no_grad()
def _send(tensor: Tensor, source: int, device: torch.device) -> None:
    """Collective: one rank's tensor, into that of all others."""
    buffer = tensor.detach().to(device).contiguous()
    # As bytes: not every backend knows every type.
    dist.broadcast(buffer.reshape(-1).view(torch.uint8), source)
    if dist.get_rank() != source:
        tensor.copy_(buffer)
