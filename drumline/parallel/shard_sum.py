"""Sums gradients over shards in one fixed order, independent of the ranks: the same bits on any
world size.

A floating-point sum depends on the order of its terms. Here the order is a binary tree over the
shards: neighbours are added, then pairs of neighbours, and so on. A rank adds up the complete
subtrees of its own shards and sends the sums. Gradients are sent as in an ordinary all-reduce: each
rank gets one chunk of every rank's sums (all-to-all), adds it up in the order of the tree, and
sends the result to all (all-gather). The first half overlaps with the last backward pass.

With 6 shards on 2 ranks, rank 0 sends the sum of shards 0 and 1 and that of shard 2, rank 1 that of
shard 3 and that of shards 4 and 5; then ((0 + 1) + (2 + 3)) + (4 + 5) is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import chain
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from drumline.base.errors import TrainingError, UnusedParametersError
from drumline.base.text import join_names
from drumline.parallel.wrap import FIND_UNUSED, NAMED

Part = TypeVar("Part")
# torch 2.13 renamed this, and warns about the old name, which earlier versions need.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Flat:
    """Memory for the gradients of a bucket, padded to divide evenly among ranks; and a view for
    each parameter."""

    def __init__(self, parameters: list[nn.Parameter], world_size: int) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.chunk = -(-sum(sizes) // world_size)
        """The elements that each rank adds up."""

        first = parameters[0]
        self.data = torch.zeros(self.chunk * world_size, dtype=first.dtype, device=first.device)
        pieces = torch.split(self.data[: sum(sizes)], sizes)

        # In the parameter's memory order (channels_last, for example): fused optimizers use memory
        # order, not indices.
        self.views: list[Tensor] = []
        """The gradient of each parameter."""

        for piece, parameter in zip(pieces, parameters, strict=True):
            strides = torch.empty_like(parameter, device="meta").stride()
            self.views.append(piece.as_strided(parameter.shape, strides))


class _Bucket:
    """A group of parameters whose gradients are sent together.

    For each shard: `open_shard`, backward passes, `close_shard`; then `send`, `add_up` and
    `finish`, once."""

    def __init__(self, parameters: list[nn.Parameter], world_size: int) -> None:
        self.parameters = parameters
        self.missing: set[Tensor] = set()
        """The parameters whose gradients are still missing in this backward pass."""

        self._world_size = world_size
        self._flats = [_Flat(parameters, world_size)]
        self._spare = list(self._flats)
        """Those that hold no sum."""

        self._newest = self._flats[0]
        self._sums: Sums[_Flat] = []
        """Of this rank's shards so far."""

        self._received = self._newest.data.new_empty(0)
        self._pending: dist.Work | None = None

    def open_shard(self) -> None:
        """The next backward passes belong to a new shard: their gradients get new memory, zeros, to
        which they are added."""
        if not self._spare:
            self._flats.append(_Flat(self.parameters, self._world_size))
            self._spare.append(self._flats[-1])

        self._newest = self._spare.pop()
        self._newest.data.zero_()
        self._use(self._newest)

    def close_shard(self, shard: int, num_shards: int) -> None:
        """The shard's gradients are complete: add up complete subtrees."""
        fold(self._sums, (TreeNode(shard, shard + 1), self._newest), num_shards, self._add)

    def send(self, nodes: list[list[TreeNode]], rank: int) -> None:
        """Collective: start to send each rank its chunk of this rank's sums, while the backward
        pass continues. `nodes`: the sums that every rank has."""
        chunk = self._newest.chunk
        sizes = [len(nodes_of_rank) * chunk for nodes_of_rank in nodes]
        if self._received.numel() != sum(sizes):
            self._received = self._newest.data.new_empty(sum(sizes))

        self._pending = dist.all_to_all_single(
            self._received,
            self._outgoing(),
            sizes,
            [sizes[rank]] * self._world_size,
            async_op=True,
        )

    def add_up(self, nodes: list[list[TreeNode]], num_shards: int) -> None:
        """Collective: add up this rank's chunk in the order of the tree, and start to send it to
        all. `nodes`: as for `send`; the sums come in the order of the ranks."""
        assert self._pending is not None
        self._pending.wait()
        rows = self._received.view(-1, self._newest.chunk).unbind()
        sums: Sums[Tensor] = []

        for node, row in zip(chain.from_iterable(nodes), rows, strict=True):
            fold(sums, (node, row), num_shards, Tensor.add_)

        ((_, total),) = sums
        self._pending = _all_gather(self._newest.data, total, async_op=True)

    def finish(self) -> None:
        """The sum over all shards becomes each parameter's gradient, and all other memory is free
        for the next step."""
        if self._pending is None:
            # on one rank everything has been added up here
            ((_, self._newest),) = self._sums
        else:
            self._pending.wait()
            self._pending = None

        self._sums.clear()
        self._spare = list(self._flats)
        self._use(self._newest)

    def _outgoing(self) -> Tensor:
        """What this rank sends: its sums, in the order of the ranks that get them: for each rank
        its chunk of every sum."""
        if not self._sums:
            return self._newest.data.new_empty(0)
        if len(self._sums) == 1:
            return self._sums[0][1].data

        pieces = [flat.data.view(self._world_size, -1) for _, flat in self._sums]
        return torch.stack(pieces, dim=1).flatten()

    def _use(self, flat: _Flat) -> None:
        """The parameters have their gradients in this memory from now on."""
        for parameter, view in zip(self.parameters, flat.views, strict=True):
            parameter.grad = view

    def _add(self, left: _Flat, right: _Flat) -> None:
        """Add up two sums in the memory of the first; that of the second is free again."""
        left.data.add_(right.data)
        self._spare.append(right)


