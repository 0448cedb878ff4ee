import random

from torch.utils.data import Sampler


class BucketBatches(Sampler):
    """Batches of like lengths; each process takes every world-th one."""

    def __init__(self, lengths, batch_size, rank, world, seed=7):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batch_size, self.rank, self.world, self.seed = batch_size, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return len(self.order) // self.batch_size // self.world

    def __iter__(self):
        b = self.batch_size
        batches = [self.order[i:i + b] for i in range(0, len(self.order) - b + 1, b)]
        random.Random(self.seed + self.epoch).shuffle(batches)
        usable = len(self) * self.world
        yield from batches[self.rank:usable:self.world]
