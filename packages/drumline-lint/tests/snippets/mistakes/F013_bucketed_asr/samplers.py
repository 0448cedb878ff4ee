import math
import random

import torch.distributed as dist


class DistributedBucketSampler:
    """Batches of utterances of similar length, dealt out to the ranks."""

    def __init__(self, durations, batch_seconds=200.0, seed=13, num_replicas=None, rank=None):
        self.num_replicas = num_replicas if num_replicas is not None else dist.get_world_size()
        self.rank = rank if rank is not None else dist.get_rank()
        self.seed = seed
        self.epoch = 0
        self.batches = self._make_batches(durations, batch_seconds)
        self.num_batches = math.ceil(len(self.batches) / self.num_replicas)

    @staticmethod
    def _make_batches(durations, batch_seconds):
        order = sorted(range(len(durations)), key=lambda i: durations[i])
        batches, current = [], []
        for i in order:
            if current and durations[i] * (len(current) + 1) > batch_seconds:
                batches.append(current)
                current = []
            current.append(i)
        if current:
            batches.append(current)
        return batches

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.seed + self.epoch)
        batches = list(self.batches)
        rng.shuffle(batches)
        total = self.num_batches * self.num_replicas
        batches += batches[: total - len(batches)]
        return iter(batches[self.rank:total:self.num_replicas])

    def __len__(self):
        return self.num_batches
