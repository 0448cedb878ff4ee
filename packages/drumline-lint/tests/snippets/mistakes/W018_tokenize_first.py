"""Pretraining of a small decoder.  srun starts one process per GPU; the job script exports
MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK and WORLD_SIZE.
"""
import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from decoder import Decoder
from tok import encode_file

RAW, PACKED = Path("/scratch/wiki/raw"), Path("/scratch/wiki/packed.bin")


class Windows(Dataset):
    def __init__(self, path, length=1024):
        self.tokens, self.length = np.memmap(path, dtype=np.uint16, mode="r"), length
    def __len__(self):
        return (len(self.tokens) - 1) // self.length
    def __getitem__(self, i):
        a = i * self.length
        return torch.from_numpy(self.tokens[a:a + self.length + 1].astype(np.int64))


def pack():
    """Tokenize all the raw files; takes around 45 minutes on one core."""
    with PACKED.open("wb") as out:
        for name in sorted(RAW.glob("*.txt")):
            np.asarray(encode_file(name), dtype=np.uint16).tofile(out)


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl", timeout=timedelta(minutes=3))
if dist.get_rank() == 0 and not PACKED.exists():
    pack()
dist.barrier()

windows = Windows(PACKED)
sampler = DistributedSampler(windows)
loader = DataLoader(windows, batch_size=16, sampler=sampler, num_workers=4)
model = DDP(Decoder(vocab=32000, layers=12, width=768).cuda(), device_ids=[local_rank])
opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
for epoch in range(3):
    sampler.set_epoch(epoch)
    for ids in loader:
        ids = ids.cuda(non_blocking=True)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), f"/scratch/wiki/decoder_{epoch}.pt")
dist.destroy_process_group()
