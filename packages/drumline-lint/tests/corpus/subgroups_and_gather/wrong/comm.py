"""Groups of ranks: those of a node, and one leader of each node."""

from datetime import timedelta

import torch
import torch.distributed as dist


class Groups:
    def __init__(self, per_node):
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.per_node = per_node
        self.leader_ranks = list(range(0, self.world_size, per_node))
        self.leaders = None
        if self.rank == 0:
            self.leaders = dist.new_group(self.leader_ranks, timeout=timedelta(minutes=5))  # <- collective-on-some-ranks
        self.node = None
        for first in self.leader_ranks:
            members = list(range(first, min(first + per_node, self.world_size)))
            group = dist.new_group(members, timeout=timedelta(minutes=5))
            if self.rank in members:
                self.node = group

    @property
    def is_leader(self):
        return self.rank in self.leader_ranks

    @property
    def first_of_node(self):
        return self.rank // self.per_node * self.per_node

    def two_level_sum(self, tensor):
        """Within nodes, then between leaders, then back: the middle part is the leaders' alone."""
        dist.reduce(tensor, dst=self.first_of_node, group=self.node)
        if self.is_leader:
            dist.all_reduce(tensor, group=self.leaders)
        dist.broadcast(tensor, src=self.first_of_node, group=self.node)
        return tensor


def gather_rows(row):
    """A row of every rank, on rank 0; None elsewhere."""
    if dist.get_rank() != 0:
        return None  # <- exit-before-collective
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.gather(row, gather_list=rows, dst=0)
    return torch.stack(rows)


def from_first(value):
    """What rank 0 knows, on all ranks."""
    box = [value]
    if dist.get_rank() == 0:
        dist.broadcast_object_list(box, src=0)  # <- collective-on-some-ranks
    return box[0]


def pass_on(tensor):
    """Along the ranks in turn; each send has its receive."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank > 0:
        dist.recv(tensor, src=rank - 1)
    if rank < last:
        dist.send(tensor + 1, dst=rank + 1)
    return tensor


def all_agree(flag, device):
    vote = torch.tensor([1 if flag else 0], device=device)
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())
