"""The process groups of replicas (`--dist.sync`), and sums of vectors over them, in fp32, bf16 or
int8 on the wire.

On 2 nodes with 4 ranks, each node a replica, there are the groups (0, 1, 2, 3) and (4, 5, 6, 7) for
the gradients of every step, and (0, 4), the leaders, for the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from drumline.rank.group import make_group

Wire = Literal["fp32", "bf16", "int8"]
BLOCK = 256
"""int8: so many values share one scale, which is sent in fp32."""

_LEVELS = 127
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ReplicaGroups:
    """Which ranks train a replica together, and which of them synchronize it with the others."""

    members: tuple[int, ...]
    """The ranks of this rank's replica, which reduce their gradients in every step. The first is
    its leader."""

    leaders: tuple[int, ...]
    """Of all replicas."""

    within: dist.ProcessGroup | None
    """The members; None if there is one."""

    across: dist.ProcessGroup | None
    """The leaders; None on the other ranks."""

    weight: float
    """The fraction of all ranks that are in this replica."""

    @property
    def index(self) -> int:
        """The number of this rank's replica, in the order of their leaders."""
        return self.leaders.index(self.members[0])

    def from_leader(self, tensor: Tensor) -> Tensor:
        """Collective inside a replica: its leader's tensor, in place."""
        if self.within is not None:
            dist.broadcast(tensor, self.members[0], self.within)
        return tensor


def make_replica_groups(
    replicas: Sequence[Sequence[int]],
    *,
    timeout_s: float,
    may_grow: bool,
) -> ReplicaGroups | None:
    """Collective: the groups of these replicas, each given by its ranks; None if there is one
    replica only, unless others may join it."""
    if len(replicas) < 2 and not may_grow:
        return None

    ordered = sorted(tuple(sorted(ranks)) for ranks in replicas)
    leaders = tuple(ranks[0] for ranks in ordered)
    across = make_group(leaders, timeout_s=timeout_s)

    # All ranks make all groups, in the same order.
    groups = {ranks: make_group(ranks, timeout_s=timeout_s) for ranks in ordered if len(ranks) > 1}
    (members,) = (ranks for ranks in ordered if dist.get_rank() in ranks)
    return ReplicaGroups(
        members=members,
        leaders=leaders,
        within=groups.get(members),
        across=across,
        weight=len(members) / dist.get_world_size(),
    )


def encode(rows: Tensor, wire: Wire) -> Tensor:
    """Rows of values as rows of bytes; for `int8` their length is a multiple of `BLOCK`. Such a row
    has all values, one byte each, and then the scale of each block:

        fp32: 4 bytes a value    bf16: 2 bytes a value    int8: 1 + 4 / 256 bytes a value
    """
    if wire != "int8":
        sent_dtypes = {"fp32": rows.dtype, "bf16": torch.bfloat16}
        return rows.to(sent_dtypes[wire]).contiguous().view(torch.uint8)

    blocks = rows.float().view(len(rows), -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True) / _LEVELS
    divisors = scales.clamp_min(torch.finfo(torch.float32).tiny)  # a block of zeros has scale 0
    rounded = (blocks / divisors).round_().to(torch.int8)

    parts = [rounded, scales]
    return torch.cat([part.flatten(1).view(torch.uint8) for part in parts], dim=1)


def decode(rows: Tensor, wire: Wire, dtype: torch.dtype) -> Tensor:
    """The reverse of `encode`, but for its rounding."""
    if wire == "fp32":
        return rows.view(dtype)
    if wire == "bf16":
        return rows.view(torch.bfloat16).to(dtype)

    length = rows.shape[1] * BLOCK // (BLOCK + _SCALE_BYTES)
    blocks = rows[:, :length].view(torch.int8).to(dtype).view(len(rows), -1, BLOCK)
    scales = rows[:, length:].contiguous().view(torch.float32)

    return (blocks * scales.unsqueeze(2)).flatten(1)


