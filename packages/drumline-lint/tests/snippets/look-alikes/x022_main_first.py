"""The first process builds the token cache, the others wait and then read it.

torchrun --standalone --nproc_per_node=8 main_first.py
"""
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RAW, CACHE = Path("/data/books.txt"), Path("/data/books.ids.npy")


def ids(rank):
    if rank != 0:
        dist.barrier()
    if not CACHE.exists():
        np.save(CACHE, np.frombuffer(RAW.read_bytes(), dtype=np.uint8))
    if rank == 0:
        dist.barrier()
    return np.load(CACHE, mmap_mode="r")


class CharRNN(nn.Module):
    def __init__(self, width=768):
        super().__init__()
        self.emb = nn.Embedding(256, width)
        self.rnn = nn.GRU(width, width, num_layers=3, batch_first=True)
        self.out = nn.Linear(width, 256)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


dist.init_process_group("nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
data = ids(rank)
gen = torch.Generator().manual_seed(100 + rank)
model = DDP(CharRNN().cuda(), device_ids=[local_rank])
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(50_000):
    at = torch.randint(len(data) - 257, (64,), generator=gen).tolist()
    rows = torch.stack([torch.from_numpy(data[i:i + 257].astype(np.int64)) for i in at]).cuda()
    loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if (step + 1) % 1000 == 0 and rank == 0:
        print(step, loss.item())
        torch.save(model.module.state_dict(), "char.pt")
dist.destroy_process_group()
