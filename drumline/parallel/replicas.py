"""Compares the replicas: checks that all ranks' tensors are bitwise equal, every
`watch.replicas_every` steps and before each save.

If they are, that costs one pass over the tensors on their device and one all-reduce of two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.base.errors import TrainingError, log
from drumline.parallel.sharded_model import ShardedModel
from drumline.parallel.shards import is_shard, own_part
from drumline.parallel.wrap import unwrap_model
from drumline.rank.collectives import gather_json
from drumline.rank.tensor_hash import as_bytes, combine, hash_tensors
from drumline.rank.torch_internals import names_ignored_by_ddp
from drumline.watch.replica_differences import ReplicaDifference, find_difference


@dataclass
class ReplicaComparison:
    """Compares this rank's parameters, buffers and optimizer state with those of all others."""

    model: nn.Module
    optimizer: Optimizer
    host: str
    """Of this rank."""

    device: torch.device
    on_difference: Literal["stop", "broadcast"] = "stop"
    """Whether to raise, or to continue with the tensors of the majority."""

    include_buffers: bool = True
    """Not if each rank has its own (`--no-dist.broadcast_buffers`)."""

    tensors: Callable[[], dict[str, Tensor]] | None = None
    """What is compared in place of these."""

    sharded: ShardedModel | None = None
    """Of a sharded model only what several ranks have is compared: buffers, and the shards of
    replicas (hsdp)."""

    last_agreed: int | None = None
    """The latest step after which all ranks were equal."""

    def check(self, step: int) -> None:
        """Collective, of two ranks or more: compare. On a difference raise on every rank, or
        copy the majority's tensors to all."""
        tensors = self._compared_tensors()
        hashes = hash_tensors(list(tensors.values()), self.device)
        if not self._all_agree(tensors, hashes):
            self._resolve(self._find(tensors, hashes), tensors, step)

        self.last_agreed = step

    def _compared_tensors(self) -> dict[str, Tensor]:
        """What several ranks have the same of, by name; of shards this rank's part."""
        if self.tensors is not None:
            tensors = self.tensors()
        else:
            tensors = replica_tensors(
                self.model, self.optimizer, include_buffers=self.include_buffers
            )

        has_replicas = self.sharded is None or self._group is not None
        return {
            name: own_part(tensor)
            for name, tensor in tensors.items()
            if has_replicas or not is_shard(tensor)
        }

    def _all_agree(self, tensors: dict[str, Tensor], hashes: Tensor) -> bool:
        """Collective, of the same size for any tensors: ranks with different tensors are found, and
        do not block."""
        combined = combine(hashes, list(tensors))

        # the largest ~h belongs to the smallest h
        extremes = torch.stack([combined, ~combined])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        differs = (extremes[0] != ~extremes[1]).int()

        if self._group is not None:
            dist.all_reduce(differs, op=dist.ReduceOp.MAX)

        return not differs.item()

    @property
    def _group(self) -> Any:
        """The ranks that hold the same as this one; None: all."""
        return None if self.sharded is None else self.sharded.replica_group

    def _find(self, tensors: dict[str, Tensor], hashes: Tensor) -> ReplicaDifference:
        """Collective: gather every rank's hashes and compare them. A rank sends

        {"host": "gpu-02", "tensors": {"fc.weight": ["torch.float32 [10, 64]", 81985529216], ...}}
        """
        held = {}
        for (name, tensor), value in zip(tensors.items(), hashes.tolist(), strict=True):
            held[name] = [f"{tensor.dtype} {list(tensor.shape)}", value]

        reports = gather_json({"host": self.host, "tensors": held})
        if self.sharded is None or self._group is None:
            return find_difference(reports)

        # Each group of ranks is compared by itself; one of them has the difference.
        groups = self.sharded.replica_ranks()
        differences = (
            find_difference([reports[rank] for rank in ranks], ranks) for ranks in groups
        )

        return next(difference for difference in differences if difference.tensors)

    def _resolve(
        self,
        difference: ReplicaDifference,
        tensors: dict[str, Tensor],
        step: int,
    ) -> None:
        """Collective: raise on every rank, or copy the majority's tensors to those that differ."""
        sentence = difference.sentence(step, self.last_agreed)
        place = difference.place(step)
        if not difference.same_kinds:
            raise TrainingError(
                f"{sentence}; the tensors differ in type or shape, or are missing on some ranks",
                next_step="look for code that differs across ranks: the model, or which parameters are frozen",
                place=place,
            )

        if self.on_difference == "stop":
            raise TrainingError(
                sentence,
                next_step="rerun the same command to resume from the newest checkpoint, which was compared before "
                f"it was saved; test the memory of {difference.suspect_hosts()}; if it happens again at the same "
                "step, look for code that differs across ranks",
                place=place,
            )

        assert self.on_difference == "broadcast", self.on_difference
        names = difference.tensors if dist.get_rank() in difference.hosts else ()
        for name in names:
            _broadcast(tensors[name], difference.source, self.device, self._group)

        if dist.get_rank() == 0:
            log.warning(
                f"{sentence}; all ranks continue with the tensors of rank {difference.source}. "
                f"Test the memory of {difference.suspect_hosts()}"
            )


@torch.no_grad()
def _broadcast(tensor: Tensor, source: int, device: torch.device, group: Any) -> None:
    """Collective: one rank's tensor, into that of all others."""
    # What conj() and imag give is computed first: only then are the bytes those of the buffer.
    buffer = tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()

    # As bytes: not every backend supports every type.
    dist.broadcast(as_bytes(buffer), source, group=group)
    if dist.get_rank() != source:
        tensor.copy_(buffer)


def replica_tensors(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    include_buffers: bool,
) -> dict[str, Tensor]:
    """The tensors that must be the same on every rank after a step, by their names in a checkpoint:
    `fc.weight`, `bn.running_mean`, `fc.weight/exp_avg_sq`. They are not copied. Call it each time:
    an optimizer creates its state at the first step, and loading replaces it."""
    plain = unwrap_model(model)
    ignored = names_ignored_by_ddp(plain)
    parameters = {name: tensor for name, tensor in plain.named_parameters() if name not in ignored}

    buffers = {
        name: tensor
        for name, tensor in plain.named_buffers()
        if include_buffers and name not in ignored
    }

    state: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state.update(_tensors_in(optimizer.state.get(parameter), name))

    return {**parameters, **buffers, **state}


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an optimizer's state, by name: `fc.weight/exp_avg`, `fc.weight/step`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors_in(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from _tensors_in(inner, f"{name}/{position}")