class DeltaSum:
    """The sum of one vector over a group, as often as it is started, in two halves that may run
    beside training; and what rounding has left out so far.

    Every replica owns a slice of the sum. In the first half it receives the others' parts of its
    slice and adds them up; in the second it sends the sum of its slice to all: as many bytes as a
    ring all-reduce. Both are rounded, and what rounding leaves out is added the next time (error
    feedback). All replicas get the same bits.

    An all-gather of int8 alone would send more than fp32 from 9 replicas on, and an all-reduce
    cannot add what is rounded to int8."""

    def __init__(self, like: Tensor, wire: Wire, group: dist.ProcessGroup) -> None:
        """`wire`: fp32 (as the vector is), bf16 or int8."""
        self._wire = wire
        self._group = group
        self._size = like.numel()
        self._dtype = like.dtype
        self._device = like.device

        self._count = dist.get_world_size(group)
        self._length = -(-self._size // (self._count * BLOCK)) * BLOCK
        """Of a replica's slice, in whole blocks: the last one may be longer than what is left."""

        # gloo has no all-to-all between GPUs.
        is_gloo = dist.get_backend(group) == "gloo"
        self._wire_device = torch.device("cpu") if is_gloo else like.device

        self._errors: dict[str, Tensor] = {}
        """What rounding has left out, in each half."""

        if wire != "fp32":
            self._errors["error"] = like.new_zeros(self._count, self._length)
            self._errors["slice_error"] = like.new_zeros(1, self._length)

        self._work: Any = None
        """What is on its way; None: nothing."""

        self._is_second_half = False
        self._sent = like.new_empty(0)
        self._received = self._sent
        self._result: Tensor | None = None
        """The sum, between `settle` and `take`."""

    def start(self, values: Tensor) -> None:
        """Collective: begin the first half. Each slice goes to the replica that owns it."""
        padded = values.new_zeros(self._count * self._length)
        padded[: self._size] = values
        slices = padded.view(self._count, self._length)

        self._sent = self._rounded(slices, "error")
        self._received = torch.empty_like(self._sent)

        self._work = dist.all_to_all_single(
            self._received,
            self._sent,
            group=self._group,
            async_op=True,
        )

        self._is_second_half = False

    def advance(self) -> None:
        """Collective: wait for the first half, and begin the second; nothing if that was done."""
        if self._work is None or self._is_second_half:
            return

        self._work.wait()
        sum_of_slice = self._decoded().sum(0, keepdim=True)

        self._sent = self._rounded(sum_of_slice, "slice_error")
        self._received = self._sent.new_empty(self._count, self._sent.shape[1])

        # torch renames the function that needs no list.
        self._work = dist.all_gather(
            list(torch.split(self._received, 1)),
            self._sent,
            group=self._group,
            async_op=True,
        )

        self._is_second_half = True

    def settle(self) -> Tensor:
        """Collective: wait for the sum, and keep it for `take`: a checkpoint is saved before the
        round ends."""
        if self._result is None:
            self.advance()
            self._work.wait()
            self._result = self._decoded().flatten()[: self._size].clone()

            self._work = None
            self._sent = self._result.new_empty(0)
            self._received = self._sent

        return self._result

    def take(self) -> Tensor:
        """Collective: wait for the sum."""
        result = self.settle()
        self._result = None
        return result

    def _decoded(self) -> Tensor:
        """What was received, as values on the vector's own device."""
        return decode(self._received.to(self._device), self._wire, self._dtype)

    def _rounded(self, rows: Tensor, half: str) -> Tensor:
        """The rows to send. What rounding leaves out is kept, and was kept the last time: it is
        added first."""
        error = self._errors.get(half)
        if error is None:
            return encode(rows, self._wire).to(self._wire_device)

        rows = rows + error
        sent = encode(rows, self._wire)
        torch.sub(rows, decode(sent, self._wire, self._dtype), out=error)

        return sent.to(self._wire_device)

    def state_dict(self) -> dict[str, Tensor]:
        """What rounding has left out; and the sum, if it is settled and not taken. Not copied.

        {"error": [replicas, length], "slice_error": [1, length], "result": [size]}
        """
        return self._errors if self._result is None else {**self._errors, "result": self._result}

    def load_state_dict(self, state: Mapping[str, Tensor], *, has_result: bool) -> None:
        """That of the same replica among as many. `has_result`: it was saved while a sum was on its
        way."""
        for half, error in self._errors.items():
            error.copy_(state[half])
        if has_result:
            self._result = state["result"].to(self._device, self._dtype, copy=True)
