import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Tagger(nn.Module):
    def __init__(self, dim=80, labels=500):
        super().__init__()
        self.rnn = nn.GRU(dim, 512, 4, batch_first=True)
        self.out = nn.Linear(512, labels)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class Engine:
    def __init__(self, s):
        self.s = s
        self.local_rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.local_rank)
        dist.init_process_group("nccl")
        torch.manual_seed(dist.get_rank())
        self.device = torch.device("cuda", self.local_rank)
        blob = torch.load(s.features, map_location="cpu", weights_only=True)
        ds = TensorDataset(blob["x"], blob["y"])
        self.sampler = DistributedSampler(ds, drop_last=True)
        self.loader = DataLoader(ds, s.batch_size, sampler=self.sampler, drop_last=True)
        self.model = DDP(Tagger().to(self.device), device_ids=[self.local_rank])
        self.optim = torch.optim.Adam(self.model.parameters(), lr=s.lr)

    def train_epoch(self):
        accum = self.s.accum_grad
        self.model.train()
        self.optim.zero_grad()
        for batch_idx, (x, y) in enumerate(self.loader):
            ctx = nullcontext if batch_idx % accum == 0 else self.model.no_sync
            with ctx():
                logits = self.model(x.to(self.device))
                loss = nn.functional.cross_entropy(logits.transpose(1, 2), y.to(self.device))
                (loss / accum).backward()
            if (batch_idx + 1) % accum == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
                self.optim.step()
                self.optim.zero_grad()

    def run(self):
        for epoch in range(self.s.epochs):
            self.sampler.set_epoch(epoch)
            self.train_epoch()
            if dist.get_rank() == 0:
                torch.save(self.model.module.state_dict(), f"tagger_{epoch}.pt")