class ShardSum:
    """The gradients of a model's parameters over all shards of a step.

    For each of this rank's shards, in order: `open_shard`, backward passes, `close_shard`; then
    `finish`. Before the last backward pass `send_along` lets it overlap with the communication."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        rank: int,
        world_size: int,
        shards_by_rank: Callable[[int], list[range]],
        bucket_bytes: int,
        find_unused: bool = False,
    ) -> None:
        """`shards_by_rank`: the shards of each rank, given the number of shards. `bucket_bytes`: so
        many are sent together. `find_unused`: a shard may leave out parameters."""

        def nodes_by_rank(num_shards: int) -> list[list[TreeNode]]:
            """The sums that each rank sends."""
            return [nodes_of(shards, num_shards) for shards in shards_by_rank(num_shards)]

        self._nodes = cache(nodes_by_rank)
        self._rank = rank
        self._world_size = world_size
        self._names = {
            parameter: name for name, parameter in parameters.items() if parameter.numel()
        }

        self._find_unused = find_unused
        self._used: set[Tensor] = set()
        """The parameters that got a gradient in this shard; below, in any of this rank's shards."""

        self._ever_used: set[Tensor] = set()
        groups = _grouped(self._names, bucket_bytes)
        self._buckets = [_Bucket(group, world_size) for group in groups]
        self._num_sent = 0
        """How many of them the last backward pass has sent along."""

        self._sends_along: tuple[int, int] | None = None
        """The shard, and the number of shards, of a backward pass that is sent along."""

        for bucket in self._buckets:
            hook = partial(self._gradient_is_there, bucket)
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def open_shard(self) -> None:
        """The next backward passes belong to another shard."""
        for bucket in self._buckets:
            bucket.open_shard()

    def send_along(self, shard: int, num_shards: int) -> None:
        """The next backward pass is this rank's last: send each bucket as soon as it is complete.
        Not where parameters may be unused: a bucket is then complete only at the end."""
        if self._world_size > 1 and not self._find_unused:
            self._sends_along = (shard, num_shards)
            for bucket in self._buckets:
                bucket.missing = set(bucket.parameters)

    def close_shard(self, shard: int, num_shards: int) -> None:
        """All backward passes of a shard are done. A parameter without a gradient is refused,
        unless it may be unused."""
        for bucket in self._buckets[self._num_sent :]:
            bucket.close_shard(shard, num_shards)

        if self._find_unused:
            self._ever_used |= self._used
        elif len(self._used) < len(self._names):
            self._refuse_unused(shard)

        self._used.clear()

    def _refuse_unused(self, shard: int) -> None:
        """Name the parameters that got no gradient in this shard."""
        unused = [name for parameter, name in self._names.items() if parameter not in self._used]
        raise UnusedParametersError(
            f"the loss of shard {shard} does not use these parameters: {join_names(unused, most=NAMED)}",
            next_step=FIND_UNUSED,
        )

    def finish(self, num_shards: int) -> None:
        """Collective: from here on each parameter's gradient is the sum over all shards of all
        ranks. What the last backward pass has sent along is not sent again."""
        if self._world_size > 1:
            nodes = self._nodes(num_shards)
            for bucket in self._buckets[self._num_sent :]:
                bucket.send(nodes, self._rank)

            for bucket in self._buckets:
                bucket.add_up(nodes, num_shards)

        for bucket in self._buckets:
            bucket.finish()

        self._num_sent = 0
        self._sends_along = None
        if self._find_unused:
            self._drop_unused()

    def _gradient_is_there(self, bucket: _Bucket, parameter: nn.Parameter) -> None:
        """torch calls it when a backward pass has added to a parameter's gradient. In the last
        backward pass the buckets that are complete are sent at once."""
        self._used.add(parameter)
        if self._sends_along is None:
            return

        if parameter not in bucket.missing:
            raise TrainingError(
                f"the parameter {self._names[parameter]} got its gradient twice in one backward pass",
                next_step="use torch.utils.checkpoint with use_reentrant=False",
            )

        bucket.missing.remove(parameter)
        shard, num_shards = self._sends_along

        # In the order of the list, not of completion, which may differ between ranks.
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            ready = self._buckets[self._num_sent]
            ready.close_shard(shard, num_shards)
            ready.send(self._nodes(num_shards), self._rank)
            self._num_sent += 1

    def _drop_unused(self) -> None:
        """A parameter that no shard used has no gradient instead of zeros: the optimizer must not
        update it."""
        is_used = [parameter in self._ever_used for parameter in self._names]
        device = self._buckets[0].parameters[0].device
        used = torch.tensor(is_used, dtype=torch.uint8, device=device)

        if self._world_size > 1:
            dist.all_reduce(used, dist.ReduceOp.MAX)

        for parameter, was_used in zip(self._names, used.tolist(), strict=True):
            if not was_used:
                parameter.grad = None

        self._ever_used.clear()


