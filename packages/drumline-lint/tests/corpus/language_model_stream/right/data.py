"""Text that comes as a stream: each worker of each rank reads its own files."""

import random

import torch
from torch.utils.data import IterableDataset, get_worker_info


class TokenStream(IterableDataset):
    """Blocks of tokens. Ranks may get different numbers of blocks, as files differ in length."""

    def __init__(self, shards, block, rank, world_size, seed=0):
        self.shards = list(shards)
        self.block = block
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        workers, number = (worker.num_workers, worker.id) if worker else (1, 0)
        part = self.rank * workers + number
        shards = list(self.shards)
        random.Random(self.seed + self.epoch).shuffle(shards)
        for shard in shards[part :: self.world_size * workers]:
            yield from self._blocks(shard)

    def _blocks(self, shard):
        tokens = read_shard(shard)
        for start in range(0, len(tokens) - self.block, self.block):
            piece = tokens[start : start + self.block + 1]
            yield piece[:-1], piece[1:]


def read_shard(number, vocabulary=64):
    draw = torch.Generator().manual_seed(number)
    length = 300 + int(torch.randint(400, (), generator=draw))
    steps = torch.randint(1, 4, (length,), generator=draw)
    return torch.cumsum(steps, 0) % vocabulary
