"""Stream tokenised shards; split over ranks and loader workers.
torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=$HEAD:29500 stream_shards.py
"""
import glob
import itertools
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import GPT2Config, GPT2LMHeadModel


class ShardStream(IterableDataset):
    def __init__(self, pattern, rank, world, ctx=1024):
        self.files = sorted(glob.glob(pattern))
        self.rank, self.world, self.ctx = rank, world, ctx

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        slot, slots = self.rank * nw + wid, self.world * nw
        for epoch in itertools.count():
            order = list(self.files)
            random.Random(epoch).shuffle(order)
            for path in order[slot::slots]:
                a = np.load(path, mmap_mode="r")
                for i in range(len(a) // self.ctx):
                    yield torch.from_numpy(a[i * self.ctx:(i + 1) * self.ctx].astype(np.int64))


def main(steps=50_000):
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    stream = ShardStream("/data/tokens/*.npy", rank, world)
    assert len(stream.files) >= world * 4
    loader = DataLoader(stream, batch_size=16, num_workers=4, pin_memory=True)
    model = DDP(GPT2LMHeadModel(GPT2Config()).cuda(), device_ids=[gpu])
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step, ids in zip(range(steps), loader):
        ids = ids.cuda(non_blocking=True)
        loss = model(input_ids=ids, labels=ids).loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 100 == 0:
            print(step, loss.item(), flush=True)
    if rank == 0:
        model.module.save_pretrained("gpt2-stream")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