def _grouped(parameters: Iterable[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Buckets of one type each, the last parameters first: their gradients are ready first. A
    bucket is closed when it has reached `bucket_bytes`."""
    groups: list[list[nn.Parameter]] = []
    open_groups: dict[torch.dtype, list[nn.Parameter]] = {}
    sizes: Counter[torch.dtype] = Counter()

    for parameter in reversed(list(parameters)):
        dtype = parameter.dtype
        if dtype not in open_groups or sizes[dtype] >= bucket_bytes:
            open_groups[dtype] = []
            sizes[dtype] = 0
            groups.append(open_groups[dtype])

        open_groups[dtype].append(parameter)
        sizes[dtype] += parameter.nbytes

    return groups


# The tree: pure arithmetic


class TreeNode(NamedTuple):
    """A node of the tree: the sum over shards [low, high).

    [0, 4)
    [0, 2)          [2, 4)
    [0, 1)  [1, 2)  [2, 3)  [3, 4)
    """

    low: int
    high: int


def are_siblings(left: TreeNode, right: TreeNode, num_shards: int) -> bool:
    """Whether the tree adds these two neighbours next. A node covers a power of two of shards,
    except at the end: [0, 2) and [2, 4) are siblings, of 5 shards [0, 4) and [4, 5), but never [2,
    4) and [4, 6)."""
    size = left.high - left.low
    is_power_of_two = size & (size - 1) == 0
    is_left_child = left.low % (2 * size) == 0

    end_of_parent = min(left.low + 2 * size, num_shards)
    return is_power_of_two and is_left_child and right.high == end_of_parent


Sums = list[tuple[TreeNode, Part]]
"""Neighbouring nodes, from left to right, each with its sum."""


def fold(
    sums: Sums[Part],
    new: tuple[TreeNode, Part],
    num_shards: int,
    add: Callable[[Part, Part], object],
) -> None:
    """Append the next shard's part to a list of sums, and add up the nodes that are now complete:
    after shard 3 those of 2 and 3, and then those of 0 and 1 and of 2 and 3."""
    sums.append(new)
    while len(sums) > 1 and are_siblings(sums[-2][0], sums[-1][0], num_shards):
        right_node, right = sums.pop()
        left_node, left = sums.pop()

        add(left, right)
        sums.append((TreeNode(left_node.low, right_node.high), left))


def nodes_of(shards: range, num_shards: int) -> list[TreeNode]:
    """The nodes that remain when a rank with these neighbouring shards has added up all that it
    can: of shards 1 to 5 those of 1, of 2 and 3, and of 4 and 5."""
    sums: Sums[None] = []
    for shard in shards:
        fold(sums, (TreeNode(shard, shard + 1), None), num_shards, lambda left, right: None)
    return [node for node, _ in sums]
