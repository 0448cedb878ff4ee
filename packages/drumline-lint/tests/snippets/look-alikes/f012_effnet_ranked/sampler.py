import torch
import torch.distributed as dist
from torch.utils.data import Sampler


class RankedShuffle(Sampler):
    """Shards a fresh shuffle over the ranks; a new order every time it is iterated."""

    def __init__(self, length, seed=0):
        self.length = length
        self.seed = seed
        self.passes = 0
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def __iter__(self):
        gen = torch.Generator()
        gen.manual_seed(self.seed + self.passes)
        self.passes += 1
        order = torch.randperm(self.length, generator=gen).tolist()
        usable = len(self) * self.world_size
        return iter(order[self.rank:usable:self.world_size])

    def __len__(self):
        return self.length // self.world_size
