import json
import random

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info


class ShardedJsonl(IterableDataset):
    def __init__(self, files, tokenizer, block, seed=0):
        self.files, self.tokenizer, self.block, self.seed = sorted(files), tokenizer, block, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def my_files(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        shards = self.world * workers
        if len(self.files) < shards:
            raise ValueError(f"{len(self.files)} files for {shards} readers")
        return self.files[self.rank * workers + worker :: shards]

    def __iter__(self):
        files = self.my_files()
        rng = random.Random(f"{self.seed}-{files[0]}")
        buf = []
        while True:
            rng.shuffle(files)
            for path in files:
                with open(path) as f:
                    for line in f:
                        buf += self.tokenizer(json.loads(line)["text"])["input_ids"] + [self.tokenizer.eos_token_id]
                        while len(buf) >= self.block:
                            yield torch.tensor(buf[: self.block])
                            buf = buf[self.block :]
