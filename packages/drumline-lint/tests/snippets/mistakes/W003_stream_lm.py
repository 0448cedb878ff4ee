"""Byte language model over a folder of text files.   torchrun --nproc_per_node=8 stream_lm.py"""
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CONTEXT, STEPS = 512, 50_000


class ByteStream(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __iter__(self):
        info = get_worker_info()
        mine = self.files[info.id::info.num_workers]
        while True:
            for name in mine:
                with open(name, "rb") as f:
                    while chunk := f.read(CONTEXT + 1):
                        if len(chunk) == CONTEXT + 1:
                            yield torch.frombuffer(bytearray(chunk), dtype=torch.uint8).long()


class ByteGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(256, 512)
        self.rnn = nn.GRU(512, 1024, num_layers=2, batch_first=True)
        self.head = nn.Linear(1024, 256)

    def forward(self, x):
        return self.head(self.rnn(self.emb(x))[0])


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
files = sorted(glob.glob("/data/books/*.txt"))
loader = iter(DataLoader(ByteStream(files), batch_size=32, num_workers=4))
model = DDP(ByteGRU().cuda(), device_ids=[local_rank])
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step in range(STEPS):
    batch = next(loader).cuda()
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 1000 == 0 and dist.get_rank() == 0:
        print(step, loss.item())
        torch.save(model.module.state_dict(), "bytegru.pt")

dist.destroy_process_group()
